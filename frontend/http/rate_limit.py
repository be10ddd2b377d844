"""How many requests each key may make in a minute, counted over all frontends of a server.

A bucket per key, full at first, that fills at the limit's rate. The buckets lie in one small file of the run directory
that every frontend maps; a lock on it makes a look and the taking one act, which takes a few microseconds.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from pathlib import Path

_BUCKET = struct.Struct("dd")  # requests that were left at a moment of CLOCK_MONOTONIC; zeros are long ago


class RateLimit:
    """Belongs to one process; others may hold the same file."""

    def __init__(self, file: Path, num_keys: int, per_minute: int) -> None:
        self.per_minute = per_minute
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = num_keys * _BUCKET.size
        if os.fstat(self._descriptor).st_size < size:
            os.ftruncate(self._descriptor, size)
        self._buckets = mmap.mmap(self._descriptor, size)

    def take(self, key: int) -> float | None:
        """One request of this key (by its place): None when it may go on, else the seconds until it may."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            left, counted_s = _BUCKET.unpack_from(self._buckets, key * _BUCKET.size)
            now_s = time.monotonic()
            left = min(self.per_minute, left + (now_s - counted_s) * self.per_minute / 60)
            allowed = left >= 1
            _BUCKET.pack_into(self._buckets, key * _BUCKET.size, left - allowed, now_s)
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        return None if allowed else (1 - left) * 60 / self.per_minute
