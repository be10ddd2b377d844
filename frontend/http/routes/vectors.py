"""POST /v1/embeddings and /pooling, /v1/score, /v1/rerank: vectors, and what is computed from them."""

import asyncio
import base64
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from ...client.embedder import Embedder, Text, TextVector
from ...client.refusals import RequestRefused, first_cause
from ...client.scores import PairWishes, Scored, Scorer, scorer_for
from ...client.vectors import VectorForm, settle_form
from ..asgi import ClientLeft, Exchange, Receive, Scope, read_json_body
from ..schema.embeddings import (
    Embedding,
    EmbeddingRequest,
    Embeddings,
    Pooled,
    PoolingAnswer,
    Ranking,
    RerankDocument,
    RerankRequest,
    RerankResult,
    Score,
    ScoreRequest,
    Scores,
    TextInput,
    VectorFields,
    VectorUsage,
)
from ..schema.unsupported import VECTORS, refuse_unsupported
from ..serving import ServedModel, Serving, new_id
from .generating import watch

T = TypeVar("T")

_EMBEDDINGS = msgspec.json.Decoder(EmbeddingRequest)
_SCORES = msgspec.json.Decoder(ScoreRequest)
_RANKINGS = msgspec.json.Decoder(RerankRequest)
_NO_DATA = b'"data":[]'  # in text its quotes would be escaped
_encode = msgspec.json.Encoder().encode


class VectorRoute:
    """What these routes share: reading the request, the model, and a client that leaves."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        """Raises what the request is refused or failed with."""
        serving = self._serving
        served = serving.ready_model()
        body = await read_json_body(scope, receive, serving.limits.max_body_bytes)
        answer = await self._while_here(self._answer(body, served), receive)
        await exchange.send_whole(200, answer)

    async def _answer(self, body: bytes | bytearray, served: ServedModel) -> bytes:
        raise NotImplementedError

    def _embedder(self, served: ServedModel) -> Embedder:
        return Embedder(self._serving.client, served.text, self._serving.text_work)

    def _scorer(self, served: ServedModel) -> Scorer:
        return scorer_for(self._serving.client, served.text, self._serving.text_work)

    def _check(self, request: VectorFields, num_texts: int, param: str) -> None:
        self._serving.check_model_name(request.model)
        if num_texts > self._serving.limits.max_prompts:
            raise RequestRefused(
                f"{param}: {num_texts} texts are above this server's limit of {self._serving.limits.max_prompts}; "
                "send them in several requests",
                param=param,
            )

    async def _while_here(self, work: Coroutine[Any, Any, T], receive: Receive) -> T:
        """The result; the work ends when the client leaves. Raises ClientLeft."""
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(work)
                watcher = group.create_task(watch(receive, task.cancel))
                task.add_done_callback(lambda _: watcher.cancel())
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        if task.cancelled():
            self._serving.statistics.client_left()
            raise ClientLeft
        return task.result()


class EmbeddingsRoute(VectorRoute):
    """POST /v1/embeddings."""

    async def _answer(self, body: bytes | bytearray, served: ServedModel) -> bytes:
        request, embedder = _EMBEDDINGS.decode(body), self._embedder(served)
        texts = _given_texts(request)
        self._check(request, len(texts), "input")
        form = settle_form(
            embedder.facts(), served.text.embedding, dimensions=request.dimensions, normalizes=request.normalize
        )
        found = await _embedded(embedder, request, texts)
        is_base64 = request.encoding_format == "base64"
        return await self._serving.text_work.run(
            len(found) * form.num_dimensions, lambda: self._whole(served, found, form, is_base64=is_base64)
        )

    def _whole(self, served: ServedModel, found: Sequence[TextVector], form: VectorForm, *, is_base64: bool) -> bytes:
        data = (
            Embedding(index=index, embedding=_written(form, one, is_base64=is_base64))
            for index, one in enumerate(found)
        )
        return _with_data(Embeddings(data=[], model=served.name, usage=_usage(found)), data)


class PoolingRoute(EmbeddingsRoute):
    """POST /pooling: vectors as the model leaves them, unless `normalize` asks otherwise."""

    async def _answer(self, body: bytes | bytearray, served: ServedModel) -> bytes:
        request, embedder = _EMBEDDINGS.decode(body), self._embedder(served)
        texts = _given_texts(request)
        self._check(request, len(texts), "input")
        form = settle_form(
            embedder.facts(),
            served.text.embedding,
            dimensions=request.dimensions,
            normalizes=request.normalize is True,
        )
        found = await _embedded(embedder, request, texts)
        is_base64 = request.encoding_format == "base64"
        return await self._serving.text_work.run(
            len(found) * form.num_dimensions, lambda: self._pooled(served, found, form, is_base64=is_base64)
        )

    def _pooled(self, served: ServedModel, found: Sequence[TextVector], form: VectorForm, *, is_base64: bool) -> bytes:
        data = (Pooled(index=index, data=_written(form, one, is_base64=is_base64)) for index, one in enumerate(found))
        now = int(time.time())
        answer = PoolingAnswer(id=new_id("pool"), created=now, model=served.name, data=[], usage=_usage(found))
        return _with_data(answer, data)


class ScoreRoute(VectorRoute):
    """POST /v1/score."""

    async def _answer(self, body: bytes | bytearray, served: ServedModel) -> bytes:
        request = _SCORES.decode(body)
        firsts = [request.text_1] if isinstance(request.text_1, str) else request.text_1
        seconds = [request.text_2] if isinstance(request.text_2, str) else request.text_2
        self._check(request, len(firsts) + len(seconds), "text_2")
        wishes = _pair_wishes(request, request.instruction, ("text_1", "text_2"))
        scored = await self._scorer(served).pairs(firsts, seconds, wishes)
        data = [Score(index=index, score=score) for index, score in enumerate(scored.scores)]
        answer = Scores(
            id=new_id("score"), created=int(time.time()), model=served.name, data=data, usage=_scored_usage(scored)
        )
        return _encode(answer)


class RerankRoute(VectorRoute):
    """POST /v1/rerank, in the form of Jina's and Cohere's clients."""

    async def _answer(self, body: bytes | bytearray, served: ServedModel) -> bytes:
        request = _RANKINGS.decode(body)
        documents = [one if isinstance(one, str) else one.text for one in request.documents]
        self._check(request, len(documents) + 1, "documents")
        if not documents:
            raise RequestRefused("documents: the list is empty; send at least one document", param="documents")
        if request.top_n is not None and request.top_n < 1:
            raise RequestRefused("top_n: ask for at least 1 result, or leave it out for all", param="top_n")
        wishes = _pair_wishes(request, request.instruction, ("query", "documents"))
        scored = await self._scorer(served).pairs([request.query], documents, wishes)
        best = sorted(range(len(documents)), key=lambda place: -scored.scores[place])[: request.top_n]
        shows = request.return_documents is not False
        results = [
            RerankResult(
                index=place,
                relevance_score=scored.scores[place],
                document=RerankDocument(documents[place]) if shows else None,
            )
            for place in best
        ]
        return _encode(Ranking(id=new_id("rerank"), model=served.name, results=results, usage=_scored_usage(scored)))


async def _embedded(embedder: Embedder, request: EmbeddingRequest, texts: list[Text]) -> list[TextVector]:
    wishes = request.wishes(prompt_name=request.prompt_name, prompt=request.prompt)
    return await embedder.vectors(await embedder.encode(texts, wishes, "input"), priority=request.priority or 0)


def _pair_wishes(request: VectorFields, instruction: str | None, params: tuple[str, str]) -> PairWishes:
    return PairWishes(
        truncate_to=request.truncate_prompt_tokens,
        instruction=instruction,
        params=params,
        priority=request.priority or 0,
    )


def _given_texts(request: EmbeddingRequest) -> list[Text]:
    refuse_unsupported(request, VECTORS)
    return given_texts(request.input)


def given_texts(given: TextInput) -> list[Text]:
    """Each text apart. Raises RequestRefused for an empty or mixed list."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestRefused("input: the list is empty; send at least one text", param="input")
    ids = [item for item in given if isinstance(item, int)]
    if len(ids) == len(given):
        return [ids]
    others = [item for item in given if not isinstance(item, int)]
    if ids or len({type(item) for item in others}) > 1:
        raise RequestRefused("input: texts, token ids and lists of token ids cannot be mixed", param="input")
    return others


def _with_data(answer: Embeddings | PoolingAnswer, data: Iterable[Embedding | Pooled]) -> bytes:
    """The answer with its data, written one by one: the whole at once would hold up every other thread."""
    return _encode(answer).replace(_NO_DATA, b'"data":[' + b",".join(map(_encode, data)) + b"]", 1)


def _written(form: VectorForm, found: TextVector, *, is_base64: bool) -> list[float] | str:
    vector = form.of(found.vector)
    if is_base64:
        return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode("ascii")
    numbers: list[float] = vector.tolist()
    return numbers


def _usage(found: Sequence[TextVector]) -> VectorUsage:
    total = sum(one.num_tokens for one in found)
    return VectorUsage(total, total)


def _scored_usage(scored: Scored) -> VectorUsage:
    return VectorUsage(scored.num_tokens, scored.num_tokens)
