"""Health of a card from what the kernel's graphics drivers write under /sys: amdgpu, and what i915 and xe share with
it. Linux kernel documentation, "GPU Power/Thermal Controls and Monitoring" and "hwmon".
"""

from __future__ import annotations

from pathlib import Path

from ...ipc.facts import DeviceHealth, MemoryFacts
from .host import Host

_MICRO, _MILLI, _MEGA = 1e6, 1e3, 1e6


def drm_health(host: Host, pci_bus_id: str | None) -> DeviceHealth:
    """Nothing where the kernel shows nothing."""
    if pci_bus_id is None:
        return DeviceHealth()
    device = f"/sys/bus/pci/devices/{pci_bus_id.lower()}"
    sensors = _sensors(host, device)
    power = _number(host, sensors, "power1_average", "power1_input")
    temperature = _number(host, sensors, "temp1_input")
    return DeviceHealth(
        clocks=_clocks(host, sensors),
        power=None if power is None else power / _MICRO,
        temperature=None if temperature is None else temperature / _MILLI,
        compute_utilization=_percent(host, f"{device}/gpu_busy_percent"),
        memory_utilization=_percent(host, f"{device}/mem_busy_percent"),
        errors=_errors(host, device),
        memory=_memory(host, device),
    )


def _memory(host: Host, device: str) -> MemoryFacts | None:
    """Of a driver that shows it (amdgpu)."""
    total, used = (host.read_number(f"{device}/mem_info_vram_{what}") for what in ("total", "used"))
    if total is None or used is None:
        return None
    return MemoryFacts(total_bytes=total, free_bytes=total - used, ours_bytes=0)


def _sensors(host: Host, device: str) -> str | None:
    folders = host.glob(f"{device}/hwmon/hwmon*")
    return None if not folders else f"{device}/hwmon/{Path(folders[0]).name}"


def _clocks(host: Host, sensors: str | None) -> dict[str, float]:
    """`freq1` is the graphics clock and `freq2` the memory's, both in Hz."""
    found = {"graphics": _number(host, sensors, "freq1_input"), "memory": _number(host, sensors, "freq2_input")}
    return {name: value / _MEGA for name, value in found.items() if value is not None}


def _errors(host: Host, device: str) -> tuple[str, ...]:
    """Uncorrected errors of each block that counts them (amdgpu's "ras" files: two lines, ue and ce)."""
    errors = []
    for file in host.glob(f"{device}/ras/*_err_count"):
        text = host.read(f"{device}/ras/{file.name}") or ""
        counts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        count = counts.get("ue", "0").strip()
        if count.isdigit() and count != "0":
            errors.append(f"{count} uncorrected errors in {file.name.removesuffix('_err_count')}")
    return tuple(errors)


def _percent(host: Host, name: str) -> float | None:
    value = host.read_number(name)
    return None if value is None else value / 100


def _number(host: Host, folder: str | None, *names: str) -> int | None:
    if folder is None:
        return None
    return next((value for name in names if (value := host.read_number(f"{folder}/{name}")) is not None), None)
