"""Step inputs written by numpy on the host and read as tensors on the device, at fixed addresses.

All inputs share one buffer, so that a push is one copy, from pinned memory where the platform has it. On the processor
there is no copy at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch

from ..platforms.contract import Backend, MemoryKind, NotSupported
from ..streams.contract import Event

HostArray = np.ndarray[Any, np.dtype[np.int32]]


class Staging:
    """Named int32 arrays: `host[name]` to write once `begin` has returned, `device[name]` to read after `push`."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], backend: Backend) -> None:
        size = sum(prod(shape) for shape in shapes.values())
        self._backend = backend
        self._pushed: Event | None = None
        self._buffer = _host_buffer(size, backend)
        is_host = backend.torch_device.type == "cpu"
        self._on_device = self._buffer if is_host else torch.zeros_like(self._buffer, device=backend.torch_device)
        self.host: dict[str, HostArray] = {}
        self.device: dict[str, torch.Tensor] = {}
        begin = 0
        for name, shape in shapes.items():
            end = begin + prod(shape)
            self.host[name] = self._buffer[begin:end].view(shape).numpy()
            self.device[name] = self._on_device[begin:end].view(shape)
            begin = end

    @property
    def num_bytes(self) -> int:
        return self._on_device.nbytes

    def begin(self) -> None:
        """Wait until the last push has read the host's side: it may still be under way when its call has returned."""
        if self._pushed is not None:
            self._pushed.wait_blocking()
            self._pushed = None

    def push(self) -> None:
        if self._on_device is self._buffer:
            return
        streams = self._backend.streams
        stream = streams.current()
        self._backend.copy(self._on_device, self._buffer, stream)
        self._pushed = streams.record(stream)


def _host_buffer(size: int, backend: Backend) -> torch.Tensor:
    num_bytes = size * torch.int32.itemsize
    try:
        memory = backend.allocate_memory(num_bytes, kind=MemoryKind.PINNED_HOST, alignment_bytes=64)
    except NotSupported:  # the platform declines pinned memory
        return torch.zeros(size, dtype=torch.int32)
    return memory.tensor((size,), torch.int32).zero_()
