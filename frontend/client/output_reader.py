"""Reads one step's packed outputs and hands each sequence its news."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...ipc.frontend_messages import FinishReason, OutputColumns
from .generation import Generation, TokenLogprob, finite
from .vectors import VectorRequest

_REASONS = tuple(FinishReason)
_NONE = int(FinishReason.NONE)


OnBroken = Callable[[Generation, Exception], None]


def read_outputs(columns: OutputColumns, live: Mapping[int, Generation], on_broken: OnBroken) -> list[int]:
    """Deliver everything; returns the ids of requests for which this was the terminal message.

    `on_broken` hears of a request whose own listener raised: the others of the batch go on.
    """
    request_ids: list[int] = columns.request_ids.tolist()
    is_plain = len(columns.token_ids) == len(request_ids) and not (
        len(columns.logprobs) or len(columns.prompt_logprobs) or len(columns.pooled) or columns.cached_tokens.any()
    )
    if is_plain and (not request_ids or columns.token_counts.min() == 1):
        _deliver_one_each(columns, request_ids, live, on_broken)
    else:
        _deliver_all(columns, request_ids, live, on_broken)
    if not columns.done.any():
        return []
    return [id for id, done in zip(request_ids, columns.done.tolist(), strict=True) if done]


def read_vectors(columns: OutputColumns, live: Mapping[int, VectorRequest]) -> None:
    """Deliver the vectors, each a view of the message."""
    ends = np.cumsum(columns.pooled_dims).tolist()
    entries = zip(columns.request_ids.tolist(), columns.cached_tokens.tolist(), columns.pooled_dims, ends, strict=True)
    for request_id, cached_tokens, num_dimensions, end in entries:
        if num_dimensions and (request := live.get(request_id)) is not None:
            request.take(columns.pooled[end - num_dimensions : end], cached_tokens)


def _deliver_one_each(
    columns: OutputColumns, request_ids: list[int], live: Mapping[int, Generation], on_broken: OnBroken
) -> None:
    """The path of nearly every step: one token for each sequence, nothing else. Runs per token."""
    choices, tokens, finish = columns.choices.tolist(), columns.token_ids.tolist(), columns.finish.tolist()
    for request_id, choice, token, reason in zip(request_ids, choices, tokens, finish, strict=True):
        generation = live.get(request_id)
        if generation is None:
            continue
        try:
            if reason == _NONE:
                generation.sequences[choice].deliver(token)
            else:
                generation.sequences[choice].end(_REASONS[reason], token)
        except Exception as error:
            on_broken(generation, error)


def _deliver_all(
    columns: OutputColumns, request_ids: list[int], live: Mapping[int, Generation], on_broken: OnBroken
) -> None:
    reader = _FlatReader(columns)
    choices, finish, cached = columns.choices.tolist(), columns.finish.tolist(), columns.cached_tokens.tolist()
    for index, request_id in enumerate(request_ids):
        tokens, logprobs, prompt_logprobs = reader.next(index)
        generation = live.get(request_id)
        if generation is None:
            continue
        generation.cached_tokens = max(generation.cached_tokens, cached[index])
        generation.prompt_logprobs.extend(prompt_logprobs)
        try:
            _deliver(generation, choices[index], tokens, logprobs, _REASONS[finish[index]])
        except Exception as error:
            on_broken(generation, error)


def _deliver(
    generation: Generation, choice: int, tokens: list[int], logprobs: list[TokenLogprob], reason: FinishReason
) -> None:
    sequence = generation.sequences[choice]
    last = len(tokens) - 1
    for position, token in enumerate(tokens):
        if logprobs:
            sequence.add_logprob(logprobs[position])
        if position < last or reason is FinishReason.NONE:
            sequence.deliver(token)
    if reason is not FinishReason.NONE:
        sequence.end(reason, tokens[last] if tokens else None)


class _FlatReader:
    """Walks the flat columns in step with the per-sequence counts."""

    def __init__(self, columns: OutputColumns) -> None:
        self._columns = columns
        self._counts = columns.token_counts.tolist()
        self._tokens = columns.token_ids.tolist()
        self._logprob_counts = columns.logprob_counts.tolist() or [0] * len(self._counts)
        self._prompt_counts = columns.prompt_counts.tolist() or [0] * len(self._counts)
        self._top_counts = columns.top_counts.tolist()
        self._prompt_top_counts = columns.prompt_top_counts.tolist() or [0] * len(self._counts)
        self._token = self._entry = self._top = self._prompt = self._prompt_top = 0

    def next(self, index: int) -> tuple[list[int], list[TokenLogprob], list[TokenLogprob]]:
        """Tokens, their log-probabilities, and prompt log-probabilities of one sequence; call in order."""
        begin, self._token = self._token, self._token + self._counts[index]
        tokens = self._tokens[begin : self._token]
        logprobs = [self._next_logprob(tokens[offset]) for offset in range(self._logprob_counts[index])]
        num_top = self._prompt_top_counts[index]
        return tokens, logprobs, [self._next_prompt(num_top) for _ in range(self._prompt_counts[index])]

    def _next_logprob(self, token_id: int) -> TokenLogprob:
        columns, entry, top = self._columns, self._entry, self._top
        self._entry, self._top = entry + 1, top + self._top_counts[entry]
        return TokenLogprob(
            token_id,
            finite(float(columns.logprobs[entry])),
            int(columns.ranks[entry]),
            _pairs(columns.top_ids[top : self._top], columns.top_logprobs[top : self._top]),
        )

    def _next_prompt(self, num_top: int) -> TokenLogprob:
        """The token id is not on the wire: the owner knows its prompt."""
        columns, entry, top = self._columns, self._prompt, self._prompt_top
        self._prompt, self._prompt_top = entry + 1, top + num_top
        return TokenLogprob(
            -1,
            finite(float(columns.prompt_logprobs[entry])),
            int(columns.prompt_ranks[entry]),
            _pairs(columns.prompt_top_ids[top : self._prompt_top], columns.prompt_top_logprobs[top : self._prompt_top]),
        )


def _pairs(ids: Any, logprobs: Any) -> tuple[tuple[int, float], ...]:
    return tuple((id, finite(logprob)) for id, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True))
