"""Random lives of the engine core against the suspicious oracle worker: nothing lost, nothing shared wrongly."""

import os
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trimaran.engine_core.engine import Engine
from trimaran.engine_core.request import Request
from trimaran.engine_core.statistics import Statistics
from trimaran.ipc.frontend_messages import FailKind, FinishReason, OutputColumns
from trimaran.ipc.plan import StepPlan
from trimaran.ipc.sampling import Sampling
from trimaran.ipc.server_info import EngineLimits
from trimaran.ipc.worker_messages import StepError, StepErrorKind
from trimaran.tests.pure.oracle_worker import OracleWorker, expected_tokens

VOCAB = 97
BLOCK = 4
MAX_PREEMPTIONS = 5
# a failure found is enough where nobody reads the example (tests/mutations)
PHASES = tuple(phase for phase in Phase if phase is not Phase.shrink or "NO_SHRINK" not in os.environ)


class Client:
    """What one request was told."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.outputs: dict[int, list[int]] = {sequence.choice: [] for sequence in request.sequences}
        self.finish: dict[int, FinishReason] = {}
        self.num_terminal = 0
        self.failed: FailKind | None = None
        self.aborted = False


class EngineLife(RuleBasedStateMachine):
    """Submits, aborts, plans, returns, fails and loses workers in any order."""

    @initialize(
        num_blocks=st.integers(10, 24),
        num_rows=st.integers(1, 6),
        budget=st.integers(6, 24),
        caching=st.booleans(),
        horizon=st.integers(1, 6),
    )
    def start(self, num_blocks: int, num_rows: int, budget: int, caching: bool, horizon: int) -> None:
        self.limits = EngineLimits(
            max_model_len=9 * BLOCK,
            vocab_size=VOCAB,
            max_num_seqs=num_rows,
            num_blocks=num_blocks,
            block_size=BLOCK,
            dtype="float32",
        )
        self.statistics = Statistics()
        self.budget = max(budget, num_rows)
        self.caching = caching
        self.horizon = horizon
        self.clients: dict[int, Client] = {}
        self.now = 0.0
        self.new_engine()

    def new_engine(self) -> None:
        self.engine = Engine(
            self.limits,
            max_batched_tokens=self.budget,
            prefix_caching=self.caching,
            statistics=self.statistics,
            first_horizon=self.horizon,
            is_asynchronous=True,
        )
        self.worker = OracleWorker(num_blocks=self.limits.num_blocks, block_size=BLOCK, vocab_size=VOCAB)
        self.plans: deque[StepPlan] = deque()
        self.named: deque[dict[int, tuple[int, list[int]]]] = deque()

    # what happens

    @rule(
        prefix=st.integers(0, 3),
        length=st.integers(1, 20),
        max_tokens=st.integers(1, 30),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        end_after=st.none() | st.integers(1, 6),
        salt=st.sampled_from([None, None, "a"]),
    )
    def submit(
        self, prefix: int, length: int, max_tokens: int, n: int, priority: int, end_after: int | None, salt: str | None
    ) -> None:
        prompt = [(prefix * 31 + index * 7) % VOCAB for index in range(length)]
        ends: tuple[int, ...] = ()
        if end_after is not None:
            ends = (expected_tokens(prompt, 0, VOCAB, end_after)[-1],)
        request = Request(
            request_id=len(self.clients),
            owner=1 + len(self.clients) % 2,
            order=len(self.clients),
            prompt=np.array(prompt, np.int32),
            sampling=Sampling(max_tokens=max_tokens, end_token_ids=ends, seed=1),
            num_sequences=n,
            priority=priority,
            arrival_s=self.now,
            root=self.engine.cache.root(salt=salt, adapter=None),
        )
        self.clients[request.request_id] = Client(request)
        self.engine.submit(request)

    @precondition(lambda self: self.engine.requests)
    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        request = self.pick(pick)
        self.clients[request.request_id].aborted = True
        self.hear(self.engine.abort(request, self.now))

    @precondition(lambda self: self.engine.requests)
    @rule(pick=st.integers(0, 1000), choice=st.integers(0, 2))
    def finish_one(self, pick: int, choice: int) -> None:
        request = self.pick(pick)
        columns = self.engine.finish_sequence(request, choice, self.now)
        if columns is not None:
            self.hear(columns)

    @rule(times=st.integers(1, 3))
    def plan(self, times: int) -> None:
        for _ in range(times):
            self.plan_once()

    def plan_once(self) -> bool:
        self.now += 0.01
        if not self.engine.can_plan():
            return False
        plan = self.engine.plan(self.now)
        if plan is None:
            return False
        assert plan.counts.sum() <= self.budget
        self.plans.append(StepPlan.unpack(bytes(StepPlan.SCHEMA.pack(plan.values()))))
        named = {}
        for row in plan.rows.tolist():
            sequence = self.engine.table.sequences[row]
            assert sequence is not None
            named[row] = (id(sequence), list(sequence.blocks))
        self.named.append(named)
        return True

    @precondition(lambda self: self.plans)
    @rule(times=st.integers(1, 3), is_quick=st.booleans())
    def come_back(self, times: int, is_quick: bool) -> None:
        """Quick: the device outruns the host, and another step may be in flight."""
        for _ in range(times):
            self.return_once(is_quick=is_quick)

    def return_once(self, *, is_quick: bool = False) -> None:
        if not self.plans:
            return
        self.now += 0.01
        result = self.worker.run(self.plans.popleft())
        result.seconds = np.array([0.002, 0.0, 0.0, 0.001 if is_quick else 0.1])
        self.named.popleft()
        news = self.engine.commit(result, self.now)
        for _, columns in news.outputs:
            self.hear(columns)
        self.hear_failures(news.failures)

    @precondition(lambda self: self.plans)
    @rule()
    def fail_a_step(self) -> None:
        plan = self.plans.popleft()
        self.named.popleft()
        step = int(plan.step[0])
        self.worker.run(plan)  # the worker has applied the changes of rows; only its answer is missing
        news = self.engine.commit(StepError(0, 1, step, StepErrorKind.OUT_OF_MEMORY, "test"), self.now)
        self.hear_failures(news.failures)

    @precondition(lambda self: self.engine.requests)
    @rule(pick=st.integers(0, 1000))
    def poison(self, pick: int) -> None:
        self.worker.invalid_request_ids.add(self.pick(pick).request_id)

    @rule()
    def lose_workers(self) -> None:
        self.hear_failures(self.engine.fail_all(FailKind.WORKER_LOST, "test"))
        assert self.engine.pool.num_held == 0
        self.new_engine()

    def pick(self, pick: int) -> Request:
        return list(self.engine.requests.values())[pick % len(self.engine.requests)]

    # what clients hear

    def hear(self, columns: OutputColumns) -> None:
        columns = OutputColumns.unpack(bytes(OutputColumns.SCHEMA.pack(columns.values())))
        cursor = 0
        for index, request_id in enumerate(columns.request_ids.tolist()):
            client = self.clients[request_id]
            choice, count = int(columns.choices[index]), int(columns.token_counts[index])
            assert client.num_terminal == 0, "news after the terminal message"
            assert choice not in client.finish, "news of a finished sequence"
            client.outputs[choice] += columns.token_ids[cursor : cursor + count].tolist()
            cursor += count
            reason = FinishReason(int(columns.finish[index]))
            if reason is not FinishReason.NONE:
                client.finish[choice] = reason
            if columns.done[index]:
                client.num_terminal += 1
                assert len(client.finish) == len(client.outputs)

    def hear_failures(self, failures: list) -> None:
        for request, kind, _ in failures:
            client = self.clients[request.request_id]
            client.num_terminal += 1
            client.failed = kind

    # what must hold

    @invariant()
    def blocks_are_counted(self) -> None:
        if not hasattr(self, "engine"):
            return
        held: Counter[int] = Counter()
        for sequence in self.engine.table.sequences:
            if sequence is not None:
                held.update(sequence.blocks)
        for request in {id(client.request): client.request for client in self.clients.values()}.values():
            held.update(request.shared_blocks)
        pool = self.engine.pool
        for block in range(pool.num_blocks):
            assert pool.references(block) == held[block], f"block {block}"
        assert pool.num_held == len(held)

    @invariant()
    def plans_in_flight_keep_their_blocks(self) -> None:
        for named in getattr(self, "named", ()):
            for row, (identity, blocks) in named.items():
                sequence = self.engine.table.sequences[row]
                assert sequence is not None and id(sequence) == identity, f"row {row} was reused too early"
                assert sequence.blocks[: len(blocks)] == blocks

    @invariant()
    def nobody_is_preempted_for_ever(self) -> None:
        for client in getattr(self, "clients", {}).values():
            for sequence in client.request.sequences:
                assert sequence.num_preemptions <= MAX_PREEMPTIONS

    @invariant()
    def aside_is_there(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.table.reserved_blocks >= 0

    @invariant()
    def terminal_once(self) -> None:
        for client in getattr(self, "clients", {}).values():
            assert client.num_terminal <= 1
            alive = client.request.request_id in self.engine.requests
            assert alive == (client.num_terminal == 0)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(20_000):
            if not self.engine.requests and not self.plans:
                break
            if not self.plan_once():
                assert self.plans or not self.engine.requests, "work is left and nothing can be planned: starvation"
                self.return_once()
        assert not self.engine.requests, "starvation"
        self.blocks_are_counted()
        assert self.engine.pool.num_held == 0 and self.engine.table.num_free_rows == self.limits.max_num_seqs
        assert self.engine.table.reserved_blocks == 0
        for client in self.clients.values():
            self.judge(client)

    def judge(self, client: Client) -> None:
        assert client.num_terminal == 1
        prompt = client.request.prompt.tolist()
        sampling = client.request.sampling
        room = min(sampling.max_tokens, self.limits.max_model_len - len(prompt))
        for choice, outputs in client.outputs.items():
            expected = expected_tokens(prompt, choice, VOCAB, room)
            assert outputs == expected[: len(outputs)], f"choice {choice} got wrong tokens"
            if choice in client.finish and client.finish[choice] is FinishReason.LENGTH:
                assert len(outputs) == room
            if choice in client.finish and client.finish[choice] is FinishReason.END_TOKEN:
                assert outputs[-1] in sampling.end_token_ids
                assert not set(outputs[:-1]) & set(sampling.end_token_ids)
        if client.failed is None and not client.aborted:
            assert set(client.finish) == set(client.outputs)


EngineLife.TestCase.settings = settings(
    max_examples=500, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES
)
TestEngineLife = pytest.mark.timeout(240)(EngineLife.TestCase)


class LongEngineLife(EngineLife):
    """The same, for as long as `make test-all` allows."""


LongEngineLife.TestCase.settings = settings(
    max_examples=10_000, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES
)
TestLongEngineLife = pytest.mark.long(pytest.mark.timeout(1200)(LongEngineLife.TestCase))
