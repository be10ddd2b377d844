"""The processor as a device: torch's CPU kernels, C++ ones where there is a compiler, gloo between ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ...ipc.facts import DeviceCapability, DeviceHealth, DeviceProfile, Feature, MemoryFacts
from ...kernels.implementation import Communicator, Kernel
from ...kernels.in_cpp.build import find_compiler
from ..profiles.processor import read_processor
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
from .host import Host, usable_cores
from .host_health import HostHealth
from .torch_accelerator import detected

if TYPE_CHECKING:
    import torch

    from ...kernels.in_cpp.library import Library, Recording

_ALIGNMENT_BYTES = 64
_AT_ONCE = "every operation is done when its call returns"


SOFTWARE_FEATURES = frozenset(
    {Feature.FP64, Feature.FP16, Feature.BF16, Feature.INT8, Feature.GRAPH_CAPTURE, Feature.CPP_COMPILER}
)
"""PyTorch computes every dtype on any processor, if slowly; recordings and fast kernels need a compiler."""


_DECLINES: dict[Clause, str] = {
    Clause.STREAM_PRIORITIES: _AT_ONCE,
    Clause.CONCURRENT_STREAMS: _AT_ONCE,
    Clause.ASYNC_COPIES: _AT_ONCE,
    Clause.PINNED_MEMORY: "its memory is the host's: nothing is copied",
    Clause.MEMORY_HOLDERS: "memory is the host's: every process holds some",
}
_WITHOUT_COMPILER = {Clause.GRAPH_CAPTURE: "recordings are of C++ kernels, and no C++ compiler is here"}


class CpuPlatform:
    """There is always one."""

    name = "cpu"
    computes = True
    visibility: tuple[str, ...] = ()
    software_features = SOFTWARE_FEATURES

    def __init__(self, host: Host | None = None) -> None:
        self.host = Host() if host is None else host
        self.declines: Mapping[Clause, str] = (
            _DECLINES if find_compiler() is not None else _DECLINES | _WITHOUT_COMPILER
        )

    def look(self) -> Look:
        return Look(hardware=self.host.processor_name())

    def detect(self) -> Found | Refused:
        if self.host.package_version("torch") is None:
            return Refused(reason="PyTorch is not installed: pip install torch")
        facts = self.host.memory_facts()
        device = FoundDevice(index=0, name=self.host.processor_name(), memory_bytes=facts.total_bytes)
        return Found(devices=(device,))

    def busy(self, index: int) -> str | None:
        return None

    def profile(self, index: int) -> DeviceProfile:
        torch = self.host.package_version("torch")
        processor = read_processor(
            self.host.machine, self.host.path("/proc/cpuinfo"), self.host.path("/sys/devices/system")
        )
        profile = DeviceProfile(
            platform=self.name,
            vendor=_vendor(self.host),
            name=self.host.processor_name(),
            index=index,
            runtime=torch,
            memory_bytes=self.host.memory_facts().total_bytes,
            memory_is_shared=True,
            is_integrated=True,
            libraries={} if torch is None else {"torch": torch},
            clocks={} if processor.max_clock is None else {"cpu": processor.max_clock},
            numa_node=processor.numa_node,
            capability=DeviceCapability(
                architecture=processor.architecture,
                l2_bytes=processor.l2_bytes,
                num_multiprocessors=usable_cores(),
                allocation_alignment_bytes=_ALIGNMENT_BYTES,
                features=_features(),
            ),
        )
        return detected(profile)

    def open(self, index: int, *, num_threads: int, cache_dir: Path | None, warn: Callable[[str], None]) -> CpuBackend:
        return CpuBackend(self.profile(index), self.host, num_threads, cache_dir, warn)


def _features() -> frozenset[Feature]:
    return SOFTWARE_FEATURES - (frozenset() if find_compiler() is not None else {Feature.CPP_COMPILER})


def _vendor(host: Host) -> str:
    return {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}.get(host.cpuinfo("vendor_id") or "", host.machine)


class CpuGraph:
    """Recorded launches of C++ kernels: one call replays them for any number of tokens up to the recorded one."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.num_launches: int | None = recording.num_launches

    def replay(self, num_tokens: int, num_sequences: int, progress: ctypes.c_int64 | None) -> None:
        self._recording.run(num_tokens, num_sequences, progress)


class CpuBackend:
    """The processor, live. Sets torch's threads for the process."""

    graphs_take_any_size = True

    def __init__(
        self,
        profile: DeviceProfile,
        host: Host,
        num_threads: int,
        cache_dir: Path | None,
        warn: Callable[[str], None],
    ) -> None:
        import torch

        from ..memory.memory_pool import MemoryPool

        torch.set_num_threads(num_threads)
        self.profile = profile
        self.streams: StreamManager = ImmediateStreams()
        self.torch_device = torch.device("cpu")
        self.num_threads = num_threads
        self._host = host
        self._health = HostHealth(host)
        self._cache_dir = cache_dir
        self._warn = warn
        declines = {MemoryKind.PINNED_HOST: _DECLINES[Clause.PINNED_MEMORY]}
        self._pool = MemoryPool({MemoryKind.DEVICE: _bytes}, declines, self.release_cached_memory)

    def allocate_memory(self, num_bytes: int, *, kind: MemoryKind, alignment_bytes: int) -> DeviceMemory:
        return self._pool.allocate(num_bytes, kind, alignment_bytes)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        target.copy_(source)

    def launch(self, kernel: Kernel, tensors: tuple[Any, ...], stream: Stream) -> None:
        kernel(*tensors)

    def synchronize(self, scope: FenceScope = FenceScope.DEVICE) -> None:
        """Everything is done when its call returns."""

    def memory_facts(self) -> MemoryFacts:
        facts = self._host.memory_facts()
        return replace(facts, by_kind={MemoryKind.DEVICE: self._pool.held_bytes(MemoryKind.DEVICE)})

    def release_cached_memory(self) -> None:
        """The C library keeps none worth giving back."""

    def capture_graph(self, run: Callable[[], None]) -> Graph:
        with self._library().record() as recording:
            run()
        if recording.num_launches == 0:
            raise NotSupported("nothing was launched through the C++ kernels")
        return CpuGraph(recording)

    def _library(self) -> Library:
        from ...kernels.in_cpp.build import BuildFailed
        from ...kernels.in_cpp.library import open_library

        try:
            return open_library(self._cache_dir, self.num_threads, self._warn)
        except (BuildFailed, OSError) as error:
            raise NotSupported(f"recording needs the C++ kernels: {error}") from None

    def communicator(self, group: WorkerGroup) -> Communicator | None:
        if group.num_ranks == 1:
            return None
        from .gloo import GlooCommunicator

        return GlooCommunicator(group)

    def health(self) -> DeviceHealth:
        return self._health.read()

    def close(self) -> None:
        return None


def _bytes(num_bytes: int) -> torch.Tensor:
    import torch

    return torch.empty(num_bytes, dtype=torch.uint8)
