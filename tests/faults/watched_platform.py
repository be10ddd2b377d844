"""A null platform whose health is that of a machine in a folder; copied into a package that is made on the spot."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from trimaran.device_workers.platforms.host import Host
from trimaran.device_workers.platforms.host_health import HostHealth
from trimaran.device_workers.platforms.null import NullBackend, NullPlatform
from trimaran.ipc.facts import DeviceHealth, DeviceProfile

_MACHINE = Path(__file__).with_name("machine")


class WatchedPlatform(NullPlatform):
    """Computes nothing, and is asked for by name."""

    name = "watched"

    def open(
        self, index: int, *, num_threads: int, cache_dir: Path | None, warn: Callable[[str], None]
    ) -> WatchedBackend:
        return WatchedBackend(self.profile(index), self.host)


class WatchedBackend(NullBackend):
    """While the machine has a file `blocked`, its driver does not answer; with `broken` it fails."""

    def __init__(self, profile: DeviceProfile, host: Host) -> None:
        super().__init__(profile, host)
        self._reader = HostHealth(Host(root=_MACHINE))

    def health(self) -> DeviceHealth:
        (_MACHINE / "asked").touch()
        while (_MACHINE / "blocked").exists():
            time.sleep(0.05)
        if (_MACHINE / "broken").exists():
            raise RuntimeError("the driver is gone")
        return self._reader.read()
