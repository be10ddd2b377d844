"""Watches the device beside the steps: clocks, power, temperature, memory, health, at a set interval.

Reads in a thread of its own and never touches the step path. What changed enough to explain a change of speed is a
line for the log.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from ..ipc.facts import DeviceHealth

CLOCK_CHANGE = 0.2  # of the highest seen
HOT, COOLER = 90.0, 85.0  # degrees C: a line on the way up, and one on the way down
MEMORY_CHANGE_BYTES = 1 << 30  # that others took or gave back


class DeviceWatch:
    """The thread. A driver may take its time to answer, or never do it: nobody waits for it, and the process ends
    without it. `tell` gets each reading, None for one that failed, and what is worth a line in the log.
    """

    def __init__(
        self,
        read: Callable[[], DeviceHealth],
        interval_s: float,
        tell: Callable[[DeviceHealth | None, list[str]], None],
    ) -> None:
        self._read, self._interval_s, self._tell = read, interval_s, tell
        self._watcher = Watcher()
        self._failure = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Does not wait for a reading that is under way; what that finds is told to nobody."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            reading = self._reading()
            if not self._stopped.is_set():
                self._tell(*reading)
            self._stopped.wait(self._interval_s)

    def _reading(self) -> tuple[DeviceHealth | None, list[str]]:
        try:
            health = self._read()
        except Exception as error:  # whatever a driver or another package's platform raises
            known, self._failure = self._failure, f"{type(error).__name__}: {error}"
            return None, [] if known else [f"health cannot be read: {self._failure}"]
        again = ["health can be read again"] if self._failure else []
        self._failure = ""
        return health, again + self._watcher.changes(health)


class Watcher:
    """Compares each reading with what was last said, so that a state is told once and not at every reading."""

    def __init__(self) -> None:
        self._best_clocks: dict[str, float] = {}
        self._slow: set[str] = set()
        self._is_hot = False
        self._throttled: tuple[str, ...] = ()
        self._errors: tuple[str, ...] = ()
        self._on_battery: bool | None = None
        self._others_bytes: int | None = None

    def changes(self, health: DeviceHealth) -> list[str]:
        """What is worth saying about this reading."""
        return [
            *self._clock_changes(health),
            *self._temperature_changes(health),
            *self._state_changes(health),
            *self._memory_changes(health),
        ]

    def _clock_changes(self, health: DeviceHealth) -> Iterator[str]:
        """A busy device that runs much slower than it has, or again as fast. An idle one clocks down by design."""
        is_busy = health.compute_utilization is None or health.compute_utilization > 0.5
        for name, clock in health.clocks.items():
            best = self._best_clocks[name] = max(clock, self._best_clocks.get(name, 0.0))
            is_slow = clock < (1 - CLOCK_CHANGE) * best
            if is_slow and is_busy and name not in self._slow:
                self._slow.add(name)
                yield f"the {name} clock fell to {clock:.0f} MHz from {best:.0f}: steps get slower"
            elif not is_slow and name in self._slow:
                self._slow.discard(name)
                yield f"the {name} clock is back at {clock:.0f} MHz"

    def _temperature_changes(self, health: DeviceHealth) -> Iterator[str]:
        temperature = health.temperature
        if temperature is None:
            return
        if temperature >= HOT and not self._is_hot:
            self._is_hot = True
            yield f"the device is at {temperature:.0f} degrees C: look at its cooling"
        elif temperature < COOLER and self._is_hot:
            self._is_hot = False
            yield f"the device has cooled to {temperature:.0f} degrees C"

    def _state_changes(self, health: DeviceHealth) -> Iterator[str]:
        if health.throttle_reasons != self._throttled:
            self._throttled = health.throttle_reasons
            yield (
                f"the device is throttled: {', '.join(self._throttled)}"
                if self._throttled
                else "the device is no longer throttled"
            )
        new = tuple(error for error in health.errors if error not in self._errors)
        self._errors = health.errors
        yield from (f"the device reports: {error}" for error in new)
        if health.on_battery is not None and health.on_battery != self._on_battery:
            if self._on_battery is not None or health.on_battery:
                yield (
                    "the machine runs on battery: steps may get slower"
                    if health.on_battery
                    else "the machine is on mains power again"
                )
            self._on_battery = health.on_battery

    def _memory_changes(self, health: DeviceHealth) -> Iterator[str]:
        memory = health.memory
        if memory is None:
            return
        others = memory.total_bytes - memory.free_bytes - memory.ours_bytes
        if self._others_bytes is not None and abs(others - self._others_bytes) >= MEMORY_CHANGE_BYTES:
            verb = "took" if others > self._others_bytes else "gave back"
            moved, free = abs(others - self._others_bytes) / (1 << 30), memory.free_bytes / (1 << 30)
            held = "".join(f"; {name} holds {size / (1 << 30):.1f} GiB" for name, size in memory.holders.items())
            yield f"other programs {verb} {moved:.1f} GiB of device memory, {free:.1f} GiB are free{held}"
            self._others_bytes = others
        elif self._others_bytes is None:
            self._others_bytes = others
