"""The processor as Linux shows it: its family by instruction-set flags, caches, nodes, clock. No torch.

The families are the packaged files that match a machine and flags: another family is another file.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from msgspec import Struct

from .packaged import processor_files

_CPUINFO = Path("/proc/cpuinfo")
_SYSTEM = Path("/sys/devices/system")
_FLAG_LINES = ("flags", "Features")  # x86 and Arm
_CACHE_SIZE = re.compile(r"([0-9]+)([KMG]?)")
_CACHE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_KHZ_PER_MHZ = 1000


class Processor(Struct, frozen=True, kw_only=True):
    """What could be read. `l2_bytes` is one core's; `numa_node` the only one that this process may run on."""

    machine: str
    architecture: str
    flags: frozenset[str] = frozenset()
    l2_bytes: int | None = None
    numa_node: int | None = None
    max_clock: float | None = None


def read_processor(
    machine: str | None = None, cpuinfo: Path = _CPUINFO, system: Path = _SYSTEM, cores: frozenset[int] | None = None
) -> Processor:
    """Never raises: what the system does not show is None."""
    name = (machine or platform.machine()).lower()
    name = _MACHINES.get(name, name)
    flags = _flags(cpuinfo) or (frozenset({"asimd"}) if name == "aarch64" else frozenset())  # every AArch64 has NEON
    core = min(cores or _usable_cores())
    return Processor(
        machine=name,
        architecture=family(name, flags),
        flags=flags,
        l2_bytes=_l2_bytes(system / "cpu" / f"cpu{core}" / "cache"),
        numa_node=_numa_node(system / "node", cores or _usable_cores()),
        max_clock=_max_clock(system / "cpu" / f"cpu{core}" / "cpufreq" / "cpuinfo_max_freq"),
    )


def family(machine: str, flags: frozenset[str]) -> str:
    """The architecture of the most demanding packaged family that the flags satisfy, else the bare machine."""
    for file in processor_files(machine):
        if flags.issuperset(file.match.flags):
            return file.architecture
    return machine


def _usable_cores() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset({0})


def _flags(cpuinfo: Path) -> frozenset[str]:
    for line in _text(cpuinfo).splitlines():
        name, _, words = line.partition(":")
        if name.strip() in _FLAG_LINES:
            return frozenset(words.split())
    return frozenset()


def _l2_bytes(caches: Path) -> int | None:
    for cache in sorted(caches.glob("index*")):
        if _text(cache / "level").strip() == "2" and _text(cache / "type").strip() in ("Unified", "Data"):
            found = _CACHE_SIZE.fullmatch(_text(cache / "size").strip())
            return int(found[1]) * _CACHE_UNITS[found[2]] if found else None
    return None


def _numa_node(nodes: Path, cores: frozenset[int]) -> int | None:
    mine = [
        int(node.name.removeprefix("node"))
        for node in nodes.glob("node[0-9]*")
        if cores & cores_of(_text(node / "cpulist"))
    ]
    return mine[0] if len(mine) == 1 else None


def cores_of(cpulist: str) -> frozenset[int]:
    """Of a list such as "0-3,8"."""
    cores: set[int] = set()
    for part in cpulist.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def _max_clock(path: Path) -> float | None:
    text = _text(path).strip()
    return int(text) / _KHZ_PER_MHZ if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
