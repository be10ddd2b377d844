"""One request's mailbox: tokens come in from the engine client's batch callback, text goes out to a listener.

Nothing here wakes a task per token: a stream's listener is called straight from the batch callback.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from ...ipc.frontend_messages import FinishReason
from ...ipc.sampling import Grammar, ThoughtLimit
from ..text.detokenizer import Detokenizer, NoText
from ..text.model_text import ModelText
from ..text.stop_strings import StopMatcher, StopStrings
from .sampling import SamplingParams

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have
_NO_TEXT = NoText()


class TokenLogprob(Struct, frozen=True, array_like=True, gc=False):
    """One token's log-probability, its rank (1 is the likeliest) and the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """One prompt with its sampling. `is_continuation`: the output continues the prompt's text, as in completions.
    `grammar_field` is the field by which the client asked for the grammar, to be named where it cannot be honoured.
    `kept_controls` are the texts of control tokens that are shown even where such are skipped: a parser reads them.
    `truncated_tokens` were cut off the prompt because the client asked for that. `thought` limits the reasoning.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    is_continuation: bool = False
    grammar: Grammar | None = None
    grammar_field: str = ""
    kept_controls: Mapping[int, str] = {}
    truncated_tokens: int | None = None
    thought: ThoughtLimit | None = None


class SequenceListener(Protocol):
    """What wants one sequence's text as it comes."""

    def show(self, text: str) -> None:
        """More text, never empty."""

    def finish(self) -> None:
        """The sequence has its finish reason; nothing follows."""


class GenerationListener(Protocol):
    """What wants a whole request's text as it comes."""

    def open_sequence(self, sequence: "SequenceOutput") -> SequenceListener | None:
        """Called once per choice, before any text. None: keep the text for `Generation.text`."""

    def end(self, generation: "Generation") -> None:
        """All sequences finished, or the request failed (`error`). Called exactly once, unless closed before."""


class SequenceOutput:
    """One choice of a request. `deliver(token_id)` takes one more token; it is replaced when the sequence ends."""

    __slots__ = (
        "_add",
        "_detokenizer",
        "_listener",
        "_matcher",
        "_num_logprob_bytes",
        "_num_shown_bytes",
        "_show",
        "choice",
        "deliver",
        "finish_reason",
        "generation",
        "logprobs",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self, generation: "Generation", choice: int, detokenizer: Detokenizer, matcher: StopMatcher | None
    ) -> None:
        self.generation = generation
        self._detokenizer = detokenizer
        self._add = detokenizer.add
        self._matcher = matcher
        self._num_shown_bytes = 0
        self._num_logprob_bytes = 0
        self.choice = choice
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []  # those not yet taken
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.deliver: Callable[[int], None] = self._way_of_tokens()

    @property
    def num_tokens(self) -> int:
        """Those so far."""
        return len(self.token_ids)

    def hear(self, on_token: Callable[[], object]) -> None:
        """Call this after every token, for a listener that reads `token_ids`; set once, before any token."""
        take = self.deliver

        def deliver(token_id: int) -> None:
            take(token_id)
            on_token()

        self.deliver = deliver

    def listen(self, listener: SequenceListener) -> None:
        """Where text goes; set once, before any token."""
        self._listener = listener
        self._show = listener.show if self.generation.request.params.logprobs is None else self._show_counted

    def take_logprobs(self) -> list[TokenLogprob]:
        """Those of the tokens since the last call."""
        taken, self.logprobs = self.logprobs, []
        return taken

    def add_logprob(self, entry: TokenLogprob) -> None:
        """Comes before its token is delivered."""
        if self.finish_reason is None:
            self.logprobs.append(entry)
            self._num_logprob_bytes += len(self.generation.shown_bytes(entry.token_id))

    def end(self, reason: FinishReason, last_token: int | None) -> None:
        """The core ended the sequence, with this token if any."""
        if self.finish_reason is not None or self.generation.has_ended:
            return
        params = self.generation.request.params
        if last_token is not None:
            hides = reason is FinishReason.END_TOKEN or (
                reason is FinishReason.STOP_TOKEN and not params.include_stop_str_in_output
            )
            if hides:
                self.token_ids.append(last_token)
                del self.logprobs[-1:]
            else:
                self.deliver(last_token)
        if self.finish_reason is None:
            self._end_with_rest(reason, last_token)

    def cut(self) -> None:
        """The listener wants nothing more: the sequence has stopped."""
        self.generation.finish_sequence(self.choice)
        self._finish("stop")

    def close(self) -> None:
        """Take no more tokens and show nothing more."""
        self.deliver = _ignore

    def _way_of_tokens(self) -> Callable[[int], None]:
        if self._detokenizer is _NO_TEXT:
            return self.token_ids.append
        return self._deliver if self._matcher is None else self._deliver_matching

    def _deliver(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        text = self._add(token_id)
        if text:
            self._show(text)

    def _deliver_matching(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        text = self._add(token_id)
        if text:
            self._show_matched(text)

    def _show_matched(self, text: str) -> None:
        assert self._matcher is not None
        if self.num_tokens < self.generation.request.params.min_tokens:
            self._show(text)
            return
        cut = self._matcher.feed(text)
        if cut.text:
            self._show(cut.text)
        if cut.stop is not None and self.finish_reason is None:
            self.stop_reason = cut.stop
            self._drop_hidden_logprobs()
            self.generation.finish_sequence(self.choice)
            self._finish("stop")

    def _show_counted(self, text: str) -> None:
        self._num_shown_bytes += len(text.encode("utf-8", "replace"))
        self._listener.show(text)

    def _end_with_rest(self, reason: FinishReason, last_token: int | None) -> None:
        rest = self._detokenizer.flush()
        if self._matcher is not None:
            if rest:
                self._show_matched(rest)
            if self.finish_reason is not None:
                return
            rest = self._matcher.flush()
        if rest:
            self._show(rest)
        if self.finish_reason is not None:
            return
        if reason is FinishReason.STOP_TOKEN:
            self.stop_reason = last_token
        self._finish("length" if reason is FinishReason.LENGTH else "stop")

    def _finish(self, finish_reason: str) -> None:
        self.finish_reason = finish_reason
        self.deliver = _ignore
        self._listener.finish()
        self.generation.sequence_finished()

    def _drop_hidden_logprobs(self) -> None:
        """Entries of tokens that lie wholly behind the cut of a stop string."""
        while self.logprobs:
            size = len(self.generation.shown_bytes(self.logprobs[-1].token_id))
            if self._num_logprob_bytes - size < self._num_shown_bytes:
                return
            self._num_logprob_bytes -= size
            self.logprobs.pop()


def _ignore(token_id: int) -> None:
    """A token that was already on its way when the sequence ended."""


class _Collected:
    """The listener of whoever wants only the whole text."""

    __slots__ = ("pieces", "show")

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.show = self.pieces.append

    def finish(self) -> None:
        """Nothing to tell anybody."""


class Generation:
    """One live request. Ends in exactly one of: all sequences finished, `error` set, or closed by its owner."""

    def __init__(
        self,
        request_id: int,
        request: GenerationRequest,
        model: ModelText,
        finish_sequence: Callable[["Generation", int], None],
        listener: GenerationListener | None = None,
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.core_incarnation = 0
        self.cached_tokens = 0
        self.error: Exception | None = None
        self.arrival_s = time.monotonic()
        self.prompt_logprobs: list[TokenLogprob] = []
        self.is_closed = False
        self._model = model
        self._finish_sequence = finish_sequence
        self._listener = listener
        self._num_open = request.params.n
        self._ended: asyncio.Future[None] | None = None
        self._collected: list[_Collected] = []
        self.sequences = self._open_sequences()

    @property
    def has_ended(self) -> bool:
        """All finished, failed or closed."""
        return self._num_open == 0 or self.error is not None or self.is_closed

    @property
    def num_tokens(self) -> int:
        """Output tokens over all choices."""
        return sum(sequence.num_tokens for sequence in self.sequences)

    def text(self, choice: int) -> str:
        """The whole text of a choice that has no listener of its own."""
        return "".join(self._collected[choice].pieces)

    def shown_bytes(self, token_id: int) -> bytes:
        """What the token contributes to the text that is shown."""
        tokenizer = self._model.tokenizer
        is_hidden = token_id in tokenizer.control_ids and token_id not in self.request.kept_controls
        if self.request.params.skip_special_tokens and is_hidden:
            return b""
        return tokenizer.bytes.of(token_id)

    async def wait(self) -> None:
        """Until the end. Raises what the request failed with."""
        if not self.has_ended:
            self._ended = asyncio.get_running_loop().create_future()
            await self._ended
        if self.error is not None:
            raise self.error

    def sequence_finished(self) -> None:
        """One of the sequences has its finish reason."""
        self._num_open -= 1
        if self._num_open == 0:
            self._end()

    def finish_sequence(self, choice: int) -> None:
        """Tell the core that this choice needs no more tokens."""
        self._finish_sequence(self, choice)

    def fail(self, error: Exception) -> None:
        """Terminal, unless the request has ended already."""
        if self.has_ended:
            return
        self.error = error
        self._close_sequences()
        self._end()

    def close(self) -> None:
        """The owner wants nothing more; no listener is called again."""
        self.is_closed = True
        self._close_sequences()
        self._wake()

    def _close_sequences(self) -> None:
        for sequence in self.sequences:
            sequence.close()

    def _end(self) -> None:
        if self._listener is not None and not self.is_closed:
            self._listener.end(self)
        self._wake()

    def _wake(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _open_sequences(self) -> list[SequenceOutput]:
        params = self.request.params
        strings = StopStrings(params.stop_strings) if params.stop_strings else None
        context: Sequence[int] = self.request.prompt_token_ids if self.request.is_continuation else ()
        return [self._open_sequence(choice, strings, context) for choice in range(params.n)]

    def _open_sequence(self, choice: int, strings: StopStrings | None, context: Sequence[int]) -> SequenceOutput:
        params = self.request.params
        detokenizer = self._detokenizer(params, context)
        matcher = None if strings is None else strings.start(include_stop=params.include_stop_str_in_output)
        sequence = SequenceOutput(self, choice, detokenizer, matcher)
        listener = None if self._listener is None else self._listener.open_sequence(sequence)
        if listener is None:
            listener = _Collected()
            self._collected.append(listener)
        sequence.listen(listener)
        return sequence

    def _detokenizer(self, params: SamplingParams, context: Sequence[int]) -> Detokenizer:
        if not params.detokenize:
            return _NO_TEXT
        return self._model.detokenizers.start(
            skip_special_tokens=params.skip_special_tokens, continues=context, kept=self.request.kept_controls
        )


def finite(logprob: float) -> float:
    """The number, or what stands for minus infinity."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
