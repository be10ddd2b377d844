"""A platform that computes nothing: the life cycle of a worker without tensors. See `null_model` for its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...ipc.facts import DeviceCapability, DeviceHealth, DeviceProfile, MemoryFacts
from ...kernels.implementation import Communicator
from ..streams.contract import StreamManager
from ..streams.immediate import ImmediateStreams
from . import host
from .contract import Clause, DeviceMemory, Found, Graph, MemoryKind, NotSupported, Refused, WorkerGroup

if TYPE_CHECKING:
    import torch

_NO_TENSORS = "the null platform has no tensors"


class NullPlatform:
    """Always there, never chosen unless asked for."""

    name = "null"
    computes = False
    declines: Mapping[Clause, str] = dict.fromkeys(Clause, _NO_TENSORS)

    def detect(self) -> Found | Refused:
        return Found(devices=("null",))

    def profile(self, index: int) -> DeviceProfile:
        return DeviceProfile(
            platform=self.name,
            vendor="none",
            name="null",
            index=index,
            memory_bytes=host.memory_facts().total_bytes,
            memory_is_shared=True,
            capability=DeviceCapability(architecture="null"),
        )

    def open(self, index: int, *, num_threads: int, cache_dir: Path | None, warn: Callable[[str], None]) -> NullBackend:
        return NullBackend(self.profile(index))


class NullBackend:
    """A device in name only."""

    num_threads = 1

    def __init__(self, profile: DeviceProfile) -> None:
        self.profile = profile
        self.streams: StreamManager = ImmediateStreams()

    @property
    def torch_device(self) -> torch.device:
        raise NotSupported(_NO_TENSORS)

    def allocate_memory(self, num_bytes: int, *, kind: MemoryKind, alignment_bytes: int) -> DeviceMemory:
        raise NotSupported(_NO_TENSORS)

    def memory_facts(self) -> MemoryFacts:
        return host.memory_facts()

    def capture_graph(self, run: Callable[[], None]) -> Graph:
        raise NotSupported(_NO_TENSORS)

    def communicator(self, group: WorkerGroup) -> Communicator | None:
        return None

    def health(self) -> DeviceHealth:
        return DeviceHealth()

    def close(self) -> None:
        return None
