"""A platform that computes nothing: the life cycle of a worker without tensors. See `null_model` for its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ipc.facts import DeviceCapability, DeviceHealth, DeviceProfile, Feature, MemoryFacts
from ...kernels.implementation import Communicator, Kernel
from ..streams.contract import Stream, StreamManager
from ..streams.immediate import ImmediateStreams
from .contract import (
    Clause,
    DeviceMemory,
    FenceScope,
    Found,
    FoundDevice,
    Graph,
    Look,
    MemoryKind,
    NotSupported,
    Refused,
    WorkerGroup,
)
from .host import Host

if TYPE_CHECKING:
    import torch

_NO_TENSORS = "the null platform has no tensors"


class NullPlatform:
    """Always there, never chosen unless asked for."""

    name = "null"
    computes = False
    visibility: tuple[str, ...] = ()
    software_features: frozenset[Feature] = frozenset()
    declines: Mapping[Clause, str] = dict.fromkeys(Clause, _NO_TENSORS)

    def __init__(self, host: Host | None = None) -> None:
        self.host = Host() if host is None else host

    def look(self) -> Look:
        return Look(hardware=None, obstacle=_NO_TENSORS)

    def detect(self) -> Found | Refused:
        return Found(devices=(FoundDevice(index=0, name="null"),))

    def busy(self, index: int) -> str | None:
        return None

    def profile(self, index: int) -> DeviceProfile:
        return DeviceProfile(
            platform=self.name,
            vendor="none",
            name="null",
            index=index,
            memory_bytes=self.host.memory_facts().total_bytes,
            memory_is_shared=True,
            capability=DeviceCapability(architecture="null"),
        )

    def open(self, index: int, *, num_threads: int, cache_dir: Path | None, warn: Callable[[str], None]) -> NullBackend:
        return NullBackend(self.profile(index), self.host)


class NullBackend:
    """A device in name only."""

    num_threads = 1
    graphs_take_any_size = False

    def __init__(self, profile: DeviceProfile, host: Host) -> None:
        self.profile = profile
        self._host = host
        self.streams: StreamManager = ImmediateStreams()

    @property
    def torch_device(self) -> torch.device:
        raise NotSupported(_NO_TENSORS)

    def allocate_memory(self, num_bytes: int, *, kind: MemoryKind, alignment_bytes: int) -> DeviceMemory:
        raise NotSupported(_NO_TENSORS)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        raise NotSupported(_NO_TENSORS)

    def launch(self, kernel: Kernel, tensors: tuple[Any, ...], stream: Stream) -> None:
        raise NotSupported(_NO_TENSORS)

    def synchronize(self, scope: FenceScope = FenceScope.DEVICE) -> None:
        """Nothing runs."""

    def memory_facts(self) -> MemoryFacts:
        return self._host.memory_facts()

    def release_cached_memory(self) -> None:
        """There is none."""

    def capture_graph(self, run: Callable[[], None]) -> Graph:
        raise NotSupported(_NO_TENSORS)

    def communicator(self, group: WorkerGroup) -> Communicator | None:
        return None

    def health(self) -> DeviceHealth:
        return DeviceHealth()

    def close(self) -> None:
        return None
