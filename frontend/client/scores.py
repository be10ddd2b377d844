"""How near texts are: by the cosine of their vectors."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from .embedder import Embedder, EncodingWishes, Text
from .refusals import RequestRefused
from .vectors import VectorForm


class Scored(Struct, frozen=True):
    """A score for each pair, and the tokens that were read for them."""

    scores: list[float]
    num_tokens: int


class Scorer:
    """Each text is computed once, however many pairs it is in."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    async def pairs(
        self,
        firsts: Sequence[Text],
        seconds: Sequence[Text],
        wishes: EncodingWishes,
        *,
        params: tuple[str, str] = ("text_1", "text_2"),
        priority: int = 0,
    ) -> Scored:
        """The cosines of the pairs: one text against each of the others, or as many against as many. Raises
        RequestRefused, RequestFailed. `params` name the fields.
        """
        facts = self._embedder.facts()
        _check_counts(len(firsts), len(seconds), params)
        encoded = await self._embedder.encode(firsts, wishes, params[0])
        encoded += await self._embedder.encode(seconds, wishes, params[1])
        found = await self._embedder.vectors(encoded, priority=priority)
        unit = VectorForm(facts.num_dimensions, normalizes=True)
        vectors = np.stack([unit.of(one.vector) for one in found]).astype(np.float64)
        scores = (vectors[: len(firsts)] * vectors[len(firsts) :]).sum(axis=1)
        return Scored(scores.tolist(), sum(one.num_tokens for one in found))


def _check_counts(num_firsts: int, num_seconds: int, params: tuple[str, str]) -> None:
    if not num_firsts or not num_seconds:
        empty = params[0] if not num_firsts else params[1]
        raise RequestRefused(f"{empty}: the list is empty; send at least one text", param=empty)
    if num_firsts not in (1, num_seconds):
        raise RequestRefused(
            f"{params[0]}: {num_firsts} texts cannot be paired with {num_seconds}; send one, or as many as {params[1]}",
            param=params[0],
        )
