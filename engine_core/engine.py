"""The engine without its sockets: requests in, plans out, results in, news out. Deterministic, single-threaded."""

import numpy as np

from ..ipc.facts import QueueOrdering
from ..ipc.frontend_messages import FailKind, FinishReason, OutputColumns
from ..ipc.plan import StepPlan, StepResult
from ..ipc.server_info import EngineLimits
from ..ipc.worker_messages import StepError, StepErrorKind
from .block_pool import BlockPool
from .commit import Committer, Failure, News
from .masks import MaskWork
from .prefix_cache import PrefixCache
from .request import Request, Sequence, State
from .scheduler import FIRST_HORIZON, Scheduler
from .sequence_table import SequenceTable
from .statistics import Statistics
from .waiting_line import WaitingLine

MAX_STEPS_IN_FLIGHT = 2


class Engine:
    """One generation's requests. Every submitted request leaves by exactly one terminal entry or failure.

    `is_asynchronous`: the device computes while its host goes on.
    """

    def __init__(
        self,
        limits: EngineLimits,
        *,
        max_batched_tokens: int,
        max_chunk_tokens: int = 0,
        ordering: QueueOrdering = QueueOrdering.ARRIVAL,
        prompt_step_s: float = 0.25,
        prefix_caching: bool,
        encodes: bool = False,
        statistics: Statistics,
        max_steps_in_flight: int = MAX_STEPS_IN_FLIGHT,
        is_asynchronous: bool = False,
        first_horizon: int = FIRST_HORIZON,
    ) -> None:
        self.limits = limits
        self.statistics = statistics
        self.pool = BlockPool(limits.num_blocks)
        self.cache = PrefixCache(self.pool, limits.block_size, enabled=prefix_caching)
        self.table = SequenceTable(
            num_rows=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            pool=self.pool,
            cache=self.cache,
        )
        self.waiting = WaitingLine()
        self.scheduler = Scheduler(
            self.table,
            self.waiting,
            max_batched_tokens=max_batched_tokens,
            max_chunk_tokens=max_chunk_tokens,
            ordering=ordering,
            prompt_step_s=prompt_step_s,
            first_horizon=first_horizon,
            encodes=encodes,
        )
        self.committer = Committer(self.scheduler, statistics)
        self.requests: dict[int, Request] = {}
        self.compiling: set[int] = set()  # ids of those whose grammar is not compiled yet
        self._max_steps_in_flight = max_steps_in_flight
        self._is_asynchronous = is_asynchronous
        self._masked_step = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return len(self.table.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait: in line, or for their request's first sequence to compute the prompt."""
        followers = sum(
            sequence.state is State.WAITING and not sequence.is_queued
            for request in self.requests.values()
            if len(request.sequences) > 1 or request.grammar is not None
            for sequence in request.sequences
        )
        return len(self.waiting) + followers

    def submit(self, request: Request) -> None:
        """The request's first sequence stands in line; the others wait until it has computed the prompt. With a grammar
        that is not compiled yet it waits outside, and `queue` gives it its place.
        """
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request
        if request.grammar is None or request.compiled is not None:
            self.waiting.add(request.sequences[0])
        else:
            self.compiling.add(request.request_id)

    def queue(self, request: Request) -> None:
        """Its grammar is compiled: it stands in line where it would have stood."""
        assert request.compiled is not None and not request.sequences[0].is_queued
        self.compiling.discard(request.request_id)
        self.waiting.add(request.sequences[0])

    def reject(self, request: Request) -> None:
        """Its grammar cannot be honoured: it never stood in line and never will."""
        self._forget(request)
        self.committer.drop(request)

    def masks_due(self) -> MaskWork | None:
        """The masks that the oldest step in flight waits for, once: they follow from the tokens of those before it."""
        in_flight = self.scheduler.in_flight
        if not in_flight or (rows := in_flight[0].masked) is None or in_flight[0].step <= self._masked_step:
            return None
        self._masked_step = in_flight[0].step
        return MaskWork.collect(self._masked_step, rows, self.table, self.limits.vocab_size)

    def fail(self, request: Request, kind: FailKind, text: str) -> Failure:
        """One request ends without an answer, whatever it was doing."""
        self._forget(request)
        failure = self.committer.fail(request, kind, text)
        self.scheduler.settle()
        return failure

    def is_step_due(self, step: int) -> bool:
        """Whether this step is the one that returns next."""
        return bool(self.scheduler.in_flight) and self.scheduler.in_flight[0].step == step

    def can_plan(self) -> bool:
        """Whether another step may be in flight: one more where two do not keep the device busy, though sequences that
        end unforeseen are then computed once more.
        """
        spare = self._is_asynchronous and self.scheduler.device_outruns_host
        return len(self.scheduler.in_flight) < self._max_steps_in_flight + spare

    def plan(self, now: float) -> StepPlan | None:
        """The next step's plan, or None when there is nothing to compute now."""
        return self.scheduler.plan(now) if self.scheduler.has_work else None

    def commit(self, result: StepResult | StepError, now: float) -> News:
        """The oldest plan in flight has returned, or failed."""
        record = self.scheduler.in_flight[0]
        if isinstance(result, StepError):
            assert result.step == record.step, f"step {result.step} failed, {record.step} was awaited"
            text = f"the step that computed this request failed: {result.text}"
            if result.kind is StepErrorKind.OUT_OF_MEMORY:
                text += "; lower --memory-utilization, --max-batched-tokens or --max-num-seqs"
            news = self.committer.fail_step(FailKind.STEP_FAILED, text, now)
        else:
            self.scheduler.observe(record, result.seconds)
            news = self.committer.commit(result, now)
        for request in news.over:
            self._forget(request)
        return news

    def abort(self, request: Request, now: float) -> OutputColumns:
        """End every sequence of a request at its frontend's wish: its terminal entries."""
        living = [sequence for sequence in request.sequences if sequence.state is not State.ENDED]
        return self._end(request, living, now)

    def finish_sequence(self, request: Request, choice: int, now: float) -> OutputColumns | None:
        """End one sequence at its frontend's wish; None if it has ended already."""
        if not 0 <= choice < len(request.sequences) or request.sequences[choice].state is State.ENDED:
            return None
        return self._end(request, [request.sequences[choice]], now)

    def in_flight(self) -> list[str]:
        """The steps that have not returned, for the log: sizes, and the requests in them."""
        told = []
        for record in self.scheduler.in_flight:
            sequences = [self.table.sequences[row] for row in record.rows]
            requests = sorted({sequence.request.request_id for sequence in sequences if sequence is not None})
            size = f"{len(record.rows)} sequences, {record.num_tokens} tokens, {record.num_prefill_tokens} of prompts"
            told.append(f"step {record.step} ({size}) with requests {requests}")
        return told

    def fail_all(self, kind: FailKind, text: str) -> list[Failure]:
        """The worker group is gone: every live request fails, every block and row is free."""
        failures = [self.committer.fail(request, kind, text) for request in self.requests.values()]
        self.requests.clear()
        self.compiling.clear()
        self.scheduler.in_flight.clear()
        self.table.clear()
        return failures

    def _forget(self, request: Request) -> None:
        self.requests.pop(request.request_id, None)
        self.compiling.discard(request.request_id)

    def _end(self, request: Request, sequences: list[Sequence], now: float) -> OutputColumns:
        for sequence in sequences:
            self.committer.end_sequence(sequence, FinishReason.ABORTED, now)
        self.scheduler.settle()
        num = len(sequences)
        done = np.zeros(num, np.uint8)
        if request.is_over:
            done[-1] = 1
            self._forget(request)
        return OutputColumns(
            request_ids=np.full(num, request.request_id, np.int64),
            choices=np.array([sequence.choice for sequence in sequences], np.int32),
            token_counts=np.zeros(num, np.int32),
            finish=np.full(num, FinishReason.ABORTED, np.uint8),
            done=done,
            cached_tokens=np.zeros(num, np.int32),
        )
