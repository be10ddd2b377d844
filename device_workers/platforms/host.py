"""The host as Linux shows it: processor, memory, cores. No torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from ...ipc.facts import MemoryFacts

_MEMINFO = Path("/proc/meminfo")
_CPUINFO = Path("/proc/cpuinfo")
_CGROUP = Path("/sys/fs/cgroup")


def processor_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(key: str) -> str | None:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_facts() -> MemoryFacts:
    """Of the host, or of the control group where that allows less. Bytes."""
    total, free = _host_memory()
    limit, used = _group_number("memory.max"), _group_number("memory.current")
    if limit is not None and limit < total:
        total, free = limit, min(free, limit - (used or 0))
    return MemoryFacts(total_bytes=total, free_bytes=max(free, 0), ours_bytes=resident_bytes())


def _host_memory() -> tuple[int, int]:
    try:
        entries = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="utf-8").splitlines())
    except OSError:
        pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return pages * page_bytes, pages * page_bytes // 2
    return _kib(entries["MemTotal"]), _kib(entries["MemAvailable"])


def _kib(text: str) -> int:
    return int(text.split()[0]) * 1024


def _group_number(name: str) -> int | None:
    try:
        text = (_CGROUP / name).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def resident_bytes() -> int:
    """Resident memory of this process."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
