"""How relevant documents are, by a reranker's yes and no: two answers of one token each, which share their prompt."""

import asyncio
import math
from collections.abc import Sequence

from ...ipc.frontend_messages import RejectKind
from ..text.encoding import TextWork
from ..text.judge import Judge
from ..text.model_text import ModelText
from .engine_client import EngineClient
from .generation import Generation, GenerationRequest
from .refusals import RequestRefused, first_cause
from .sampling import SamplingParams

_IN_FLIGHT = 64  # pairs of one request that the engine knows of at a time


class JudgeRequests:
    """Belongs to the loop of its client."""

    def __init__(self, client: EngineClient, text: ModelText, judge: Judge, text_work: TextWork) -> None:
        self._client = client
        self._text = text
        self._judge = judge
        self._text_work = text_work

    async def scores(
        self, pairs: Sequence[tuple[str, str]], instruction: str | None, *, param: str, priority: int
    ) -> tuple[list[float], int]:
        """The probability of yes against no for each (query, document), and the tokens read. All or none. Raises
        RequestRefused, RequestFailed.
        """
        size = sum(len(query) + len(document) for query, document in pairs)
        judge = self._judge
        encoded = await self._text_work.run(
            size, lambda: [judge.encode(query, document, instruction) for query, document in pairs]
        )
        limits = self._client.limits
        for place, ids in enumerate(encoded):
            if limits is not None and len(ids) >= limits.max_model_len:
                raise RequestRefused(
                    f"{param}[{place}]: with its query it has {len(ids)} tokens and this model's context is "
                    f"{limits.max_model_len}; shorten it to at most {limits.max_model_len - 1} in all",
                    param=param,
                    kind=RejectKind.TOO_LONG,
                )
        gate = asyncio.Semaphore(_IN_FLIGHT)

        async def one(ids: list[int]) -> float:
            async with gate:
                yes = await self._logprob(ids, judge.yes_id, param, priority)
                no = await self._logprob(ids, judge.no_id, param, priority)
            return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(ids)) for ids in encoded]
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        return [task.result() for task in tasks], sum(map(len, encoded))

    async def _logprob(self, ids: list[int], answer_id: int, param: str, priority: int) -> float:
        """Of this answer, as the model sees it: nothing else may come, and log-probabilities do not know that."""
        params = SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=0, allowed_token_ids=(answer_id,), ignore_eos=True, detokenize=False
        )
        request = GenerationRequest(prompt_token_ids=ids, params=params, priority=priority)
        generation = self._client.submit(request, self._text, param=param)
        try:
            await generation.wait()
        finally:
            if not generation.has_ended:
                self._client.abort(generation)
        return _only_logprob(generation, answer_id)


def _only_logprob(generation: Generation, answer_id: int) -> float:
    entries = generation.sequences[0].take_logprobs()
    assert len(entries) == 1 and entries[0].token_id == answer_id, f"asked for token {answer_id}, got {entries}"
    return entries[0].logprob
