"""One text's vector: the mailbox that it comes to, and its final form.

Vectors come from the device as float32, pooled and no more; cutting and normalising are a matter of one request.
"""

import asyncio
import time
from typing import Any

import numpy as np
from msgspec import Struct

from ...ipc.facts import PoolingFacts
from ..text.embedding_text import EmbeddingText
from .refusals import RequestRefused

Array = np.ndarray[Any, Any]

NO_VECTORS = (
    "this model makes tokens and no vectors; serve an embedding model, such as the packaged one "
    "(trimaran serve --demo-embedding)"
)
NO_TOKENS = "this model makes vectors and no tokens; ask /v1/embeddings, or serve a model that generates"
_SHORTEST = 1e-12  # a vector of zeros stays one


class VectorRequest:
    """One live request for a vector. Ends in exactly one of: its vector, `fail`, or `close` by its owner."""

    __slots__ = ("_ended", "arrival_s", "cached_tokens", "core_incarnation", "num_tokens", "request_id")

    def __init__(self, request_id: int, num_tokens: int, core_incarnation: int) -> None:
        self.request_id = request_id
        self.num_tokens = num_tokens
        self.core_incarnation = core_incarnation
        self.cached_tokens = 0
        self.arrival_s = time.monotonic()
        self._ended: asyncio.Future[Array] = asyncio.get_running_loop().create_future()

    @property
    def has_ended(self) -> bool:
        """It has its vector, failed or was closed."""
        return self._ended.done()

    @property
    def is_closed(self) -> bool:
        """Its owner wants nothing more."""
        return self._ended.cancelled()

    def take(self, vector: Array, cached_tokens: int) -> None:
        """Its vector, float32 `[dimensions]`."""
        self.cached_tokens = cached_tokens
        if not self._ended.done():
            self._ended.set_result(vector)

    def fail(self, error: Exception) -> None:
        """Terminal, unless it has ended already."""
        if not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()  # whoever waits for another one of its batch may never look

    def close(self) -> None:
        """The owner wants nothing more."""
        self._ended.cancel()

    async def vector(self) -> Array:
        """Raises what the request failed with."""
        return await self._ended


class VectorForm(Struct, frozen=True):
    """What a request makes of its vectors: the first `num_dimensions` of them, and to length 1 or as they are."""

    num_dimensions: int
    normalizes: bool

    def of(self, vector: Array) -> Array:
        """Float32, `[num_dimensions]`."""
        cut = vector[: self.num_dimensions]
        if not self.normalizes:
            return cut
        length = np.sqrt(np.dot(cut.astype(np.float64), cut.astype(np.float64)))
        normalized: Array = (cut / max(length, _SHORTEST)).astype(np.float32)
        return normalized


def settle_form(
    facts: PoolingFacts, text: EmbeddingText, *, dimensions: int | None, normalizes: bool | None
) -> VectorForm:
    """Cut vectors are normalised again unless the request says no. Raises RequestRefused for sizes that the model was
    not trained for.
    """
    full = facts.num_dimensions
    if dimensions is None or dimensions == full:
        return VectorForm(full, facts.normalizes if normalizes is None else normalizes)
    if not 1 <= dimensions <= full:
        raise RequestRefused(
            f"dimensions: this model's vectors have {full} dimensions; ask for 1 to {full}, or leave it out",
            param="dimensions",
        )
    if (allowed := text.matryoshka) is None:
        raise RequestRefused(
            f"dimensions: this model's vectors lose their meaning when cut to {dimensions}; ask for {full} or leave it "
            "out (an operator whose model allows it passes --matryoshka)",
            param="dimensions",
        )
    if allowed and dimensions not in allowed:
        raise RequestRefused(
            f"dimensions: this model's vectors may be cut to {', '.join(map(str, allowed))}, not {dimensions}",
            param="dimensions",
        )
    return VectorForm(dimensions, True if normalizes is None else normalizes)
