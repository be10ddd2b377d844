"""The whole step path in one process: the real engine core plans, a real step engine computes, the core commits.

As in service, two steps are in flight and plans travel packed, in buffers that are overwritten once their step has
returned. One step engine serves many drivers, one after the other.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trimaran.device_workers.execution.contract import StepEngine
from trimaran.device_workers.execution.tensor_engine import TensorEngine
from trimaran.engine_core.admission import Door, admit
from trimaran.engine_core.engine import Engine
from trimaran.engine_core.grammar_compiler import CompiledGrammar
from trimaran.engine_core.request import Request
from trimaran.engine_core.scheduler import FIRST_HORIZON
from trimaran.engine_core.statistics import Statistics
from trimaran.ipc.frontend_messages import FinishReason, OutputColumns, Submit
from trimaran.ipc.plan import StepPlan, StepResult, TokenMasks
from trimaran.ipc.sampling import Grammar, Sampling
from trimaran.ipc.server_info import EngineLimits

OWNER = 1
STEP_S = 0.01  # how far the engine's clock moves per step


@dataclass
class Choice:
    """What one sequence was answered with. `tops[i]` are the alternatives of token i, most likely first."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    finish: FinishReason = FinishReason.NONE


@dataclass
class Answer:
    """What one request was answered with. Prompt log-probabilities begin with the prompt's second token."""

    prompt: list[int]
    choices: list[Choice]
    cached_tokens: int = 0
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_tops: list[list[tuple[int, float]]] = field(default_factory=list)
    num_terminals: int = 0
    vector: np.ndarray | None = None

    @property
    def tokens(self) -> list[int]:
        """Of the first sequence."""
        return self.choices[0].tokens


def greedy(max_tokens: int, **sampling: Any) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, **sampling)


class EngineDriver:
    """A fresh engine core over `step_engine`, which must have been allocated at least `num_blocks`.

    `first_horizon` is the room for growth that admission leaves: little of it in a small pool makes preemptions.
    """

    def __init__(
        self,
        step_engine: StepEngine,
        *,
        num_blocks: int = 300,
        block_size: int = 16,
        max_num_seqs: int = 40,
        max_batched_tokens: int = 512,
        max_model_len: int = 256,
        prefix_caching: bool = True,
        first_horizon: int = FIRST_HORIZON,
        seed: int = 0,
    ) -> None:
        self.step_engine = step_engine
        limits = EngineLimits(
            max_model_len=max_model_len,
            vocab_size=step_engine.model.vocab_size,
            max_num_seqs=max_num_seqs,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=step_engine.model.dtype,
            pooling=step_engine.model.pooling,
        )
        self.engine = Engine(
            limits,
            max_batched_tokens=max_batched_tokens,
            prefix_caching=prefix_caching,
            statistics=Statistics(),
            first_horizon=first_horizon,
        )
        self.door = Door(
            max_model_len=max_model_len,
            vocab_size=limits.vocab_size,
            pooling=limits.pooling,
            max_queued_requests=None,
            max_queued_tokens=None,
        )
        self.answers: list[Answer] = []
        self.now = 0.0
        self.seed = seed
        self.largest_chunk = 0
        self._in_flight: deque[bytearray] = deque()
        step_engine.drop_rows()
        _poison(step_engine)

    @property
    def num_preemptions(self) -> int:
        return self.engine.scheduler.num_preemptions

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        n: int = 1,
        salt: str | None = None,
        grammar: CompiledGrammar | None = None,
        pools: bool = False,
    ) -> Answer:
        """A request that arrives now, through the core's door. The answer fills as steps return."""
        index = len(self.answers)
        constraint = None if grammar is None else Grammar(kind="", source="")
        submit = Submit(
            index,
            1,
            sampling,
            num_sequences=n,
            arrival_s=self.now,
            cache_salt=salt,
            grammar=constraint,
            pools=pools,
        )
        admitted = admit(
            submit,
            np.array(prompt, np.int32).tobytes(),
            self.door,
            owner=OWNER,
            order=index,
            num_queued=0,
            num_queued_tokens=0,
            root=lambda salt, adapter: self.engine.cache.root(salt=salt, adapter=adapter),
            retry_after_s=1.0,
            default_seed=self.seed,
        )
        assert isinstance(admitted, Request), admitted
        admitted.compiled = grammar
        self.answers.append(Answer(list(prompt), [Choice() for _ in range(n)]))
        self.engine.submit(admitted)
        return self.answers[-1]

    def abort(self, answer: Answer) -> None:
        """The client leaves."""
        request = self.engine.requests.get(self.answers.index(answer))
        if request is not None:
            self._take(self.engine.abort(request, self.now))

    def step(self) -> None:
        """Plan what may be in flight; compute and commit the oldest."""
        while self.engine.can_plan() and (plan := self.engine.plan(self.now)) is not None:
            self._in_flight.append(bytearray(plan.SCHEMA.pack(plan.values())))
        if not self._in_flight:
            return
        packed = self._in_flight.popleft()
        result = self._compute(packed)
        self.now += STEP_S
        news = self.engine.commit(result, self.now)
        assert not news.failures, news.failures
        for owner, columns in news.outputs:
            assert owner == OWNER
            self._take(OutputColumns.unpack(bytes(columns.SCHEMA.pack(columns.values()))))

    def run(self, max_steps: int = 20_000) -> None:
        """Until every request is over; then every block must be free again."""
        for _ in range(max_steps):
            if not self.engine.requests and not self._in_flight:
                break
            self.step()
        assert not self.engine.requests, f"{len(self.engine.requests)} requests are not over after {max_steps} steps"
        assert self.engine.pool.num_held == 0
        assert all(answer.num_terminals == 1 for answer in self.answers)

    def run_arriving(self, asks: Sequence[tuple[Sequence[int], Sampling]], *, seed: int = 3) -> list[Answer]:
        """Requests that arrive at random steps while others run."""
        chance, answers = random.Random(seed), []
        for prompt, sampling in asks:
            for _ in range(chance.randrange(4)):
                self.step()
            answers.append(self.submit(prompt, sampling))
        self.run()
        return answers

    def generate(self, prompt: Sequence[int], sampling: Sampling, *, n: int = 1) -> Answer:
        """One request, alone."""
        answer = self.submit(prompt, sampling, n=n)
        self.run()
        return answer

    def _compute(self, packed: bytearray) -> StepResult:
        plan = StepPlan.unpack(memoryview(packed))
        if len(plan.counts):
            self.largest_chunk = max(self.largest_chunk, int(plan.counts.max()))
        self.step_engine.forward(plan)
        result = self.step_engine.sample(self._masks()).result()
        result = StepResult.unpack(bytes(result.SCHEMA.pack(result.values())))
        packed[:] = b"\xff" * len(packed)  # the ring's slot is written again
        return result

    def _masks(self) -> TokenMasks | None:
        """Those of the oldest step in flight, which follow from what is committed."""
        work = self.engine.masks_due()
        if work is None:
            return None
        masks, failed = work.run()
        assert not failed, failed
        return TokenMasks.unpack(bytes(masks.SCHEMA.pack(masks.values())))

    def _take(self, columns: OutputColumns) -> None:
        reader = _Reader(columns)
        for index, (request_id, number) in enumerate(
            zip(columns.request_ids.tolist(), columns.choices.tolist(), strict=True)
        ):
            answer = self.answers[request_id]
            choice = answer.choices[number]
            assert choice.finish is FinishReason.NONE, "news of a sequence that had ended"
            reader.tokens(index, choice)
            reader.prompt(index, answer)
            choice.finish = FinishReason(int(columns.finish[index]))
            answer.cached_tokens = max(answer.cached_tokens, int(columns.cached_tokens[index]))
            answer.num_terminals += int(columns.done[index])
            if len(columns.pooled_dims):
                end = int(columns.pooled_dims[: index + 1].sum())
                answer.vector = columns.pooled[end - int(columns.pooled_dims[index]) : end]


class _Reader:
    """Takes the flat columns of one message apart, entry after entry."""

    def __init__(self, columns: OutputColumns) -> None:
        self.columns = columns
        self.token = self.logprob = self.top = self.position = self.prompt_top = 0

    def tokens(self, index: int, choice: Choice) -> None:
        columns = self.columns
        count = int(columns.token_counts[index])
        choice.tokens += columns.token_ids[self.token : self.token + count].tolist()
        self.token += count
        for _ in range(int(columns.logprob_counts[index]) if len(columns.logprob_counts) else 0):
            choice.logprobs.append(float(columns.logprobs[self.logprob]))
            choice.ranks.append(int(columns.ranks[self.logprob]))
            end = self.top + int(columns.top_counts[self.logprob])
            choice.tops.append(_pairs(columns.top_ids[self.top : end], columns.top_logprobs[self.top : end]))
            self.top = end
            self.logprob += 1

    def prompt(self, index: int, answer: Answer) -> None:
        columns = self.columns
        width = int(columns.prompt_top_counts[index]) if len(columns.prompt_top_counts) else 0
        for _ in range(int(columns.prompt_counts[index]) if len(columns.prompt_counts) else 0):
            answer.prompt_logprobs.append(float(columns.prompt_logprobs[self.position]))
            self.position += 1
            end = self.prompt_top + width
            ids, values = columns.prompt_top_ids[self.prompt_top : end], columns.prompt_top_logprobs
            answer.prompt_tops.append(_pairs(ids, values[self.prompt_top : end]))
            self.prompt_top = end


def _pairs(ids: Any, values: Any) -> list[tuple[int, float]]:
    return list(zip(ids.tolist(), values.tolist(), strict=True))


def _poison(step_engine: StepEngine) -> None:
    """Nothing of an earlier driver may help: a slot that is read before it is written gives broken logits."""
    if isinstance(step_engine, TensorEngine):
        with torch.inference_mode():
            for keys, values in step_engine._cache.layers:
                keys.fill_(float("nan"))
                values.fill_(float("nan"))
