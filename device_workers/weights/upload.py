"""Parts of files on their way to the device: threads read them into pinned buffers, whose copies run meanwhile.

Reading from disk, copying out of the system's cache and crossing to the device overlap. This file knows no formats.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from ...ipc.conditions import Refusal
from ..platforms.contract import Backend, MemoryKind
from ..streams.contract import Event, StreamPriority

_NUM_READERS = 6
_NUM_BUFFERS = 8
PIECE_BYTES = 8 << 20
_PAGE_BYTES = 4096


class Upload:
    """Used by one thread. What `read` returned is complete for whatever follows in the current stream; before the
    upload is dropped the device must be waited for.
    """

    def __init__(self, backend: Backend, piece_bytes: int = PIECE_BYTES) -> None:
        """Raises NotSupported where the device has no pinned memory."""
        self._backend = backend
        self._piece_bytes = piece_bytes
        memories = [
            backend.allocate_memory(piece_bytes, kind=MemoryKind.PINNED_HOST, alignment_bytes=_PAGE_BYTES)
            for _ in range(_NUM_BUFFERS)
        ]
        self._buffers = [memory.tensor((piece_bytes,), torch.uint8) for memory in memories]
        self._copied: list[Event | None] = [None] * _NUM_BUFFERS
        self._turn = 0
        self._stream = backend.streams.create_stream(StreamPriority.LOW)
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="weights")

    def read(self, path: Path, descriptor: int, begin: int, num_bytes: int) -> torch.Tensor:
        """Bytes of the file, on the device. Raises Refusal when the file has become shorter, OSError."""
        streams, current = self._backend.streams, self._backend.streams.current()
        target = torch.empty(num_bytes, dtype=torch.uint8, device=self._backend.torch_device)
        streams.wait(self._stream, streams.record(current))  # what had this memory before may still be read
        running: deque[tuple[Future[None], int, torch.Tensor]] = deque()
        for place in range(0, num_bytes, self._piece_bytes):
            if len(running) == _NUM_BUFFERS:
                self._send(*running.popleft())
            part = target[place : place + self._piece_bytes]
            turn = self._next_buffer()
            buffer = self._buffers[turn].numpy()[: len(part)]
            future = self._readers.submit(_fill, buffer.data, path, descriptor, begin + place)
            running.append((future, turn, part))
        while running:
            self._send(*running.popleft())
        streams.wait(current, streams.record(self._stream))
        return target

    def _next_buffer(self) -> int:
        """Whose last copy is done."""
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        event, self._copied[self._turn] = self._copied[self._turn], None
        if event is not None:
            event.wait_blocking()
        return self._turn

    def _send(self, future: Future[None], turn: int, part: torch.Tensor) -> None:
        future.result()
        self._backend.copy(part, self._buffers[turn][: len(part)], self._stream)
        self._copied[turn] = self._backend.streams.record(self._stream)


def _fill(buffer: memoryview, path: Path, descriptor: int, begin: int) -> None:
    filled = 0
    while filled < len(buffer):
        count = os.preadv(descriptor, [buffer[filled:]], begin + filled)
        if count == 0:
            raise Refusal(f"{path} was cut off while it was read: download the model again")
        filled += count
