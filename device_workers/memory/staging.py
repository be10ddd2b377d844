"""What goes between host and device in a step: inputs written by numpy, results read by numpy, nobody waiting.

All inputs of a step lie in one buffer, so that they go over in one copy, from pinned memory where the platform has it.
Host buffers take turns, because the last copy may still be under way; the device's buffer is one, at a fixed address,
so that recorded passes find their inputs. On the processor both are the same memory, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ..platforms.contract import Backend, DeviceMemory, MemoryKind, NotSupported
from ..streams.contract import Event, StreamManager

Array = np.ndarray[Any, np.dtype[Any]]
_NUM_TURNS = 3  # two steps may be in flight while a third is written
_MOST_LAYOUTS = 128  # whose arrays are kept: every bucket of decodes, some other steps
_ALIGNMENT_BYTES = 64  # of each array: compiled kernels are made for aligned addresses
_TORCH: dict[type[np.generic], torch.dtype] = {
    np.int32: torch.int32,
    np.int64: torch.int64,
    np.float32: torch.float32,
}


class Place(NamedTuple):
    """One array in the buffer: elements of 4 or 8 bytes, and where its first byte lies."""

    kind: type[np.generic]
    shape: tuple[int, ...]
    begin: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * np.dtype(self.kind).itemsize


class Layout:
    """Arrays by name, one behind the other in the order given; `num_bytes` in all."""

    def __init__(self, sizes: Mapping[str, tuple[type[np.generic], tuple[int, ...]]]) -> None:
        self.places: dict[str, Place] = {}
        end = 0
        for name, (kind, shape) in sizes.items():
            self.places[name] = place = Place(kind, shape, end)
            end += -(-place.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.num_bytes = end


def _cut(host: Array, sizes: Layout) -> Mapping[str, Array]:
    assert sizes.num_bytes <= len(host), (sizes.num_bytes, len(host))
    return {
        name: np.frombuffer(host, place.kind, prod(place.shape), place.begin).reshape(place.shape)
        for name, place in sizes.places.items()
    }


class Staging:
    """Named arrays of each step: `write` gives them to fill, `push` sends them, `read` is the device's side of the same
    layout.
    """

    def __init__(self, num_bytes: int, backend: Backend) -> None:
        self._backend = backend
        self.is_host = backend.torch_device.type == "cpu"
        self._hosts = [_host_buffer(num_bytes, backend) for _ in range(1 if self.is_host else _NUM_TURNS)]
        self._pushed: list[Event | None] = [None] * len(self._hosts)
        self._turn = 0
        device = backend.torch_device
        self._device = self._hosts[0] if self.is_host else torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._arrays = [lru_cache(_MOST_LAYOUTS)(partial(_cut, host.numpy())) for host in self._hosts]

    @property
    def num_bytes(self) -> int:
        return self._device.nbytes

    def write(self, sizes: Layout) -> Mapping[str, Array]:
        """Arrays to fill, their contents left from earlier steps. Waits where the device has not read them yet."""
        self._turn = (self._turn + 1) % len(self._hosts)
        event = self._pushed[self._turn]
        if event is not None:
            event.wait_blocking()
            self._pushed[self._turn] = None
        return self._arrays[self._turn](sizes)

    def push(self, num_bytes: int) -> None:
        """Send the first bytes of what was written last, in the order of the current stream."""
        if self.is_host:
            return
        streams = self._backend.streams
        stream = streams.current()
        self._backend.copy(self._device[:num_bytes], self._hosts[self._turn][:num_bytes], stream)
        self._pushed[self._turn] = streams.record(stream)

    def read(self, sizes: Layout, *names: str) -> list[torch.Tensor]:
        """The device's side of these arrays."""
        return [self._read(sizes.places[name]) for name in names]

    def _read(self, place: Place) -> torch.Tensor:
        flat = self._device[place.begin : place.begin + place.num_bytes]
        return flat.view(_TORCH[place.kind]).view(place.shape)


class TurningBuffers:
    """Host buffers for one small result of every step. What was read into one stays until its turn comes again."""

    def __init__(self, length: int, dtype: torch.dtype, backend: Backend) -> None:
        num_bytes = length * dtype.itemsize
        self._buffers = [_host_buffer(num_bytes, backend).view(dtype) for _ in range(_NUM_TURNS)]
        self._turn = 0

    def next(self) -> torch.Tensor:
        self._turn = (self._turn + 1) % len(self._buffers)
        return self._buffers[self._turn]


class HostLink:
    """Single tensors from and to the host, in the order of the current stream, with nobody waiting."""

    def __init__(self, backend: Backend) -> None:
        self._device = backend.torch_device
        self._streams = backend.streams
        self._pins = _pinned_memory(1, backend) is not None and _torch_pins()

    def send(self, values: Array) -> torch.Tensor:
        """A copy of the array on the device."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if self._device.type == "cpu":
            return tensor.clone()
        return (tensor.pin_memory() if self._pins else tensor).to(self._device, non_blocking=True)

    def readback(self) -> Readback:
        return Readback(self._streams, self._pins)


class Readback:
    """Tensors on their way to the host: `take` each, `close`, and read them once `wait` has returned."""

    def __init__(self, streams: StreamManager, pins: bool) -> None:
        self._streams = streams
        self._pins = pins
        self._event: Event | None = None

    def take(self, tensor: torch.Tensor, into: TurningBuffers | None = None) -> torch.Tensor:
        """The tensor on the host, `into` a buffer that is there already if given; what it holds counts after `wait`."""
        if tensor.device.type == "cpu":
            return tensor if into is None else tensor.clone()
        if not self._pins:
            return tensor.cpu()
        if into is None:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        else:
            host = into.next()[: len(tensor)]
        return host.copy_(tensor, non_blocking=True)

    def close(self) -> None:
        self._event = self._streams.record(self._streams.current())

    def is_done(self) -> bool:
        return self._event is None or self._event.done()

    def wait(self) -> None:
        if self._event is not None:
            self._event.wait_blocking()


def _torch_pins() -> bool:
    """Whether torch's own allocator has pinned memory for the device: it keeps what a copy under way still reads."""
    try:
        torch.empty(1, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _host_buffer(num_bytes: int, backend: Backend) -> torch.Tensor:
    memory = _pinned_memory(num_bytes, backend)
    if memory is None:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    return memory.tensor((num_bytes,), torch.uint8).zero_()


def _pinned_memory(num_bytes: int, backend: Backend) -> DeviceMemory | None:
    """None where the platform declines pinned memory."""
    try:
        return backend.allocate_memory(num_bytes, kind=MemoryKind.PINNED_HOST, alignment_bytes=_ALIGNMENT_BYTES)
    except NotSupported:
        return None
