"""Many texts to vectors, in order: what HTTP routes and the offline API share."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from ...ipc.facts import PoolingFacts
from ...ipc.frontend_messages import RejectKind
from ..text.encoding import TextWork
from ..text.model_text import ModelText
from .engine_client import EngineClient
from .refusals import RequestRefused, first_cause
from .vectors import NO_VECTORS, VectorRequest

Array = np.ndarray[Any, Any]
Text = str | list[int]

_IN_FLIGHT = 256  # texts of one request that the engine knows of at a time


class EncodingWishes(Struct, frozen=True, kw_only=True):
    """How a request wants its texts read. `truncate_to` -1: to what the model takes; None: what is too long is refused.
    `prompt` goes before each text as it stands; `prompt_name` names one of the model's own.
    """

    truncate_to: int | None = None
    prompt_name: str | None = None
    prompt: str | None = None


class TextVector(Struct, frozen=True):
    """A text's vector as the device pooled it, float32, and its number of tokens."""

    vector: Array
    num_tokens: int
    cached_tokens: int


class Embedder:
    """Belongs to the loop of its client."""

    def __init__(self, client: EngineClient, text: ModelText, text_work: TextWork) -> None:
        self._client = client
        self._text = text
        self._text_work = text_work

    def facts(self) -> PoolingFacts:
        """How the model pools. Raises RequestRefused where it makes no vectors."""
        limits = self._client.limits
        if limits is None or limits.pooling is None:
            raise RequestRefused(NO_VECTORS, param="model")
        return limits.pooling

    async def encode(self, texts: Sequence[Text], wishes: EncodingWishes, param: str) -> list[list[int]]:
        """Each text's token ids. Raises RequestRefused for what is empty, too long or outside the vocabulary."""
        limits = self._client.limits
        assert limits is not None
        max_tokens = _truncated_length(wishes.truncate_to, limits.max_model_len)
        prompt = self._prompt(wishes)
        size = sum(len(text) for text in texts if isinstance(text, str))
        read, tokenizer = self._text.embedding, self._text.tokenizer

        def work() -> list[list[int]]:
            return [
                read.encode(tokenizer, text, prompt=prompt, max_tokens=max_tokens)
                if isinstance(text, str)
                else text[:max_tokens]
                for text in texts
            ]

        encoded = await self._text_work.run(size, work)
        for place, ids in enumerate(encoded):
            _check_ids(ids, limits.max_model_len, limits.vocab_size, param, place if len(encoded) > 1 else None)
        return encoded

    async def vectors(self, encoded: Sequence[list[int]], *, priority: int = 0) -> list[TextVector]:
        """In the order given, all or none. Raises RequestRefused, RequestFailed."""
        gate = asyncio.Semaphore(_IN_FLIGHT)

        async def one(ids: list[int]) -> TextVector:
            async with gate:
                request = self._client.submit_vector(ids, priority=priority)
                return await self._finished(request)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(ids)) for ids in encoded]
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        return [task.result() for task in tasks]

    async def _finished(self, request: VectorRequest) -> TextVector:
        try:
            vector = await request.vector()
        finally:
            if not request.has_ended or request.is_closed:
                self._client.abort_vector(request)
        return TextVector(vector, request.num_tokens, request.cached_tokens)

    def _prompt(self, wishes: EncodingWishes) -> str:
        known = self._text.embedding
        if wishes.prompt is not None:
            if wishes.prompt_name is not None:
                raise RequestRefused("prompt: give prompt or prompt_name, not both", param="prompt")
            return wishes.prompt
        if wishes.prompt_name is None:
            return known.default_prompt
        if wishes.prompt_name not in known.prompts:
            names = f"its names are {', '.join(known.prompts)}" if known.prompts else "it has none"
            raise RequestRefused(
                f"prompt_name: this model knows no prompt {wishes.prompt_name!r}; {names}. Leave it out, or send the "
                "text itself as prompt",
                param="prompt_name",
            )
        return known.prompts[wishes.prompt_name]


def _truncated_length(asked: int | None, limit: int) -> int | None:
    if asked is None:
        return None
    if asked == -1:
        return limit
    if not 1 <= asked <= limit:
        raise RequestRefused(
            f"truncate_prompt_tokens: {asked} is outside 1 to {limit}, what this model takes; -1 cuts to that",
            param="truncate_prompt_tokens",
        )
    return asked


def _check_ids(ids: list[int], max_tokens: int, vocab_size: int, param: str, place: int | None) -> None:
    what = param if place is None else f"{param}[{place}]"
    if not ids:
        raise RequestRefused(f"{what}: the text is empty; send at least one token", param=param)
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(id for id in ids if not 0 <= id < vocab_size)
        raise RequestRefused(
            f"{what}: token id {wrong} is outside this model's vocabulary of {vocab_size}; send ids of its tokenizer",
            param=param,
        )
    if len(ids) > max_tokens:
        raise RequestRefused(
            f"{what}: the text has {len(ids)} tokens and this model takes {max_tokens}; shorten it, or ask for "
            "truncate_prompt_tokens (-1 cuts to what the model takes)",
            param=param,
            kind=RejectKind.TOO_LONG,
        )
