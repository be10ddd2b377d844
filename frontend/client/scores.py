"""How near texts are: by the cosine of their vectors, or by a reranker's judgement."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct

from ..text.encoding import TextWork
from ..text.model_text import ModelText
from .embedder import Embedder, EncodingWishes
from .engine_client import EngineClient
from .judging import JudgeRequests
from .refusals import RequestRefused
from .vectors import VectorForm


class Scored(Struct, frozen=True):
    """A score for each pair, and the tokens that were read for them."""

    scores: list[float]
    num_tokens: int


class PairWishes(Struct, frozen=True, kw_only=True):
    """How a request wants its pairs scored. `params` name its fields; `instruction` is for rerankers only."""

    truncate_to: int | None = None
    instruction: str | None = None
    params: tuple[str, str] = ("text_1", "text_2")
    priority: int = 0


class Scorer(Protocol):
    """The pairs are one text with each of the others, or as many with as many."""

    async def pairs(self, firsts: Sequence[str], seconds: Sequence[str], wishes: PairWishes) -> Scored:
        """Raises RequestRefused, RequestFailed."""
        ...


def scorer_for(client: EngineClient, text: ModelText, text_work: TextWork) -> Scorer:
    """As the served model scores."""
    if text.judge is not None:
        return JudgeScorer(JudgeRequests(client, text, text.judge, text_work))
    return CosineScorer(Embedder(client, text, text_work))


class CosineScorer:
    """Each text's vector is computed once, however many pairs it is in."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    async def pairs(self, firsts: Sequence[str], seconds: Sequence[str], wishes: PairWishes) -> Scored:
        """The cosines. Raises RequestRefused, RequestFailed."""
        facts = self._embedder.facts()
        _check_counts(len(firsts), len(seconds), wishes.params)
        if wishes.instruction is not None:
            raise RequestRefused(
                "instruction: this model scores by vectors, which take none; leave it out, or serve a reranker",
                param="instruction",
            )
        reading = EncodingWishes(truncate_to=wishes.truncate_to)
        encoded = await self._embedder.encode(firsts, reading, wishes.params[0])
        encoded += await self._embedder.encode(seconds, reading, wishes.params[1])
        found = await self._embedder.vectors(encoded, priority=wishes.priority)
        unit = VectorForm(facts.num_dimensions, normalizes=True)
        vectors = np.stack([unit.of(one.vector) for one in found]).astype(np.float64)
        scores = (vectors[: len(firsts)] * vectors[len(firsts) :]).sum(axis=1)
        return Scored(scores.tolist(), sum(one.num_tokens for one in found))


class JudgeScorer:
    """Each pair is a question of its own."""

    def __init__(self, requests: JudgeRequests) -> None:
        self._requests = requests

    async def pairs(self, firsts: Sequence[str], seconds: Sequence[str], wishes: PairWishes) -> Scored:
        """The probabilities that the second text answers the first. Raises RequestRefused, RequestFailed."""
        _check_counts(len(firsts), len(seconds), wishes.params)
        if wishes.truncate_to is not None:
            raise RequestRefused(
                "truncate_prompt_tokens: not supported by a reranker, whose question goes around the text; shorten it",
                param="truncate_prompt_tokens",
            )
        queries = list(firsts) if len(firsts) == len(seconds) else [firsts[0]] * len(seconds)
        scores, num_tokens = await self._requests.scores(
            list(zip(queries, seconds, strict=True)),
            wishes.instruction,
            param=wishes.params[1],
            priority=wishes.priority,
        )
        return Scored(scores, num_tokens)


def _check_counts(num_firsts: int, num_seconds: int, params: tuple[str, str]) -> None:
    if not num_firsts or not num_seconds:
        empty = params[0] if not num_firsts else params[1]
        raise RequestRefused(f"{empty}: the list is empty; send at least one text", param=empty)
    if num_firsts not in (1, num_seconds):
        raise RequestRefused(
            f"{params[0]}: {num_firsts} texts cannot be paired with {num_seconds}; send one, or as many as {params[1]}",
            param=params[0],
        )
