"""Takes a step's result into the sequences: tokens appended, blocks registered, ends decided, news written.

Vectorised over the sampled rows; Python runs only for what happens rarely: a first token, a full block, an end,
log-probabilities.
"""

from typing import Any, NamedTuple

import numpy as np

from ..ipc.frontend_messages import FailKind, FinishReason, OutputColumns
from ..ipc.plan import ResultFlag, StepResult
from .plan_builder import filled
from .request import Request, Sequence, State
from .scheduler import PlannedStep, Scheduler
from .sequence_table import SequenceTable, Tenants
from .statistics import Statistics

INTERNAL = 0  # the owner number of the engine's own requests (boot token, canary), which no metric counts

_LENGTH = int(FinishReason.LENGTH)

_NO_VECTOR = (
    "the model produced a vector that is not finite for this text; the weights, the dtype or a kernel may be at fault: "
    "try --dtype float32, and see /v1/server_info for the kernels in use"
)

Array = np.ndarray[Any, Any]


class Failure(NamedTuple):
    """One request that ends without an answer."""

    request: Request
    kind: FailKind
    text: str


class News(NamedTuple):
    """What one commit has to tell: columns per owner, and failures."""

    outputs: list[tuple[int, OutputColumns]]
    failures: list[Failure]
    over: list[Request]


class Committer:
    """Applies results, in the order in which their plans left."""

    def __init__(self, scheduler: Scheduler, statistics: Statistics) -> None:
        self.scheduler = scheduler
        self.table = scheduler.table
        self.statistics = statistics

    def commit(self, result: StepResult, now: float) -> News:
        """The oldest plan in flight has returned `result`."""
        table, record = self.table, self.scheduler.in_flight.popleft()
        assert result.step[0] == record.step, f"step {result.step[0]} returned, {record.step} was awaited"
        table.computed[record.rows] = record.ends
        sampled = record.sampled
        assert sampled.tobytes() == result.rows.tobytes(), f"step {record.step} sampled other rows than planned"
        failures = self._invalid(result) if np.count_nonzero(result.flags) else []
        is_alive = table.alive[sampled]
        rows, tokens = sampled, result.token_ids
        if np.count_nonzero(is_alive) < len(rows):
            rows, tokens = rows[is_alive], tokens[is_alive]
        tenants = table.tenants(rows)
        known = table.known[rows]
        table.history[rows, known] = tokens
        lengths = known + 1
        table.known[rows] = lengths
        finish = self._ends(tenants, tokens, lengths)
        cached, gaps = np.zeros(len(rows), np.int32), now - table.last_token_s[rows]
        if record.num_prefill_tokens:
            is_first = lengths == table.prompt_length[rows] + 1
            for index in is_first.nonzero()[0]:
                cached[index] = self._first_token(self._sequence(rows[index]), now)
            gaps = gaps[~is_first]
        self._remember(record)
        self._observe(tenants, gaps, now, record)
        self.statistics.step_seconds += result.seconds
        done = np.zeros(len(rows), np.uint8)
        over: list[Request] = [failure.request for failure in failures]
        for index in finish.nonzero()[0]:
            sequence = self._sequence(rows[index])
            self.end_sequence(sequence, FinishReason(int(finish[index])), now)
            if sequence.request.is_over:
                done[index] = 1
                over.append(sequence.request)
        entries = _Entries(rows, tokens, tenants.request_id, tenants.choice, tenants.owner, finish, done, cached)
        outputs = entries.by_owner(_Extras(result, self.table, rows) if _has_extras(result) else None)
        if len(result.pooled_rows):
            pooled, broken = self._pooled(result, over, now)
            outputs, failures = outputs + pooled, failures + broken
        self.scheduler.returned(record.step)
        return News(outputs, failures, over)

    def fail_step(self, kind: FailKind, text: str, now: float) -> News:
        """The oldest plan in flight could not be computed: its requests end, the others go on."""
        record = self.scheduler.in_flight.popleft()
        requests = {id(s.request): s.request for row in record.rows if (s := self.table.sequences[row]) is not None}
        failures = [self.fail(request, kind, text) for request in requests.values() if not request.is_over]
        self.scheduler.returned(record.step)
        return News([], failures, [failure.request for failure in failures])

    def fail(self, request: Request, kind: FailKind, text: str) -> Failure:
        """End every sequence of the request without an answer."""
        for sequence in request.sequences:
            if sequence.state is not State.ENDED:
                self.scheduler.end(sequence)
        self.scheduler.drop_shared(request)
        self.statistics.num_failed += request.owner != INTERNAL
        return Failure(request, kind, text)

    def drop(self, request: Request) -> None:
        """End every sequence of a request that has never run, unheard."""
        for sequence in request.sequences:
            self.scheduler.end(sequence)

    def end_sequence(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """A sequence ends with an answer; its followers, if they waited for it, wait on their own."""
        request = sequence.request
        num_outputs = (
            int(self.table.known[sequence.row]) if sequence.row >= 0 else len(sequence.tokens)
        ) - request.prompt_length
        was_leader = sequence.choice == 0 and num_outputs == 0
        self.scheduler.end(sequence)
        if request.owner != INTERNAL:
            self.statistics.finished[reason] += 1
            self.statistics.generation_tokens.observe(num_outputs)
        if was_leader:
            self._queue_followers(request)
        if request.is_over:
            self.scheduler.drop_shared(request)
            if request.owner != INTERNAL:
                self.statistics.request_latency.observe(now - request.arrival_s)
        else:
            self.scheduler.release_shared(sequence)

    def _pooled(
        self, result: StepResult, over: list[Request], now: float
    ) -> tuple[list[tuple[int, OutputColumns]], list[Failure]]:
        """Vectors end their requests; one that is not finite fails its own."""
        vectors = np.split(result.pooled, np.cumsum(result.pooled_dims)[:-1])
        by_owner: dict[int, list[tuple[Request, Array]]] = {}
        failures = []
        for row, vector in zip(result.pooled_rows, vectors, strict=True):
            if not self.table.alive[row]:
                continue
            sequence = self._sequence(row)
            request = sequence.request
            over.append(request)
            if not np.isfinite(vector).all():
                failures.append(self.fail(request, FailKind.INVALID_LOGITS, _NO_VECTOR))
                continue
            self._first_token(sequence, now)
            self.end_sequence(sequence, FinishReason.POOLED, now)
            by_owner.setdefault(request.owner, []).append((request, vector))
        return [(owner, _vector_columns(found)) for owner, found in by_owner.items()], failures

    # parts of commit

    def _sequence(self, row: Any) -> Sequence:
        sequence: Sequence | None = self.table.sequences[row]
        assert sequence is not None
        return sequence

    def _invalid(self, result: StepResult) -> list[Failure]:
        failures = []
        for row in result.rows[(result.flags & ResultFlag.INVALID) != 0]:
            sequence = self.table.sequences[row]
            if sequence is not None and self.table.alive[row]:
                text = (
                    "the model produced logits that are not finite for this request; the weights, the dtype or a "
                    "kernel may be at fault: try --dtype float32, and see /v1/server_info for the kernels in use"
                )
                failures.append(self.fail(sequence.request, FailKind.INVALID_LOGITS, text))
        return failures

    def _ends(self, tenants: Tenants, tokens: Array, lengths: Array) -> Array:
        """[rows] FinishReason of each, whose new token makes it so long."""
        rows = tenants.rows
        finish = np.zeros(len(rows), np.uint8)
        finish[lengths >= tenants.limit] = _LENGTH
        is_end = tenants.ends == tokens[:, None]
        if tenants.has_many_ends or np.count_nonzero(is_end):
            may_end = self.table.many_ends[rows] | is_end.any(axis=1)
            for index in (may_end & (lengths >= self.table.min_length[rows])).nonzero()[0]:
                request, token = self._sequence(rows[index]).request, int(tokens[index])
                if token in request.end_token_ids:
                    finish[index] = FinishReason.END_TOKEN
                elif token in request.sampling.stop_token_ids:
                    finish[index] = FinishReason.STOP_TOKEN
        return finish

    def _first_token(self, sequence: Sequence, now: float) -> int:
        """Bookkeeping of a sequence's first token; the prompt tokens it had from the cache."""
        request = sequence.request
        if sequence.choice == 0 and request.owner != INTERNAL:
            self.statistics.num_prompt_tokens += request.prompt_length
            self.statistics.num_cached_tokens += request.cached_tokens or 0
            self.statistics.prompt_tokens.observe(request.prompt_length)
            self.statistics.time_to_first_token.observe(now - request.arrival_s)
            self.statistics.queue_time.observe((request.first_scheduled_s or now) - request.arrival_s)
            if len(request.sequences) > 1:
                num_shared = (request.prompt_length - 1) // self.table.block_size
                request.shared_blocks = sequence.blocks[:num_shared]
                for block in request.shared_blocks:
                    self.table.pool.share(block)
                self._queue_followers(request)
                self.scheduler.release_shared(sequence)
        return request.cached_tokens or 0

    def _queue_followers(self, request: Request) -> None:
        for follower in request.sequences[1:]:
            if follower.state is State.WAITING and not follower.is_queued and follower.row < 0:
                self.scheduler.waiting.add(follower)

    def _remember(self, record: PlannedStep) -> None:
        table = self.table
        if not table.cache.enabled:
            return
        for row in record.rows[record.ends >= table.hash_at[record.rows]]:
            if table.alive[row]:
                table.remember(self._sequence(row))

    def _observe(self, tenants: Tenants, gaps: Array, now: float, record: PlannedStep) -> None:
        """`gaps`: seconds since the token before, of the rows that had one."""
        statistics = self.statistics
        statistics.inter_token_latency.observe_many(gaps)
        self.table.last_token_s[tenants.rows] = now
        statistics.num_generation_tokens += int(np.count_nonzero(tenants.owner))
        statistics.num_steps += 1
        statistics.step_time.observe(now - record.planned_s)


class _Entries(NamedTuple):
    """One entry per sampled live row, parallel arrays."""

    rows: Array
    tokens: Array
    request_ids: Array
    choices: Array
    owners: Array
    finish: Array
    done: Array
    cached: Array

    def by_owner(self, extras: "_Extras | None") -> list[tuple[int, OutputColumns]]:
        owners = self.owners
        if extras is not None:
            owners = np.concatenate((owners, extras.prompt_only_owners(self.rows)))
        if not len(owners):
            return []
        if np.count_nonzero(owners == owners[0]) == len(owners):
            return [(int(owners[0]), self._columns(extras, int(owners[0])))]
        return [(int(owner), self._take(owner)._columns(extras, int(owner))) for owner in np.unique(owners)]

    def _take(self, owner: Any) -> "_Entries":
        mine = self.owners == owner
        return _Entries(*(column[mine] for column in self))

    def _columns(self, extras: "_Extras | None", owner: int) -> OutputColumns:
        columns = {
            "request_ids": self.request_ids,
            "choices": self.choices,
            "token_counts": filled(len(self.rows), 1, np.int32),
            "finish": self.finish,
            "done": self.done,
            "cached_tokens": self.cached,
            "token_ids": self.tokens,
        }
        if extras is not None:
            extras.add(columns, self.rows, owner)
        return OutputColumns(**columns)


def _vector_columns(found: list[tuple[Request, Array]]) -> OutputColumns:
    """One terminal entry per request."""
    return OutputColumns(
        request_ids=np.array([request.request_id for request, _ in found], np.int64),
        choices=filled(len(found), 0, np.int32),
        token_counts=filled(len(found), 0, np.int32),
        finish=filled(len(found), FinishReason.POOLED, np.uint8),
        done=filled(len(found), 1, np.uint8),
        cached_tokens=np.array([request.cached_tokens or 0 for request, _ in found], np.int32),
        pooled_dims=np.array([len(vector) for _, vector in found], np.int32),
        pooled=np.concatenate([vector for _, vector in found]),
    )


def _has_extras(result: StepResult) -> bool:
    return bool(len(result.logprob_rows) or len(result.prompt_rows))


class _Extras:
    """Log-probabilities of a result, by row: what only some requests ask for."""

    def __init__(self, result: StepResult, table: SequenceTable, rows: Array) -> None:
        self.result = result
        self.table = table
        told = set(rows.tolist())
        top_ends = np.cumsum(result.top_counts)
        self.sampled = {
            int(row): (index, int(end - count), int(end))
            for index, (row, count, end) in enumerate(
                zip(result.logprob_rows, result.top_counts, top_ends, strict=True)
            )
        }
        self.prompts: dict[int, tuple[int, int, int, int, int]] = {}
        first = top_first = 0
        for row, count, width in zip(result.prompt_rows, result.prompt_counts, result.prompt_top_counts, strict=True):
            last, top_last = first + int(count), top_first + int(count) * int(width)
            if row in told or table.alive[row]:
                self.prompts[int(row)] = (first, last, top_first, top_last, int(width))
            first, top_first = last, top_last
        self._report_prompts()

    def _report_prompts(self) -> None:
        for row, (first, last, _, _, _) in self.prompts.items():
            sequence = self.table.sequences[row]
            assert sequence is not None
            sequence.prompt_logprobs_sent += last - first

    def prompt_only_owners(self, rows: Array) -> Array:
        told = set(rows.tolist())
        only = [row for row in self.prompts if row not in told]
        return self.table.owner[np.array(only, np.int32)] if only else np.empty(0, np.int32)

    def add(self, columns: dict[str, Array], rows: Array, owner: int) -> None:
        """Lengthen the columns by log-probabilities of `rows` and of prompts of this owner's rows."""
        mine = [row for row in self.prompts if self.table.owner[row] == owner]
        present = set(rows.tolist())
        only = [row for row in mine if row not in present]
        if only:
            extra = np.array(only, np.int32)
            zeros = np.zeros(len(only), np.int32)
            columns["request_ids"] = np.concatenate((columns["request_ids"], self.table.request_id[extra]))
            columns["choices"] = np.concatenate((columns["choices"], self.table.choice[extra]))
            for name in ("token_counts", "cached_tokens"):
                columns[name] = np.concatenate((columns[name], zeros))
            for name in ("finish", "done"):
                columns[name] = np.concatenate((columns[name], zeros.astype(np.uint8)))
        order = [*rows.tolist(), *only]
        self._add_sampled(columns, order)
        self._add_prompts(columns, order)

    def _add_sampled(self, columns: dict[str, Array], order: list[int]) -> None:
        result = self.result
        found = [self.sampled.get(row) for row in order]
        if not any(found):
            return
        entries = [entry for entry in found if entry is not None]
        index = np.array([entry[0] for entry in entries], np.int64)
        columns["logprob_counts"] = np.array([entry is not None for entry in found], np.int32)
        columns["logprobs"] = result.logprobs[index]
        columns["ranks"] = result.ranks[index]
        columns["top_counts"] = result.top_counts[index]
        columns["top_ids"] = np.concatenate([result.top_ids[first:last] for _, first, last in entries])
        columns["top_logprobs"] = np.concatenate([result.top_logprobs[first:last] for _, first, last in entries])

    def _add_prompts(self, columns: dict[str, Array], order: list[int]) -> None:
        result = self.result
        found = [self.prompts.get(row) for row in order]
        if not any(found):
            return
        entries = [entry for entry in found if entry is not None]
        columns["prompt_counts"] = np.array([entry[1] - entry[0] if entry else 0 for entry in found], np.int32)
        columns["prompt_top_counts"] = np.array([entry[4] if entry else 0 for entry in found], np.int32)
        columns["prompt_logprobs"] = np.concatenate([result.prompt_logprobs[a:b] for a, b, _, _, _ in entries])
        columns["prompt_ranks"] = np.concatenate([result.prompt_ranks[a:b] for a, b, _, _, _ in entries])
        columns["prompt_top_ids"] = np.concatenate([result.prompt_top_ids[a:b] for _, _, a, b, _ in entries])
        columns["prompt_top_logprobs"] = np.concatenate([result.prompt_top_logprobs[a:b] for _, _, a, b, _ in entries])
