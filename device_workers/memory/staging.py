"""Step inputs written by numpy on the host and read as tensors on the device, at fixed addresses.

All inputs share one buffer, so that a push is one copy. On a device that shares the host's memory there is no copy
at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch

HostArray = np.ndarray[Any, np.dtype[np.int32]]


class Staging:
    """Named int32 arrays: `host[name]` to write, `device[name]` to read after `push`."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self._buffer = torch.zeros(sum(prod(shape) for shape in shapes.values()), dtype=torch.int32)
        self._on_device = self._buffer if device.type == "cpu" else self._buffer.to(device)
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

    def push(self) -> None:
        if self._on_device is not self._buffer:
            self._on_device.copy_(self._buffer, non_blocking=True)
