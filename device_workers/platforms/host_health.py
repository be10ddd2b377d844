"""Health of the processor from what Linux shows: clocks, temperature, package power, load. Nothing is guessed.

Kernel documentation: cpufreq, thermal zones, power capping (RAPL), /proc/stat, /proc/meminfo.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec.structs import replace

from ...ipc.facts import DeviceHealth, MemoryFacts
from .host import Host, private_bytes

_PROCESSOR_ZONES = ("x86_pkg_temp", "cpu", "soc", "coretemp", "k10temp")
_ENERGY = "/sys/class/powercap/intel-rapl:0/energy_uj"
_ENERGY_RANGE = "/sys/class/powercap/intel-rapl:0/max_energy_range_uj"


class HostHealth:
    """Remembers the last reading: power and load are differences over time, so the first read has neither."""

    def __init__(self, host: Host, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._clock = clock
        self._energy: tuple[float, int] | None = None
        self._load: tuple[int, int] | None = None

    def read(self) -> DeviceHealth:
        return DeviceHealth(
            clocks=self._clocks(),
            power=self._power(),
            temperature=self._temperature(),
            compute_utilization=self._utilization(),
            on_battery=self._host.on_battery(),
            memory=self._memory(),
        )

    def _memory(self) -> MemoryFacts | None:
        """Pages of files that this process maps count as nobody's: the kernel takes them back when it must."""
        if not self._host.exists("/proc/meminfo"):
            return None
        return replace(self._host.memory_facts(), ours_bytes=private_bytes())

    def _clocks(self) -> dict[str, float]:
        """The mean over the cores, in MHz."""
        files = self._host.glob("/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq")
        values = [self._number(str(file)) for file in files]
        known = [value / 1000 for value in values if value is not None]
        return {"cores": sum(known) / len(known)} if known else {}

    def _temperature(self) -> float | None:
        """The hottest zone that is the processor's."""
        found = []
        for zone in self._host.glob("/sys/class/thermal/thermal_zone*"):
            folder = f"/sys/class/thermal/{zone.name}"
            kind, value = self._host.read(f"{folder}/type") or "", self._host.read_number(f"{folder}/temp")
            if value is not None and kind.lower().startswith(_PROCESSOR_ZONES):
                found.append(value / 1000)
        return max(found, default=None)

    def _power(self) -> float | None:
        energy, now, last = self._host.read_number(_ENERGY), self._clock(), self._energy
        self._energy = None if energy is None else (now, energy)
        if energy is None or last is None or now <= last[0]:
            return None
        used = energy - last[1]
        if used < 0:  # the counter went round
            used += self._host.read_number(_ENERGY_RANGE) or 0
        return used / 1e6 / (now - last[0]) if used >= 0 else None

    def _utilization(self) -> float | None:
        fields = ((self._host.read("/proc/stat") or "").splitlines() or [""])[0].split()[1:]
        times, last = [int(field) for field in fields if field.isdigit()], self._load
        if len(times) < 5:
            return None
        idle, total = times[3] + times[4], sum(times[:8])
        self._load = (idle, total)
        if last is None or total <= last[1]:
            return None
        return 1 - (idle - last[0]) / (total - last[1])

    def _number(self, file: str) -> int | None:
        return self._host.read_number("/" + str(file).removeprefix(str(self._host.root)).lstrip("/"))
