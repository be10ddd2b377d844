"""Lines on stderr that never wait for their reader: one that stops reading would stop the supervisor, and with it all.

Owns what is written and not yet taken. A line that finds no room waits here; beyond a limit lines are dropped, and how
many is told once there is room again.
"""

import os
import select
import sys
import time
from collections import deque

_PIECE_BYTES = select.PIPE_BUF  # what a pipe that is writable takes without blocking
_LIMIT_BYTES = 1 << 20
_LAST_WAIT_S = 1.0


class Outlet:
    """Belongs to one thread."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._num_dropped = 0

    def line(self, text: str) -> None:
        """Write a line, or keep it until there is room."""
        if self._num_waiting_bytes > _LIMIT_BYTES:
            self._num_dropped += 1
        else:
            self._keep(text)
        self.flush()

    def flush(self) -> None:
        """Write what there is room for now."""
        self._write(time.monotonic())

    def close(self) -> None:
        """Give whoever reads slowly a moment for the rest."""
        self._write(time.monotonic() + _LAST_WAIT_S)

    def _keep(self, text: str) -> None:
        data = (text + "\n").encode(errors="replace")
        self._num_waiting_bytes += len(data)
        self._waiting.extend(data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES))

    def _write(self, deadline_s: float) -> None:
        try:
            descriptor = sys.stderr.fileno()
        except (ValueError, AttributeError):  # closed, none, or not a file
            self._write_to_object()
            return
        while self._waiting and _has_room(descriptor, deadline_s):
            piece = self._waiting.popleft()
            self._num_waiting_bytes -= len(piece)
            try:
                os.write(descriptor, piece)
            except OSError:  # the reader is gone: nobody is left to be told
                self._waiting.clear()
                self._num_waiting_bytes = 0
            if not self._waiting and self._num_dropped:
                self._keep(f"{self._num_dropped} lines were dropped, because nobody read them in time.")
                self._num_dropped = 0

    def _write_to_object(self) -> None:
        """Stderr is an object of a library, such as a notebook's."""
        while self._waiting and sys.stderr is not None:
            sys.stderr.write(self._waiting.popleft().decode(errors="replace"))
        self._num_waiting_bytes = 0


def _has_room(descriptor: int, deadline_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000))
