"""Drives an engine against the oracle worker with a clock of its own: tests of policy, without processes."""

from collections import deque

import numpy as np

from trimaran.engine_core.engine import Engine
from trimaran.engine_core.request import Request
from trimaran.engine_core.statistics import Statistics
from trimaran.ipc.facts import QueueOrdering
from trimaran.ipc.plan import StepPlan
from trimaran.ipc.sampling import Sampling
from trimaran.ipc.server_info import EngineLimits
from trimaran.tests.pure.oracle_worker import OracleWorker

VOCAB = 1009


class Lockstep:
    """A step takes `step_s` plus `token_s` per prompt token of the engine's clock; the worker says that its host took
    `host_s` (or as long) and that it waited `waited_s` for the device.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        max_num_seqs: int = 16,
        max_model_len: int = 2048,
        budget: int = 256,
        prefix_caching: bool = True,
        step_s: float = 0.01,
        token_s: float = 0.0,
        max_chunk_tokens: int = 0,
        ordering: QueueOrdering = QueueOrdering.ARRIVAL,
        host_s: float = 0.0,
        waited_s: float = 0.0,
    ) -> None:
        self.limits = EngineLimits(
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            max_num_seqs=max_num_seqs,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype="float32",
        )
        self.engine = Engine(
            self.limits,
            max_batched_tokens=budget,
            max_chunk_tokens=max_chunk_tokens,
            ordering=ordering,
            prefix_caching=prefix_caching,
            statistics=Statistics(),
            is_asynchronous=waited_s > 0,
        )
        self.worker = OracleWorker(num_blocks=num_blocks, block_size=block_size, vocab_size=VOCAB)
        self.step_s, self.token_s = step_s, token_s
        self.host_s, self.waited_s = host_s, waited_s
        self.now = 0.0
        self.plans: deque[StepPlan] = deque()
        self.steps: list[StepPlan] = []
        self.token_times: dict[tuple[int, int], list[float]] = {}
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.cached: dict[int, int] = {}
        self.num_submitted = 0

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        n: int = 1,
        priority: int = 0,
        salt: str | None = None,
        **sampling: object,
    ) -> Request:
        """A request that arrives now."""
        request = Request(
            request_id=self.num_submitted,
            owner=1,
            order=self.num_submitted,
            prompt=np.array(prompt, np.int32),
            sampling=Sampling(max_tokens=max_tokens, seed=0, **sampling),  # type: ignore[arg-type]
            num_sequences=n,
            priority=priority,
            arrival_s=self.now,
            root=self.engine.cache.root(salt=salt, adapter=None),
        )
        self.num_submitted += 1
        self.engine.submit(request)
        return request

    def step(self) -> None:
        """Plan what can be planned, return the oldest."""
        while self.engine.can_plan() and (plan := self.engine.plan(self.now)) is not None:
            self.plans.append(plan)
        if not self.plans:
            return
        plan = self.plans.popleft()
        self.steps.append(plan)
        result = self.worker.run(plan)
        took_s = self.step_s + self.token_s * len(plan.token_ids)
        self.now += took_s
        result.seconds = np.array([self.host_s or took_s, 0.0, 0.0, self.waited_s])
        for _, columns in self.engine.commit(result, self.now).outputs:
            keys = zip(columns.request_ids.tolist(), columns.choices.tolist(), strict=True)
            for key, token, cached in zip(
                keys, columns.token_ids.tolist(), columns.cached_tokens.tolist(), strict=True
            ):
                self.token_times.setdefault(key, []).append(self.now)
                self.tokens.setdefault(key, []).append(token)
                self.cached[key[0]] = max(self.cached.get(key[0], 0), cached)

    def run(self, max_steps: int = 100_000) -> None:
        """Until every request is over."""
        for _ in range(max_steps):
            if not self.engine.requests and not self.plans:
                return
            self.step()
        raise AssertionError(f"{len(self.engine.requests)} requests are not over after {max_steps} steps")


def words(seed: int, length: int) -> list[int]:
    """A prompt unlike any other seed's."""
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()
