"""The processor as a device: torch's CPU kernels, C++ ones where there is a compiler, gloo between ranks."""

from __future__ import annotations

import ctypes
import platform as host_platform
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from ...ipc.facts import (
    DeviceCapability,
    DeviceHealth,
    DeviceProfile,
    Feature,
    MemoryFacts,
    Provenance,
)
from ...kernels.implementation import Communicator
from ...kernels.in_cpp.build import find_compiler
from ..profiles.processor import read_processor
from ..streams.contract import StreamManager
from ..streams.immediate import ImmediateStreams
from . import host
from .contract import Clause, DeviceMemory, Found, Graph, MemoryKind, NotSupported, Refused, WorkerGroup

if TYPE_CHECKING:
    import torch

    from ...kernels.in_cpp.library import Library, Recording

_ALIGNMENT_BYTES = 64


class CpuPlatform:
    """There is always one."""

    name = "cpu"
    computes = True
    declines: Mapping[Clause, str] = {
        Clause.STREAM_PRIORITIES: "every operation is done when its call returns",
        Clause.MEMORY_HOLDERS: "memory is the host's: every process holds some",
        Clause.HEALTH: "no clocks or temperatures are read",
    }

    def detect(self) -> Found | Refused:
        try:
            version("torch")
        except PackageNotFoundError:
            return Refused(reason="PyTorch is not installed: pip install torch")
        return Found(devices=(host.processor_name(),))

    def profile(self, index: int) -> DeviceProfile:
        processor = read_processor()
        return DeviceProfile(
            platform=self.name,
            vendor=host_platform.machine(),
            name=host.processor_name(),
            index=index,
            runtime=version("torch"),
            memory_bytes=host.memory_facts().total_bytes,
            memory_is_shared=True,
            is_integrated=True,
            clocks={} if processor.max_clock is None else {"cpu": processor.max_clock},
            numa_node=processor.numa_node,
            capability=DeviceCapability(
                architecture=processor.architecture,
                l2_bytes=processor.l2_bytes,
                num_multiprocessors=host.usable_cores(),
                allocation_alignment_bytes=_ALIGNMENT_BYTES,
                features=_features(),
            ),
            provenance={"capability": Provenance.DETECTED, "memory_bytes": Provenance.DETECTED},
        )

    def open(self, index: int, *, num_threads: int, cache_dir: Path | None, warn: Callable[[str], None]) -> CpuBackend:
        return CpuBackend(self.profile(index), num_threads, cache_dir, warn)


def _features() -> frozenset[Feature]:
    features = {Feature.FP16, Feature.BF16, Feature.INT8, Feature.GRAPH_CAPTURE}
    if find_compiler() is not None:
        features.add(Feature.CPP_COMPILER)
    return frozenset(features)


class HostMemory:
    """Memory of the host, aligned."""

    def __init__(self, num_bytes: int, alignment_bytes: int) -> None:
        import torch

        self.num_bytes = num_bytes
        try:
            whole = torch.empty(num_bytes + alignment_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryError(f"{num_bytes} bytes of host memory: {error}") from None
        begin = -whole.data_ptr() % alignment_bytes
        self._bytes = whole[begin : begin + num_bytes]

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_elements = 1
        for size in shape:
            num_elements *= size
        assert num_elements * dtype.itemsize <= self.num_bytes, (shape, dtype, self.num_bytes)
        return self._bytes[: num_elements * dtype.itemsize].view(dtype).view(shape)


class CpuGraph:
    """Recorded launches of C++ kernels: one call replays them for any number of tokens up to the recorded one."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.num_launches = recording.num_launches

    def replay(self, num_tokens: int, num_sequences: int, progress: ctypes.c_int64 | None) -> None:
        self._recording.run(num_tokens, num_sequences, progress)


class CpuBackend:
    """The processor, live. Sets torch's threads for the process."""

    def __init__(
        self, profile: DeviceProfile, num_threads: int, cache_dir: Path | None, warn: Callable[[str], None]
    ) -> None:
        import torch

        torch.set_num_threads(num_threads)
        self.profile = profile
        self.streams: StreamManager = ImmediateStreams()
        self.torch_device = torch.device("cpu")
        self.num_threads = num_threads
        self._cache_dir = cache_dir
        self._warn = warn

    def allocate_memory(self, num_bytes: int, *, kind: MemoryKind, alignment_bytes: int) -> DeviceMemory:
        return HostMemory(num_bytes, alignment_bytes)

    def memory_facts(self) -> MemoryFacts:
        return host.memory_facts()

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
        return DeviceHealth()

    def close(self) -> None:
        return None
