"""A single-writer shared-memory ring with doorbells: how plans and results travel inside one machine.

Memory comes by descriptor (memfd; a deleted file where memfd is missing), so nothing has a name and nothing is left
behind. Layout: one header page (magic, generation, then one acknowledgement counter per reader, each on a cache line
of its own), then the slots, each with a 64-byte header (sequence number, length, kind) before its payload.

The writer fills a payload, then publishes the sequence number, then rings each reader's doorbell (an eventfd). It
reuses a slot only after every reader has acknowledged it. Python has no memory fences: on x86 stores are seen in
order; elsewhere the doorbell's system call orders them, so readers there must wait on the doorbell (`wait`) and not
spin on `poll`.
Sequence numbers and acknowledgements are stored and loaded as whole machine words: struct would zero the bytes and
then write them one by one, and the other side would now and then see a number that was never there.
"""

import contextlib
import mmap
import os
import select
import struct
import tempfile
import time

from .conditions import Oversized, TrimaranError

_MAGIC = 0x7472696D6172616E
_PAGE = 4096
_LINE = 64
_SLOT_HEADER = 64
_HEAD = struct.Struct("<QQQQQ")  # magic, generation, slots, slot bytes, readers
_SLOT = struct.Struct("<QQ")  # length, kind
_WORD = 8


class NotARing(TrimaranError):
    """The descriptor does not hold a ring, or holds one of another generation."""


def create_memory(num_bytes: int) -> int:
    """A descriptor of `num_bytes` of shared memory, close-on-exec, without a name."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("trimaran-ring", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix="trimaran-ring-")
        os.unlink(path)
    os.ftruncate(fd, num_bytes)
    return fd


def create_doorbell() -> int:
    """An eventfd, non-blocking. EFD_NONBLOCK alone would drop the close-on-exec flag."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def create_ring(*, num_slots: int, slot_bytes: int, num_readers: int, generation: int) -> int:
    """Shared memory laid out as an empty ring; the descriptor is the caller's to pass on and close."""
    assert slot_bytes % _LINE == 0 and 0 < num_readers <= (_PAGE - 2 * _LINE) // _LINE
    fd = create_memory(_PAGE + num_slots * (_SLOT_HEADER + slot_bytes))
    os.pwrite(fd, _HEAD.pack(_MAGIC, generation, num_slots, slot_bytes, num_readers), 0)
    return fd


class _Mapped:
    def __init__(self, fd: int) -> None:
        head = os.pread(fd, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            raise NotARing(f"descriptor {fd} holds {len(head)} bytes")
        magic, *sizes = _HEAD.unpack(head)
        self.generation: int
        self.num_slots: int
        self.slot_bytes: int
        self.num_readers: int
        self.generation, self.num_slots, self.slot_bytes, self.num_readers = sizes
        if magic != _MAGIC:
            raise NotARing(f"descriptor {fd} holds no ring")
        self._map = mmap.mmap(fd, _PAGE + self.num_slots * (_SLOT_HEADER + self.slot_bytes))
        self._memory = memoryview(self._map)
        self._words = self._memory.cast("Q")
        self._payloads = [
            self._memory[start + _SLOT_HEADER : start + _SLOT_HEADER + self.slot_bytes]
            for start in (self._slot_start(slot) for slot in range(self.num_slots))
        ]

    def _slot_start(self, slot: int) -> int:
        return _PAGE + slot * (_SLOT_HEADER + self.slot_bytes)

    def close(self) -> None:
        """Unmap. Views handed out must be gone; where one is not, the map goes with it."""
        for payload in self._payloads:
            payload.release()
        self._words.release()
        self._memory.release()
        with contextlib.suppress(BufferError):  # a numpy view into a slot is still alive: its owner keeps the map
            self._map.close()


class RingWriter(_Mapped):
    """The one writer. Not thread-safe: it belongs to one thread."""

    def __init__(self, fd: int, doorbells: list[int]) -> None:
        super().__init__(fd)
        assert len(doorbells) == self.num_readers
        self._doorbells = doorbells
        self._sequence = 0

    def slot(self) -> memoryview | None:
        """The payload to fill next, or None while the slowest reader still holds it."""
        if self._sequence - self._slowest() >= self.num_slots:
            return None
        return self._payloads[self._sequence % self.num_slots]

    def publish(self, num_bytes: int, kind: int) -> int:
        """Make the filled slot visible, ring the doorbells, return its sequence number (from 1)."""
        if num_bytes > self.slot_bytes:
            raise Oversized(num_bytes, self.slot_bytes)
        start = self._slot_start(self._sequence % self.num_slots)
        _SLOT.pack_into(self._memory, start + 8, num_bytes, kind)
        self._sequence += 1
        self._words[start // _WORD] = self._sequence
        for doorbell in self._doorbells:
            os.eventfd_write(doorbell, 1)
        return self._sequence

    def _slowest(self) -> int:
        return min(self._words[(reader + 1) * _LINE // _WORD] for reader in range(self.num_readers))


class RingReader(_Mapped):
    """One of the readers. Not thread-safe: it belongs to one thread."""

    def __init__(self, fd: int, reader: int, doorbell: int) -> None:
        super().__init__(fd)
        assert reader < self.num_readers
        self._ack = (reader + 1) * _LINE // _WORD
        self._sequence: int = self._words[self._ack]
        self.doorbell = doorbell
        self._poll = select.poll()
        self._poll.register(doorbell, select.POLLIN)

    @property
    def sequence(self) -> int:
        """The sequence number of the message that `poll` shows next or shows now."""
        return self._sequence + 1

    def poll(self) -> tuple[int, memoryview] | None:
        """(kind, payload) of the next message, still in its slot, or None. `release` it before the next poll."""
        start = self._slot_start(self._sequence % self.num_slots)
        if self._words[start // _WORD] != self._sequence + 1:
            return None
        length, kind = _SLOT.unpack_from(self._memory, start + 8)
        return kind, self._payloads[self._sequence % self.num_slots][:length]

    def release(self) -> None:
        """Acknowledge the message: its slot may be overwritten from now on."""
        self._sequence += 1
        self._words[self._ack] = self._sequence

    def silence(self) -> None:
        """Clear the doorbell; call it before polling, so that a later ring is not lost."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.doorbell)

    def wait(self, timeout_s: float, *, spin_s: float = 0.0) -> tuple[int, memoryview] | None:
        """Block up to `timeout_s` for the next message; spin `spin_s` first (x86 only, with a core to spare)."""
        deadline = time.monotonic() + timeout_s
        spin_until = time.monotonic() + spin_s
        while (message := self.poll()) is None:
            now = time.monotonic()
            if now >= deadline:
                return None
            if now >= spin_until:
                self._poll.poll((deadline - now) * 1000)
                self.silence()
        return message
