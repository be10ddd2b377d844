"""The host as its operating system shows it: files under a root, libraries, processor, memory. No torch.

Every fact that a platform reads of the host comes through one `Host`, so that a test can show it another machine.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...ipc.facts import MemoryFacts

_PCIE_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
"""By the link speed in GT/s that /sys shows (PCI Express base specifications 1 to 6)."""


def _load_library(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _has_module(name: str) -> bool:
    return find_spec(name) is not None


@dataclass(frozen=True, kw_only=True)
class GraphicsCard:
    """A card of the kernel's graphics drivers: its node's number, PCI ids (hexadecimal) and driver."""

    number: int
    vendor: str
    device: str
    driver: str
    pci_bus_id: str


@dataclass(frozen=True, kw_only=True)
class Host:
    """What can be read of a machine. `variables` holds the environment variables by which drivers hide devices."""

    root: Path = Path("/")
    variables: Mapping[str, str] = field(default_factory=dict)
    system: str = sys.platform
    machine: str = field(default_factory=platform.machine)
    system_version: str = field(default_factory=lambda: platform.mac_ver()[0] or platform.release())
    load_library: Callable[[str], Any] = _load_library
    package_version: Callable[[str], str | None] = _package_version
    has_module: Callable[[str], bool] = _has_module

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str | None:
        """The text of a file, stripped; None where it cannot be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except (OSError, ValueError):
            return None

    def read_number(self, name: str) -> int | None:
        text = self.read(name)
        return int(text) if text is not None and text.lstrip("-").isdigit() else None

    def exists(self, name: str) -> bool:
        return self.path(name).exists()

    def glob(self, pattern: str) -> list[Path]:
        return sorted(self.root.glob(pattern.lstrip("/")))

    def may_use(self, name: str) -> bool:
        """Whether this process may read and write a node."""
        return os.access(self.path(name), os.R_OK | os.W_OK)

    @property
    def is_wsl(self) -> bool:
        """Linux inside Windows: GPUs are reached by /dev/dxg, and their usual nodes are missing."""
        return "microsoft" in (self.read("/proc/version") or "").lower()

    def cards(self) -> list[GraphicsCard]:
        """Cards of the kernel's graphics drivers, in the order of their nodes."""
        found = []
        for folder in self.glob("/sys/class/drm/card*"):
            digits = folder.name.removeprefix("card")
            inside = f"/sys/class/drm/{folder.name}/device"
            vendor = self.read(f"{inside}/vendor")
            if not digits.isdigit() or vendor is None:
                continue
            found.append(
                GraphicsCard(
                    number=int(digits),
                    vendor=vendor,
                    device=self.read(f"{inside}/device") or "",
                    driver=self._link_name(f"{inside}/driver"),
                    pci_bus_id=self._link_name(inside),
                )
            )
        return sorted(found, key=lambda card: card.number)

    def _link_name(self, name: str) -> str:
        try:
            return self.path(name).resolve().name
        except OSError:
            return ""

    def pcie(self, pci_bus_id: str | None) -> dict[str, Any]:
        """Generation, width and NUMA node of a device's PCIe link, as far as the kernel shows them."""
        if pci_bus_id is None:
            return {}
        folder = f"/sys/bus/pci/devices/{pci_bus_id.lower()}"
        speed = (self.read(f"{folder}/max_link_speed") or "").split(" ")[0]
        values = {
            "pcie_generation": _PCIE_GENERATIONS.get(speed),
            "pcie_width": self.read_number(f"{folder}/max_link_width"),
            "numa_node": self.read_number(f"{folder}/numa_node"),
        }
        return {name: value for name, value in values.items() if value is not None and value >= 0}

    def processor_name(self) -> str:
        return self.cpuinfo("model name") or platform.processor() or self.machine

    def cpuinfo(self, key: str) -> str | None:
        lines = (self.read("/proc/cpuinfo") or "").splitlines()
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)

    def memory_facts(self) -> MemoryFacts:
        """Of the host, or of the control group where that allows less. Bytes."""
        total, free = self._memory()
        limit = self.read_number("/sys/fs/cgroup/memory.max")
        if limit is not None and limit < total:
            used = self.read_number("/sys/fs/cgroup/memory.current") or 0
            total, free = limit, min(free, limit - used)
        return MemoryFacts(total_bytes=total, free_bytes=max(free, 0), ours_bytes=resident_bytes())

    def _memory(self) -> tuple[int, int]:
        text = self.read("/proc/meminfo")
        if text is None:
            pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
            return pages * page_bytes, pages * page_bytes // 2
        entries = dict(line.split(":", 1) for line in text.splitlines())
        return _kib(entries["MemTotal"]), _kib(entries["MemAvailable"])

    def on_battery(self) -> bool | None:
        """Whether a battery feeds the machine; None where it has none, or none that says so. Kernel documentation:
        sysfs-class-power. A battery whose scope is a device is that of a mouse.
        """
        supplies = [f"/sys/class/power_supply/{folder.name}" for folder in self.glob("/sys/class/power_supply/*")]
        batteries = [
            name
            for name in supplies
            if self.read(f"{name}/type") == "Battery" and self.read(f"{name}/scope") != "Device"
        ]
        states = [state for name in batteries if (state := self.read(f"{name}/status")) is not None]
        return any(state == "Discharging" for state in states) if states else None

    def process_name(self, pid: int) -> str:
        """What runs under a pid; a pid that this process cannot see belongs to another namespace."""
        return self.read(f"/proc/{pid}/comm") or "(not visible from here)"


def _kib(text: str) -> int:
    return int(text.split()[0]) * 1024


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resident_bytes() -> int:
    """Resident memory of this process."""
    return _resident()[0]


def private_bytes() -> int:
    """Of it what is no page of a file or of memory shared with others."""
    resident, shared = _resident()
    return resident - shared


def _resident() -> tuple[int, int]:
    """All, and what is shared (proc(5): statm)."""
    try:
        pages = [int(field) for field in Path("/proc/self/statm").read_text(encoding="utf-8").split()[1:3]]
    except OSError:
        return 0, 0
    return pages[0] * os.sysconf("SC_PAGE_SIZE"), pages[1] * os.sysconf("SC_PAGE_SIZE")
