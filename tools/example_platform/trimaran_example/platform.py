"""The platform: how Trimaran finds the device, what it may know of it, and how it drives it. No torch before `open`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimaran.device_workers.platforms.contract import (
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
from trimaran.device_workers.streams.contract import Stream, StreamManager
from trimaran.device_workers.streams.immediate import ImmediateStreams
from trimaran.ipc.facts import DeviceCapability, DeviceHealth, DeviceProfile, Feature, MemoryFacts
from trimaran.kernels.implementation import Communicator, Kernel

if TYPE_CHECKING:
    import torch

_TOTAL_BYTES = 2 << 30
_ALIGNMENT_BYTES = 64
_AT_ONCE = "the device runs each operation before the call returns"


class ExamplePlatform:
    """Stateless: every answer is looked up when it is asked for."""

    name = "example"
    computes = True
    visibility: tuple[str, ...] = ()
    software_features = frozenset({Feature.FP64, Feature.FP16, Feature.BF16, Feature.INT8})
    declines: Mapping[Clause, str] = {
        Clause.GRAPH_CAPTURE: "the device has no recordings",
        Clause.STREAM_PRIORITIES: _AT_ONCE,
        Clause.CONCURRENT_STREAMS: _AT_ONCE,
        Clause.ASYNC_COPIES: _AT_ONCE,
        Clause.PINNED_MEMORY: "the device reads any host memory",
        Clause.MEMORY_HOLDERS: "its memory belongs to this process alone",
        Clause.COLLECTIVES: "there is one device",
        Clause.HEALTH: "it has no sensors",
    }

    def look(self) -> Look:
        return Look(hardware="an example device")

    def detect(self) -> Found | Refused:
        return Found(devices=(FoundDevice(index=0, name="Example One", memory_bytes=_TOTAL_BYTES),))

    def busy(self, index: int) -> str | None:
        return None

    def profile(self, index: int) -> DeviceProfile:
        return DeviceProfile(
            platform=self.name,
            vendor="Example",
            name="Example One",
            index=index,
            runtime=version("torch"),
            memory_bytes=_TOTAL_BYTES,
            capability=DeviceCapability(
                architecture="example_1",
                allocation_alignment_bytes=_ALIGNMENT_BYTES,
                features=self.software_features,
            ),
        )

    def open(
        self, index: int, *, num_threads: int, cache_dir: Path | None, warn: Callable[[str], None]
    ) -> ExampleBackend:
        return ExampleBackend(self.profile(index), num_threads)


class ExampleMemory:
    """Bytes of the device."""

    kind = MemoryKind.DEVICE

    def __init__(self, aligned: torch.Tensor) -> None:
        self._shadow = aligned

    @property
    def num_bytes(self) -> int:
        return self._shadow.numel()

    @property
    def address(self) -> int:
        return self._shadow.data_ptr()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        from .device import on_device

        num_bytes = prod(shape) * dtype.itemsize
        assert num_bytes <= self.num_bytes, (shape, dtype, self.num_bytes)
        return on_device(self._shadow[:num_bytes].view(dtype).view(shape))


class ExampleBackend:
    """The device, live."""

    graphs_take_any_size = False

    def __init__(self, profile: DeviceProfile, num_threads: int) -> None:
        import torch

        from . import device

        torch.set_num_threads(num_threads)
        self.profile = profile
        self.num_threads = num_threads
        self.torch_device = torch.device(device.NAME, profile.index)
        self.streams: StreamManager = ImmediateStreams()
        self._device = device

    def allocate_memory(self, num_bytes: int, *, kind: MemoryKind, alignment_bytes: int) -> DeviceMemory:
        import torch

        if kind is not MemoryKind.DEVICE:
            raise NotSupported(ExamplePlatform.declines[Clause.PINNED_MEMORY])
        try:
            self._device.check_room(num_bytes + alignment_bytes)
        except RuntimeError as error:
            raise MemoryError(str(error)) from None
        whole = torch.empty(num_bytes + alignment_bytes, dtype=torch.uint8)
        begin = -whole.data_ptr() % alignment_bytes
        memory = ExampleMemory(whole[begin : begin + num_bytes])
        memory.tensor((num_bytes,), torch.uint8)  # from now on it counts
        return memory

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        target.copy_(source)

    def launch(self, kernel: Kernel, tensors: tuple[Any, ...], stream: Stream) -> None:
        kernel(*tensors)

    def synchronize(self, scope: FenceScope = FenceScope.DEVICE) -> None:
        """Everything is done when its call returns."""

    def memory_facts(self) -> MemoryFacts:
        held = self._device.held_bytes()
        return MemoryFacts(
            total_bytes=_TOTAL_BYTES,
            free_bytes=_TOTAL_BYTES - held,
            ours_bytes=held,
            by_kind={MemoryKind.DEVICE: held},
        )

    def release_cached_memory(self) -> None:
        """The device keeps none; what cycles of Python objects hold goes."""
        gc.collect()

    def capture_graph(self, run: Callable[[], None]) -> Graph:
        raise NotSupported(ExamplePlatform.declines[Clause.GRAPH_CAPTURE])

    def communicator(self, group: WorkerGroup) -> Communicator | None:
        if group.num_ranks == 1:
            return None
        raise NotSupported(ExamplePlatform.declines[Clause.COLLECTIVES])

    def health(self) -> DeviceHealth:
        return DeviceHealth()

    def close(self) -> None:
        self.release_cached_memory()
