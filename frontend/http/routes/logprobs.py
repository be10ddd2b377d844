"""Log-probabilities in the forms of the API families."""

from collections.abc import Sequence

from ...client.generation import Generation, TokenLogprob
from ...text.tokenizer import Tokenizer
from ..schema.chat import ChatLogprobs, ChatTokenLogprob, TopLogprob
from ..schema.completions import CompletionLogprobs
from ..schema.generation import PromptLogprob, PromptLogprobs


class LogprobForms:
    """Names tokens; with `hides_special`, special tokens contribute no bytes, as they contribute no text."""

    def __init__(self, tokenizer: Tokenizer, hides_special: bool) -> None:
        self._tokenizer = tokenizer
        self._hides_special = hides_special

    def chat(self, entries: Sequence[TokenLogprob], num_top: int) -> ChatLogprobs:
        """The chat form; `num_top` alternatives per token."""
        return ChatLogprobs([self._chat_token(entry, num_top) for entry in entries])

    def completion(self, entries: Sequence[TokenLogprob | None], ids: Sequence[int], offset: int) -> CompletionLogprobs:
        """The text completion form; `offset` is where the first token's text begins. None: no log-probability."""
        texts = [self._text(id) for id in ids]
        offsets: list[int] = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return CompletionLogprobs(
            texts,
            [None if entry is None else entry.logprob for entry in entries],
            [None if entry is None else self._candidates(entry, id) for entry, id in zip(entries, ids, strict=True)],
            offsets,
        )

    def prompt(self, generation: Generation, num_top: int) -> PromptLogprobs:
        """Per position of the prompt, candidates by id."""
        ids = generation.request.prompt_token_ids
        return [
            None if entry is None else self._prompt_candidates(entry, id, num_top)
            for entry, id in zip(prompt_entries(generation), ids, strict=True)
        ]

    def _chat_token(self, entry: TokenLogprob, num_top: int) -> ChatTokenLogprob:
        top = [TopLogprob(self._text(id), logprob, list(self._bytes(id))) for id, logprob in entry.top[:num_top]]
        return ChatTokenLogprob(self._text(entry.token_id), entry.logprob, list(self._bytes(entry.token_id)), top)

    def _candidates(self, entry: TokenLogprob, token_id: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for id, logprob in (*entry.top, (token_id, entry.logprob)):
            found.setdefault(self._text(id), logprob)
        return found

    def _prompt_candidates(self, entry: TokenLogprob, token_id: int, num_top: int) -> dict[int, PromptLogprob]:
        found = {token_id: PromptLogprob(entry.logprob, entry.rank, self._text(token_id))}
        for rank, (id, logprob) in enumerate(entry.top[:num_top], 1):
            found.setdefault(id, PromptLogprob(logprob, rank, self._text(id)))
        return found

    def _text(self, id: int) -> str:
        return self._tokenizer.bytes.of(id).decode("utf-8", "replace")

    def _bytes(self, id: int) -> bytes:
        if self._hides_special and id in self._tokenizer.control_ids:
            return b""
        return self._tokenizer.bytes.of(id)


def num_entries(generations: Sequence[Generation]) -> int:
    """How many log-probabilities an answer shows: what making it costs."""
    count = 0
    for generation in generations:
        params = generation.request.params
        count += len(generation.prompt_logprobs) * params.n * (1 + (params.prompt_logprobs or 0))
        count += sum(len(sequence.logprobs) for sequence in generation.sequences) * (1 + (params.logprobs or 0))
    return count


def prompt_entries(generation: Generation) -> list[TokenLogprob | None]:
    """One per prompt token; the first has nothing before it, so nothing to be likely after."""
    missing = len(generation.request.prompt_token_ids) - len(generation.prompt_logprobs)
    assert missing >= 0, "more prompt log-probabilities than prompt tokens"
    return [*([None] * missing), *generation.prompt_logprobs]
