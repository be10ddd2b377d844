"""Decides what one step computes.

One token budget per step. Decodes come first, one token each; what they leave goes to prompts in order, where a long
prompt takes at most half of what is left while others wait. Blocks for a whole prompt are taken when it is seated; a
decode takes one block at a time and, when none is free, the latest arrival of the lowest priority gives its own back.
An encoder's prompts go whole into one step each, without blocks.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice, takewhile
from typing import Any

import numpy as np
from msgspec import Struct

from ..ipc.facts import QueueOrdering
from ..ipc.plan import StepPlan, WorkFlag
from .plan_builder import PlanBuilder
from .request import Request, Sequence, State
from .sequence_table import SequenceTable
from .waiting_line import WaitingLine

Array = np.ndarray[Any, Any]

MIN_CHUNK = 16  # a prompt is not cut into smaller pieces than this unless the budget itself is smaller
MAX_BYPASSED = 32  # later arrivals that may be seated before one that does not fit
MAX_PASSED = 8  # that do not fit, in one look along the line
ORDERED = 64  # of the line's head that may be taken by length instead of arrival
FIRST_HORIZON = 64  # tokens of growth that admission leaves room for, per running sequence, before any preemption
CALM_STEPS = 256  # steps without preemption after which the horizon halves
RESERVE_AFTER = 2  # preemptions after which a sequence is seated only with its whole possible length set aside
_SAMPLES = int(WorkFlag.SAMPLES)  # numpy is slow with the enum itself
_MASKED = int(WorkFlag.MASKED)
_POOLS = int(WorkFlag.POOLS)


class PlannedStep(Struct, frozen=True):
    """What the core remembers of a plan in flight: rows of its work items, where each ends, and when it left."""

    step: int
    rows: Array
    ends: Array  # [rows] positions computed once it has returned
    sampled: Array  # those of `rows` that it samples a token for
    masked: Array | None  # those of `sampled` that wait for masks; None where none does
    num_tokens: int
    num_prefill_tokens: int
    planned_s: float


class Scheduler:
    """Policy over a sequence table and a waiting line."""

    def __init__(
        self,
        table: SequenceTable,
        waiting: WaitingLine,
        *,
        max_batched_tokens: int,
        max_chunk_tokens: int = 0,
        ordering: QueueOrdering = QueueOrdering.ARRIVAL,
        prompt_step_s: float = 0.25,
        first_horizon: int = FIRST_HORIZON,
        encodes: bool = False,
    ) -> None:
        assert max_batched_tokens >= table.num_rows, "every running sequence needs one token of the budget"
        self.table = table
        self.waiting = waiting
        self.max_batched_tokens = max_batched_tokens
        self.max_chunk_tokens = max_chunk_tokens or max_batched_tokens
        self.ordering = ordering
        self.in_flight: deque[PlannedStep] = deque()
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.num_computed_tokens = 0
        self._encodes = encodes
        self._prompt_step_s = prompt_step_s
        self._token_s = 0.0
        self.device_outruns_host = False
        self._next_step = 1
        self._returned_step = 0
        self._first_horizon = self._horizon = first_horizon
        self._calm_steps = 0
        self._stuck: tuple[int, int] | None = None

    @property
    def has_work(self) -> bool:
        """Something is running or waits."""
        return bool(self.table.running) or len(self.waiting) > 0

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed before a plan in flight returns."""
        builder = PlanBuilder(self._next_step)
        if self._encodes:
            self._plan_encodings(builder, now)
            return None if builder.is_empty else self._finish(builder, now)
        self._plan_decodes(builder)
        left = self.max_batched_tokens - len(builder.decode_rows)
        if len(builder.decode_rows) or len(self.table.prefilling()) + len(self.waiting) > 1:
            left = min(left, self._shared_budget())
        self._plan_prompts(builder, left, now)
        if builder.is_empty:
            assert not builder.grants and not builder.seated
            return None
        return self._finish(builder, now)

    def observe(self, record: PlannedStep, seconds: Array) -> None:
        """Learn from a returned step, whose parts took so long, what a token of a step with prompts takes here, and
        whether the device is done with a step before the host has prepared the one after the next.
        """
        build_s, launch_s, sample_s, waited_s = seconds.tolist()
        self.device_outruns_host = waited_s < 2 * (build_s + launch_s + sample_s)
        if record.num_prefill_tokens >= MIN_CHUNK:
            each = float(seconds.sum()) / record.num_tokens
            self._token_s = each if self._token_s == 0 else 0.7 * self._token_s + 0.3 * each

    def returned(self, step: int) -> None:
        """Plans up to `step` have returned: free what was held for them; the preempted stand in line again."""
        self._returned_step = step
        for sequence in self.table.give_back(step):
            self.waiting.add(sequence)

    def settle(self) -> None:
        """Free at once what no plan in flight names."""
        self.returned(self._returned_step)

    def end(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        if sequence.is_queued:
            self.waiting.remove(sequence)
            self._stuck = None  # it may have been the one that nobody may pass
        self.table.end(sequence)

    def release_shared(self, sequence: Sequence) -> None:
        """Drop the blocks that a request holds for followers, once none needs them."""
        request = sequence.request
        if request.shared_blocks and not any(
            other.state is State.WAITING and other.num_preemptions == 0 for other in request.sequences
        ):
            self.drop_shared(request)

    def drop_shared(self, request: Request) -> None:
        """Drop the blocks that a request holds for its followers."""
        self.table.pool.release(reversed(request.shared_blocks))
        request.shared_blocks = []

    # encodings

    def _plan_encodings(self, builder: PlanBuilder, now: float) -> None:
        """Whole prompts of an encoder, in line, as many as fit: each is one item of one step and needs a row, and no
        blocks. What a step may hold is cut to what the device computes in time; the first always goes.
        """
        table = self.table
        left = self.max_batched_tokens
        if len(self.waiting) > 1:
            left = min(left, self._shared_budget())
        while len(self.waiting) and table.num_free_rows:
            sequence = next(iter(self.waiting))
            tokens = sequence.tokens
            if len(tokens) > left and not builder.is_empty:
                return
            self.waiting.remove(sequence)
            self._note_cached(sequence, 0, now)
            table.seat(sequence, [], now)
            builder.seat(sequence, len(tokens))
            builder.chunk(sequence.row, 0, tokens, _POOLS, None)
            table.scheduled[sequence.row] = len(tokens)
            table.start_pooling(sequence)
            left -= len(tokens)

    # decodes

    def _plan_decodes(self, builder: PlanBuilder) -> None:
        table = self.table
        rows = table.decode_rows()
        if not len(rows):
            return
        tenants = table.tenants(rows)
        starts = table.scheduled[rows]
        stops = starts + 1
        is_open = stops < tenants.limit
        is_lacking = is_open & (starts >= table.room[rows])
        if np.count_nonzero(is_lacking):
            is_open &= self._grant_decodes(builder, rows, is_lacking)
        if np.count_nonzero(is_open) < len(rows):
            rows, starts, stops = rows[is_open], starts[is_open], stops[is_open]
        if len(rows):
            table.scheduled[rows] = stops
            builder.decode(rows, starts, table.masked[rows] if tenants.has_masked else None)

    def _grant_decodes(self, builder: PlanBuilder, rows: Array, is_lacking: Array) -> Array:
        """Give each lacking row one block, first in line first; which of `rows` may run now."""
        table = self.table
        found = [sequence for row in rows[is_lacking] if (sequence := table.sequences[row]) is not None]
        failed = [
            sequence.row
            for sequence in sorted(found, key=lambda sequence: sequence.key)
            if sequence.state is not State.DECODE or not self._grant(sequence, 1, builder)
        ]
        runs = np.ones(len(rows), np.bool_)
        if failed:
            runs &= ~np.isin(rows, failed)
        return runs & table.decoding[rows]

    def _grant(self, sequence: Sequence, num_blocks: int, builder: PlanBuilder) -> bool:
        table = self.table
        free = table.pool.num_free if sequence.reserved else table.num_free_blocks
        if free < num_blocks:
            self._make_room(sequence, num_blocks - free)
            if sequence.state is State.PREEMPTING or sequence.row < 0:
                return False
            free = table.pool.num_free if sequence.reserved else table.num_free_blocks
            if free < num_blocks:
                return False
        first = len(sequence.blocks)
        builder.grant(sequence.row, first, table.grant(sequence, num_blocks))
        return True

    # preemption

    def _make_room(self, needy: Sequence, num_missing: int) -> None:
        """Free blocks for `needy`, now or when the plans in flight return."""
        table = self.table
        num_missing -= table.num_held_back_blocks
        if num_missing > 0:
            num_missing -= self._drop_all_shared()
        while num_missing > 0:
            victim = self._victim(needy)
            num_missing -= table.pool.num_freed_by(victim.blocks)
            self._preempt(victim)
            if victim is needy:
                break
        self.settle()

    def _victim(self, needy: Sequence) -> Sequence:
        """The last in line among those after `needy`, or `needy` itself; never one whose blocks are set aside."""
        after = [other for other in self.table.running if other.key > needy.key]
        return max((other for other in after if not other.reserved), key=lambda found: found.key, default=needy)

    def _preempt(self, victim: Sequence) -> None:
        self.num_preemptions += 1
        self.num_recomputed_tokens += int(self.table.scheduled[victim.row])
        self.table.preempt(victim)
        victim.reserved = victim.num_preemptions >= RESERVE_AFTER
        self._horizon = min(2 * self._horizon, self.table.max_model_len)
        self._calm_steps = 0

    def _drop_all_shared(self) -> int:
        freed = 0
        for sequence in self.waiting:
            request = sequence.request
            freed += self.table.pool.num_freed_by(request.shared_blocks)
            self.drop_shared(request)
        return freed

    # prompts

    def _shared_budget(self) -> int:
        """Prompt tokens of a step that others wait for, streams or prompts: as many as take `prompt_step_s`."""
        if self._token_s == 0:
            return self.max_batched_tokens
        return max(2 * MIN_CHUNK, int(self._prompt_step_s / self._token_s))

    def _plan_prompts(self, builder: PlanBuilder, left: int, now: float) -> None:
        started = self.table.prefilling()
        num_others = len(started) + len(self.waiting)
        chosen: list[tuple[Sequence, int]] = []
        for sequence in started:
            num_others -= 1
            left -= self._choose(chosen, sequence, left, num_others)
        while left > 0 and len(self.waiting) and self.table.num_free_rows:
            seated = self._seat_next(builder, now)
            if seated is None:
                break
            num_others -= 1
            left -= self._choose(chosen, seated, left, num_others)
        for sequence, count in chosen:
            extra = min(left, self._remaining(sequence) - count, self.max_chunk_tokens - count)
            left -= extra
            self._plan_chunk(builder, sequence, count + extra)

    def _remaining(self, sequence: Sequence) -> int:
        return int(self.table.known[sequence.row] - self.table.scheduled[sequence.row])

    def _choose(self, chosen: list[tuple[Sequence, int]], sequence: Sequence, left: int, num_others: int) -> int:
        share = left if num_others == 0 else max(left // 2, min(left, MIN_CHUNK))
        count = min(self._remaining(sequence), share, self.max_chunk_tokens)
        if count > 0:
            chosen.append((sequence, count))
        return count

    def _plan_chunk(self, builder: PlanBuilder, sequence: Sequence, count: int) -> None:
        table, row = self.table, sequence.row
        start = int(table.scheduled[row])
        flags, targets = 0, None
        if sequence.request.wants_prompt_logprobs and sequence.choice == 0:
            count, targets = self._prompt_targets(sequence, start, count)
            flags |= WorkFlag.PROMPT_LOGPROBS if targets is not None else 0
        stop = start + count
        if stop == table.known[row] and sequence.request.pools:
            flags |= WorkFlag.POOLS
            table.start_pooling(sequence)
        elif stop == table.known[row]:
            flags |= WorkFlag.SAMPLES
            if table.masked[row]:
                flags |= WorkFlag.MASKED
            table.start_decoding(sequence)
        table.scheduled[row] = stop
        builder.chunk(row, start, table.history[row, start:stop], flags, targets)

    def _prompt_targets(self, sequence: Sequence, start: int, count: int) -> tuple[int, Array | None]:
        """The chunk's length and the prompt tokens that follow its positions, less what was already reported."""
        sent, length = sequence.prompt_logprobs_sent, sequence.request.prompt_length
        if start < sent:  # recomputed after a preemption: end the chunk where reporting goes on
            return min(count, sent - start), None
        targets = self.table.history[sequence.row, start + 1 : min(start + count + 1, length)]
        return count, targets if len(targets) else None

    # seating

    def _seat_next(self, builder: PlanBuilder, now: float) -> Sequence | None:
        """Seat the first in line that fits. One that does not fit is passed only so often, a preempted one never."""
        state = (self.table.num_free_blocks, self.waiting.num_added)
        if self._stuck is not None and state[0] <= self._stuck[0] and state[1] == self._stuck[1]:
            return None  # nothing came free and nobody came since the last look
        self._stuck = None
        if not self.table.running and not self.in_flight:
            self._drop_all_shared()
        for num_passed, sequence in enumerate(self._in_order()):
            if self._try_seat(sequence, builder, now):
                self._note_passed(sequence)
                return sequence
            if _waits_no_longer(sequence) or num_passed >= MAX_PASSED:
                break
        self._stuck = state
        return None

    def _note_passed(self, seated: Sequence) -> None:
        for other in takewhile(lambda earlier: earlier.key < seated.key, self.waiting):
            other.bypassed += 1

    def _in_order(self) -> Iterable[Sequence]:
        """The line as it is to be seated: by arrival, or its head by length. Those that have been passed often enough
        and the preempted keep their place ahead of all others of their priority.
        """
        if self.ordering is QueueOrdering.ARRIVAL or len(self.waiting) < 2:
            return self.waiting
        sign = -1 if self.ordering is QueueOrdering.LONG_FIRST else 1

        def place(sequence: Sequence) -> tuple[int, int]:
            return sequence.request.priority, -1 << 62 if _waits_no_longer(sequence) else sign * len(sequence.tokens)

        return sorted(islice(self.waiting, ORDERED), key=place)

    def _try_seat(self, sequence: Sequence, builder: PlanBuilder, now: float) -> bool:
        table = self.table
        known = len(sequence.tokens)
        limit = table.limit_of(sequence)
        total = table.blocks_for(min(known + 1, limit))
        if not self._may_fit(sequence, total, limit):
            return False
        matched = self._match(sequence, (known - 1) // table.block_size)
        free = table.num_free_blocks
        if free < total - len(matched) or not self._leaves_room(sequence, known, limit, len(matched)):
            table.pool.release(reversed(matched))
            return False
        self.waiting.remove(sequence)
        self._note_cached(sequence, len(matched) * table.block_size, now)
        table.seat(sequence, matched, now)
        self.release_shared(sequence)
        table.grant(sequence, total - len(matched))
        builder.seat(sequence, known)
        builder.grant(sequence.row, 0, list(sequence.blocks))
        return True

    def _may_fit(self, sequence: Sequence, total: int, limit: int) -> bool:
        """A cheap bound before any hashing: even if everything were cached and free, would it fit?"""
        reserve = self.table.blocks_for(limit) if sequence.reserved else total
        held = self.table.pool.num_blocks - self.table.pool.num_free
        return reserve <= self.table.num_free_blocks + held

    def _match(self, sequence: Sequence, max_blocks: int) -> list[int]:
        """Blocks whose content the sequence need not compute, each held for it."""
        request = sequence.request
        unreported = request.prompt_length - 1 - sequence.prompt_logprobs_sent
        if request.wants_prompt_logprobs and sequence.choice == 0 and unreported > 0:
            return []
        matched = self.table.cache.match(sequence.hashes, request.root, sequence.tokens, max_blocks)
        for block in request.shared_blocks[len(matched) : max_blocks]:
            self.table.pool.share(block)
            matched.append(block)
        return matched

    def _leaves_room(self, sequence: Sequence, known: int, limit: int, num_matched: int) -> bool:
        """Whether the running may grow by the horizon (or to their ends) after this one is seated."""
        table = self.table
        if not table.running and table.is_settled:
            return True
        if sequence.reserved:
            own = table.blocks_for(limit) - num_matched
        else:
            own = table.blocks_for(min(known + self._horizon, limit)) - num_matched
        rows = np.array([other.row for other in table.running if not other.reserved], np.int32)
        if len(rows):
            lengths = np.minimum(table.scheduled[rows] + self._horizon, table.limit[rows])
            growth = -(-lengths // table.block_size) - table.room[rows] // table.block_size
            own += int(np.maximum(growth, 0).sum())
        return own <= table.num_free_blocks

    def _note_cached(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        request = sequence.request
        if request.cached_tokens is None:
            request.cached_tokens = num_tokens
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now

    # the record

    def _finish(self, builder: PlanBuilder, now: float) -> StepPlan:
        table = self.table
        plan = builder.build(table.freed_rows, table.history)
        table.freed_rows = []
        table.last_step[plan.rows] = builder.step
        num_tokens = builder.num_tokens
        self.num_computed_tokens += num_tokens
        self.in_flight.append(
            PlannedStep(
                step=builder.step,
                rows=plan.rows,
                ends=plan.starts + plan.counts,
                sampled=plan.rows[(plan.flags & _SAMPLES) != 0] if builder.items else plan.rows,
                masked=plan.rows[(plan.flags & _MASKED) != 0] if builder.has_masked else None,
                num_tokens=num_tokens,
                num_prefill_tokens=num_tokens - len(builder.decode_rows),
                planned_s=now,
            )
        )
        self._next_step += 1
        self._calm_steps += 1
        if self._calm_steps >= CALM_STEPS:
            self._horizon, self._calm_steps = max(self._first_horizon, self._horizon // 2), 0
            self._stuck = None
        return plan


def _waits_no_longer(sequence: Sequence) -> bool:
    """Nobody may be seated before this one any more."""
    return bool(sequence.num_preemptions) or sequence.bypassed >= MAX_BYPASSED
