"""A device's memory: an allocator that keeps what is freed, a limit, and neighbours that hold some."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class DeviceMemory:
    """Bytes of one simulated device. `neighbours` is held by other processes."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.neighbours_bytes = 0
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.pinned_bytes = 0
        self.num_trims = 0
        self.fail_next = False

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.reserved_bytes - self.neighbours_bytes

    def trim(self) -> None:
        self.num_trims += 1
        self.reserved_bytes = self.allocated_bytes

    def hold(self, tensor: torch.Tensor, exhausted: Exception) -> torch.Tensor:
        """Count a new device tensor until its storage is gone. Raises `exhausted` when it does not fit."""
        size = tensor.nbytes
        cached = self.reserved_bytes - self.allocated_bytes
        if self.fail_next or size > self.free_bytes + cached:
            self.fail_next = False
            raise exhausted
        self.allocated_bytes += size
        self.reserved_bytes = max(self.reserved_bytes, self.allocated_bytes)
        weakref.finalize(tensor.untyped_storage(), self._let_go, size)
        return tensor

    def _let_go(self, size: int) -> None:
        self.allocated_bytes -= size


def empty_on(memory: DeviceMemory, exhausted: Exception) -> Any:
    """`torch.empty` of a process with this device: a tensor with a named device counts as the device's."""
    real = torch.empty

    def empty(*size: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            made = real(*size, **options)
            memory.pinned_bytes += made.nbytes
            return made
        if device is None:
            return real(*size, **options)
        shape = size[0] if isinstance(size[0], tuple | list | torch.Size) else size
        num_bytes = torch.Size(shape).numel() * options.get("dtype", torch.float32).itemsize
        if num_bytes > memory.total_bytes:
            raise exhausted
        return memory.hold(real(*size, device=device, **options), exhausted)

    return empty
