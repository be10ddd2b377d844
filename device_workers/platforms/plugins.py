"""What other packages bring by entry points: platforms (group `trimaran.platforms`) and kernels (`trimaran.kernels`).

Every process of an engine reads the same installation in the same order, by name, so all see the same platforms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from ...ipc.facts import DeviceProfile, Feature
from ...kernels.catalog import CATALOG
from ...kernels.implementation import Implementation
from .contract import Backend, Clause, Found, Look, NotSupported, Platform, Refused

PLATFORM_GROUP = "trimaran.platforms"
KERNEL_GROUP = "trimaran.kernels"
_PLATFORM_PARTS = (
    *("name", "computes", "declines", "visibility", "software_features"),
    *("look", "detect", "profile", "busy", "open"),
)
_IMPLEMENTATION_PARTS = ("name", "kernel", "metadata", "misfit", "load")


class BrokenPlatform:
    """Stands for a plug-in that cannot be used, so that its reason is told among the others'."""

    computes = True
    declines: Mapping[Clause, str] = {}
    visibility: tuple[str, ...] = ()
    software_features: frozenset[Feature] = frozenset()

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self._reason = reason

    def look(self) -> Look:
        return Look(hardware=None, obstacle=self._reason)

    def detect(self) -> Found | Refused:
        return Refused(reason=self._reason)

    def busy(self, index: int) -> str | None:
        return self._reason

    def profile(self, index: int) -> DeviceProfile:
        raise NotSupported(self._reason)

    def open(self, index: int, *, num_threads: int, cache_dir: Path | None, warn: Callable[[str], None]) -> Backend:
        raise NotSupported(self._reason)


def plugin_platforms(taken: Iterable[str]) -> tuple[Platform, ...]:
    """In order of their names. An entry is a platform, or a class or function that makes one.

    One that fails to import, that is no platform or that bears a name already `taken` is there as a broken one.
    """
    known = set(taken)
    platforms = []
    for entry in _entries(PLATFORM_GROUP):
        platform = _platform(entry, known)
        known.add(platform.name)
        platforms.append(platform)
    return tuple(platforms)


def plugin_kernels(kernels: Iterable[str], warn: Callable[[str], None]) -> tuple[Implementation, ...]:
    """Implementations of kernels we know, to go ahead of ours. An entry is a sequence of them, or makes one.

    What cannot be used costs a warning, never a start.
    """
    known = set(kernels)
    taken = {implementation.name for implementation in CATALOG}
    found: list[Implementation] = []
    for entry in _entries(KERNEL_GROUP):
        try:
            offered = entry.load()
            offered = tuple(offered() if callable(offered) else offered)
        except Exception as error:  # whatever somebody else's package raises
            warn(f"kernels of {_origin(entry)} are not used: {type(error).__name__}: {error}")
            continue
        for implementation in offered:
            reason = _misfit(implementation, known, taken)
            if reason is None:
                taken.add(implementation.name)
                found.append(implementation)
            else:
                warn(f"a kernel of {_origin(entry)} is not used: {reason}")
    return tuple(found)


def _entries(group: str) -> Sequence[EntryPoint]:
    return sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value))


def _platform(entry: EntryPoint, known: set[str]) -> Platform:
    try:
        loaded: Any = entry.load()
        platform = loaded() if callable(loaded) else loaded
    except Exception as error:  # whatever somebody else's package raises
        return BrokenPlatform(entry.name, f"{_origin(entry)} cannot be imported: {type(error).__name__}: {error}")
    missing = [part for part in _PLATFORM_PARTS if not hasattr(platform, part)]
    if missing:
        return BrokenPlatform(entry.name, f"{_origin(entry)} is no platform: it lacks {', '.join(missing)}")
    if platform.name != entry.name:
        reason = f"{_origin(entry)} calls itself {platform.name}; its entry point must bear the same name"
        return BrokenPlatform(entry.name, reason)
    if platform.name in known:
        return BrokenPlatform(f"{platform.name} of {_distribution(entry)}", "its name is taken by another platform")
    chosen: Platform = platform
    return chosen


def _misfit(implementation: Any, known: set[str], taken: set[str]) -> str | None:
    missing = [part for part in _IMPLEMENTATION_PARTS if not hasattr(implementation, part)]
    if missing:
        return f"it lacks {', '.join(missing)}"
    if implementation.kernel not in known:
        return f"{implementation.name} is for {implementation.kernel}, and there is no such kernel"
    if implementation.name in taken:
        return f"the name {implementation.name} is taken by another one"
    return None


def _origin(entry: EntryPoint) -> str:
    return f"the package {_distribution(entry)} ({entry.value})"


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "of unknown name"
