"""Torch's modules of the vendors, simulated: only names that our platforms may use, each as its vendor has it.

The parameters of every public function and method here are compared with the real sources; see `test_surface_truth.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from .memory import DeviceMemory
from .queues import Deferred, Queue, Recorded


class Device:
    """One simulated device: its properties, memory and streams."""

    def __init__(self, properties: SimpleNamespace, memory_bytes: int) -> None:
        self.properties = properties
        self.memory = DeviceMemory(memory_bytes)
        self.busy: str | None = None
        self.streams: list[Any] = []


class State:
    """What the modules of one vendor share. `current` is a stack of streams."""

    def __init__(self, devices: list[Device], available: bool = True) -> None:
        self.devices = devices
        self.available = available
        self.current: list[Any] = []
        self.selected: list[int] = []
        self.recording: Recorded | None = None


class StreamSurface:
    """`torch.cuda.Stream`, `torch.xpu.Stream`, `torch.npu.Stream`. State is set by the module that makes the class."""

    _state: State

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority = priority
        self.queue = Queue()
        self._state.devices[0].streams.append(self)

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        raise NotImplementedError("our code records through events")

    def query(self) -> bool:
        return self.queue.is_past(self.queue.mark())

    def synchronize(self) -> None:
        self.queue.drain()


class DefaultStream(StreamSurface):
    """Everything given to it is done when the call returns; it waits for events on the spot."""


class EventSurface:
    """`Event` of the same modules: a mark in a stream's queue."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._queue: Queue | None = None
        self._mark = 0

    def record(self, stream: Any = None) -> None:
        assert stream is not None, "our code names the stream"
        self._queue, self._mark = stream.queue, stream.queue.mark()

    def wait(self, stream: Any = None) -> None:
        queue, mark = self._queue, self._mark
        if queue is None:
            return
        if isinstance(stream, DefaultStream):
            queue.drain(mark)
        else:
            stream.queue.give(lambda: queue.drain(mark))

    def query(self) -> bool:
        return self._queue is None or self._queue.is_past(self._mark)

    def synchronize(self) -> None:
        if self._queue is not None:
            self._queue.drain(self._mark)


class BlockingEvent(EventSurface):
    """With the parameters that `torch.cuda.Event` adds."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        super().__init__(enable_timing)


class AscendEvent(EventSurface):
    """With the parameters of `torch.npu.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        super().__init__(enable_timing)


class GraphSurface:
    """What the graph classes share."""

    _state: State
    _name = "device"

    def __init__(self) -> None:
        self._recorded: Recorded | None = None

    def _begin(self) -> None:
        assert self._state.current, "capture needs a stream of its own"
        self._recorded = self._state.recording = Recorded()
        self._recorded.__enter__()

    def capture_end(self) -> None:
        assert self._recorded is not None
        self._recorded.__exit__(None, None, None)
        self._state.recording = None
        if not self._recorded.operations:
            warnings.warn(f"The {self._name} Graph is empty.", stacklevel=2)

    def replay(self) -> None:
        assert self._recorded is not None and self._state.recording is None
        self._recorded.replay()

    def reset(self) -> None:
        self._recorded = None


class CudaGraphSurface(GraphSurface):
    """`torch.cuda.CUDAGraph`."""

    _name = "CUDA"

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__()

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        self._begin()


class XpuGraphSurface(GraphSurface):
    """`torch.xpu.XPUGraph`."""

    _name = "XPU"

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__()

    def capture_begin(self, pool: Any = None) -> None:
        self._begin()


class NpuGraphSurface(GraphSurface):
    """`torch.npu.NPUGraph`. Says nothing of an empty recording."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._begin()

    def capture_end(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().capture_end()


class ModuleSurface:
    """What `torch.cuda`, `torch.xpu` and `torch.npu` share."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._default = type("Default", (DefaultStream,), {"_state": state})()
        state.devices[0].streams.clear() if state.devices else None

    def _device(self, index: Any) -> Device:
        return self._state.devices[index or 0]

    def is_available(self) -> bool:
        return self._state.available and bool(self._state.devices)

    def device_count(self) -> int:
        return len(self._state.devices) if self._state.available else 0

    def set_device(self, device: Any) -> None:
        self._state.selected.append(device)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        memory = self._device(device).memory
        return memory.free_bytes, memory.total_bytes

    def memory_allocated(self, device: Any = None) -> int:
        return self._device(device).memory.allocated_bytes

    def memory_reserved(self, device: Any = None) -> int:
        return self._device(device).memory.reserved_bytes

    def empty_cache(self) -> None:
        for device in self._state.devices:
            device.memory.trim()

    def synchronize(self, device: Any = None) -> None:
        chosen = self._device(device)
        if chosen.busy is not None:
            raise RuntimeError(chosen.busy)
        for stream in chosen.streams:
            stream.queue.drain()

    def current_stream(self, device: Any = None) -> Any:
        return self._state.current[-1] if self._state.current else self._default

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self._state.current.append(stream)
        try:
            if isinstance(stream, DefaultStream):
                yield
            else:
                with Deferred(stream.queue):
                    yield
        finally:
            self._state.current.pop()

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 1)


class CudaModule(ModuleSurface):
    """`torch.cuda`, of a CUDA or a HIP build."""

    def __init__(self, state: State, architectures: list[str]) -> None:
        super().__init__(state)
        self._architectures = architectures
        self.Stream = type("Stream", (_CudaStream,), {"_state": state})
        self.Event = BlockingEvent
        self.CUDAGraph = type("CUDAGraph", (CudaGraphSurface,), {"_state": state})

    def get_device_properties(self, device: Any = None) -> Any:
        return self._device(device).properties

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        properties = self._device(device).properties
        return properties.major, properties.minor

    def get_arch_list(self) -> list[str]:
        return list(self._architectures)

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True


class _CudaStream(StreamSurface):
    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -5)


class XpuModule(ModuleSurface):
    """`torch.xpu`."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.Stream = type("Stream", (_XpuStream,), {"_state": state})
        self.Event = EventSurface
        self.XPUGraph = type("XPUGraph", (XpuGraphSurface,), {"_state": state})

    def get_device_properties(self, device: Any = None) -> Any:
        return self._device(device).properties

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        if self._device(device).properties.is_integrated_gpu:
            raise RuntimeError("The device does not support querying the available free memory.")
        return super().mem_get_info(device)


class _XpuStream(StreamSurface):
    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (1, -1)


class NpuModule(ModuleSurface):
    """`torch.npu`, which the package torch-npu adds."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.Stream = type("Stream", (StreamSurface,), {"_state": state})
        self.Event = AscendEvent
        self.NPUGraph = type("NPUGraph", (NpuGraphSurface,), {"_state": state})

    def get_device_properties(self, device_name: Any = None) -> Any:
        return self._device(device_name).properties

    def get_device_name(self, device_name: Any = None) -> str:
        return str(self._device(device_name).properties.name)

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        return True

    def utilization(self, device: Any = None) -> int:
        return 37


class MetalEvent:
    """`torch.mps.Event`: the queue is done at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._recorded = False

    def record(self) -> None:
        self._recorded = True

    def wait(self) -> None:
        return None

    def query(self) -> bool:
        return self._recorded

    def synchronize(self) -> None:
        assert self._recorded


class MpsModule:
    """`torch.mps`."""

    Event = MetalEvent

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory

    def device_count(self) -> int:
        return 1

    def synchronize(self) -> None:
        return None

    def empty_cache(self) -> None:
        self._memory.trim()

    def current_allocated_memory(self) -> int:
        return self._memory.allocated_bytes

    def driver_allocated_memory(self) -> int:
        return self._memory.reserved_bytes

    def recommended_max_memory(self) -> int:
        return self._memory.total_bytes


class MpsBackend:
    """`torch.backends.mps`."""

    def is_built(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def get_name(self) -> str:
        return "Apple M3 Max"

    def get_core_count(self) -> int:
        return 40


OUT_OF_MEMORY = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0 has a total capacity of"),
    "rocm": torch.OutOfMemoryError("HIP out of memory. Tried to allocate 64.00 GiB. GPU 0 has a total capacity of"),
    "xpu": torch.OutOfMemoryError("XPU out of memory. Tried to allocate 64.00 GiB. GPU 0 has a total capacity of"),
    "ascend": RuntimeError("NPU out of memory. Tried to allocate 64.00 GiB (NPU 0; 60.96 GiB total capacity)"),
    "metal": RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB, other allocations: 2.00 GB)"),
}
