"""The rings of one generation as the step thread uses them: plans and masks in, results out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ..ipc.columns import Columns
from ..ipc.conditions import Oversized
from ..ipc.messages import encode
from ..ipc.plan import RingKind, StepPlan, StepResult, TokenMasks
from ..ipc.ring import RingReader, RingWriter
from ..ipc.worker_messages import StepError

_FULL_RING_PAUSE_S = 0.0002
PlanFrame = Callable[[int], bytes]
"""The frame that stands in for the plan ring's slot with this sequence number; blocks until it came."""


class WorkerRings:
    """One rank's ends. Descriptors: plan ring, its doorbell, result ring, the result doorbell; closed by `close`."""

    def __init__(self, descriptors: list[int], rank: int) -> None:
        assert len(descriptors) == 4, f"{len(descriptors)} descriptors came with the rings"
        plans, self._plan_doorbell, results, self._result_doorbell = descriptors
        self._plans = RingReader(plans, rank, self._plan_doorbell)
        self._results = RingWriter(results, [self._result_doorbell])
        self.generation = self._plans.generation
        os.close(plans)
        os.close(results)

    def wait(self, timeout_s: float, spin_s: float, oversized: PlanFrame) -> StepPlan | TokenMasks | None:
        """The next message, as columns of its own (the slot is free again), or None after the timeout."""
        return self._taken(self._plans.wait(timeout_s, spin_s=spin_s), oversized)

    def poll(self, oversized: PlanFrame) -> StepPlan | TokenMasks | None:
        """The next message if it is here."""
        return self._taken(self._plans.poll(), oversized)

    def _taken(self, message: tuple[int, memoryview] | None, oversized: PlanFrame) -> StepPlan | TokenMasks | None:
        if message is None:
            return None
        kind, payload = message
        if kind == RingKind.OVERSIZED:
            kind, content = self._oversized(payload, oversized)
            columns = _unpacked(kind, content)
        else:
            columns = _unpacked(kind, payload).copy()
        payload.release()
        self._plans.release()
        return columns

    def _oversized(self, payload: memoryview, oversized: PlanFrame) -> tuple[int, bytes]:
        frame = oversized(self._plans.sequence)
        return frame[0], frame[1:]

    def publish(self, outcome: StepResult | StepError, must_stop: Callable[[], bool]) -> tuple[int, bytes] | None:
        """Write a step's outcome into the ring. A result that does not fit gets an empty slot, and comes back as
        (sequence, packed) to be sent another way. Waits while the core holds every slot, unless `must_stop`.
        """
        while (slot := self._results.slot()) is None:
            if must_stop():
                return None
            time.sleep(_FULL_RING_PAUSE_S)
        if isinstance(outcome, StepError):
            packed = encode(outcome)
            slot[: len(packed)] = packed
            self._results.publish(len(packed), RingKind.FAILED)
            return None
        values = outcome.values()
        try:
            num_bytes = outcome.SCHEMA.pack_into(slot, values)
        except Oversized:
            return self._results.publish(0, RingKind.OVERSIZED), outcome.SCHEMA.pack(values)
        self._results.publish(num_bytes, RingKind.RESULT)
        return None

    def close(self) -> None:
        self._plans.close()
        self._results.close()
        os.close(self._plan_doorbell)
        os.close(self._result_doorbell)


def _unpacked(kind: int, payload: memoryview | bytes) -> StepPlan | TokenMasks:
    columns: dict[int, type[Columns]] = {RingKind.PLAN: StepPlan, RingKind.MASKS: TokenMasks}
    unpacked = columns[kind].unpack(payload)
    assert isinstance(unpacked, StepPlan | TokenMasks)
    return unpacked
