"""Notices a worker whose host memory grows beyond a limit, against what it held when it had warmed up."""

from collections.abc import Mapping

from ..ipc.worker_messages import Heartbeat

SETTLING_S = 60.0
"""After ready: caches fill and allocators take their arenas, so growth counts from here on."""


class GrowthWatch:
    """One generation's baseline. `limit_bytes` is the growth per worker that is taken as it is."""

    def __init__(self, limit_bytes: int, ready_s: float, settling_s: float = SETTLING_S) -> None:
        self._limit_bytes = limit_bytes
        self._settled_s = ready_s + settling_s
        self._baseline: dict[int, int] = {}

    def look(self, heartbeats: Mapping[int, Heartbeat], now: float) -> str | None:
        """What grew too far, in words; None while nothing did."""
        for rank, beat in heartbeats.items():
            if now < self._settled_s or rank not in self._baseline:
                self._baseline[rank] = beat.resident_bytes
                continue
            growth = beat.resident_bytes - self._baseline[rank]
            if growth > self._limit_bytes:
                return (
                    f"worker {rank} grew by {growth >> 20} MiB to {beat.resident_bytes >> 20} MiB "
                    f"(--memory-growth-limit {self._limit_bytes >> 20} MiB)"
                )
        return None
