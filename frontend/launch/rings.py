"""The rings of one generation: their memory and doorbells, and who is given which."""

import contextlib
import os

from ...ipc.ring import create_doorbell, create_ring

# Memory is only taken where it is written. At most two steps are in flight, each with a plan and perhaps its masks;
# what does not fit a slot travels as a ZeroMQ frame.
_NUM_SLOTS = 8
_PLAN_BYTES = 8 << 20  # the masks of 256 sequences over a vocabulary of 250,000
_RESULT_BYTES = 512 << 10


class Rings:
    """Descriptors of one generation's rings, in the orders that `control.Attach` prescribes."""

    def __init__(self, *, num_ranks: int, generation: int) -> None:
        self.generation = generation
        self._plans = create_ring(
            num_slots=_NUM_SLOTS, slot_bytes=_PLAN_BYTES, num_readers=num_ranks, generation=generation
        )
        self._plan_doorbells = [create_doorbell() for _ in range(num_ranks)]
        self._results = [
            create_ring(num_slots=_NUM_SLOTS, slot_bytes=_RESULT_BYTES, num_readers=1, generation=generation)
            for _ in range(num_ranks)
        ]
        self._result_doorbell = create_doorbell()

    def for_core(self) -> list[int]:
        """What the core is given."""
        return [self._plans, *self._plan_doorbells, *self._results, self._result_doorbell]

    def for_worker(self, rank: int) -> list[int]:
        """What one worker is given."""
        return [self._plans, self._plan_doorbells[rank], self._results[rank], self._result_doorbell]

    def close(self) -> None:
        """Close this process's descriptors; those who were given theirs keep the memory alive."""
        for descriptor in self.for_core():
            with contextlib.suppress(OSError):
                os.close(descriptor)
