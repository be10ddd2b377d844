"""Keeps a worker near its device: on the processor cores of the NUMA node that the device hangs on."""

from __future__ import annotations

import os
from pathlib import Path

from ..ipc.facts import Decision, DeviceProfile
from .profiles.processor import cores_of

_NODES = Path("/sys/devices/system/node")


def near_cores(profile: DeviceProfile, allowed: frozenset[int], nodes: Path = _NODES) -> frozenset[int] | None:
    """Of the cores that this process may use, those of the device's node; None where there is nothing to choose."""
    if profile.numa_node is None or profile.platform in ("cpu", "null"):
        return None
    try:
        cores = cores_of((nodes / f"node{profile.numa_node}" / "cpulist").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    near = cores & allowed
    return near if near and near != allowed else None


def stay_near(profile: DeviceProfile) -> tuple[Decision, ...]:
    """Bind this process and its later threads. Nothing is said where nothing is chosen."""
    if not hasattr(os, "sched_setaffinity"):
        return ()
    allowed = frozenset(os.sched_getaffinity(0))
    near = near_cores(profile, allowed)
    if near is None:
        return ()
    os.sched_setaffinity(0, near)
    reason = f"the device hangs on NUMA node {profile.numa_node}; {len(near)} of {len(allowed)} cores are near it"
    return (Decision(name="cpu_affinity", value=f"{len(near)} cores", reason=reason),)
