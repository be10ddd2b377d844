"""What the offline API gives back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct, structs

from .generation import Generation, SequenceOutput, TokenLogprob
from .parsed_choice import ParsedChoice
from .tools import ToolCall

Vector = np.ndarray[Any, np.dtype[np.float32]]


class CompletionOutput(Struct, frozen=True, kw_only=True):
    """One choice. `logprobs` has an entry per shown token, where they were asked for. In chat `text` is what is neither
    `reasoning` nor a call.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = []


class EmbeddingOutput(Struct, frozen=True, kw_only=True):
    """One text's vector: float32, cut and normalised as asked."""

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: Vector


class RequestOutput(Struct, frozen=True, kw_only=True):
    """One prompt with its choices. `prompt_logprobs` has an entry per prompt token; the first is None."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None


def request_output(
    prompt: str | None, generation: Generation, parsed: Sequence[ParsedChoice] | None = None
) -> RequestOutput:
    """Of a generation that has finished; `parsed` are its choices, where a parser read them."""
    if parsed is None:
        outputs = [_completion(sequence, generation.text(sequence.choice)) for sequence in generation.sequences]
    else:
        outputs = [_parted(sequence, choice) for sequence, choice in zip(generation.sequences, parsed, strict=True)]
    return RequestOutput(
        prompt=prompt,
        prompt_token_ids=generation.request.prompt_token_ids,
        outputs=outputs,
        cached_tokens=generation.cached_tokens,
        prompt_logprobs=_prompt_logprobs(generation),
    )


def _completion(sequence: SequenceOutput, text: str) -> CompletionOutput:
    assert sequence.finish_reason is not None
    asked = sequence.generation.request.params.logprobs is not None
    return CompletionOutput(
        index=sequence.choice,
        text=text,
        token_ids=sequence.token_ids,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        logprobs=sequence.take_logprobs() if asked else None,
    )


def _parted(sequence: SequenceOutput, parsed: ParsedChoice) -> CompletionOutput:
    assert parsed.finish_reason is not None
    return structs.replace(
        _completion(sequence, parsed.content or ""),
        reasoning=parsed.reasoning,
        tool_calls=parsed.calls,
        finish_reason=parsed.finish_reason,
    )


def _prompt_logprobs(generation: Generation) -> list[TokenLogprob | None] | None:
    if generation.request.params.prompt_logprobs is None:
        return None
    ids = generation.request.prompt_token_ids
    entries = generation.prompt_logprobs
    named = [
        TokenLogprob(id, entry.logprob, entry.rank, entry.top)
        for id, entry in zip(ids[len(ids) - len(entries) :], entries, strict=True)
    ]
    return [*([None] * (len(ids) - len(named))), *named]
