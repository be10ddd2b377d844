"""Random weights from a config alone: the same for every rank and every start with one seed on one kind of device."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from ..models.parameters import Parameter
from .source import OnBytes

_HOST = torch.device("cpu")
_SCALE = 0.02
"""Standard deviation of weights; norms are one."""


class DummySource:
    """Tensors drawn per name, so that ranks agree on their parts of one model; on the device where it draws."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        on_bytes: OnBytes = lambda done, total: None,
        device: torch.device = _HOST,
    ) -> None:
        self._seed = seed
        self._device = device if _draws(device) else _HOST
        self._dtype = dtype
        self._on_bytes = on_bytes
        self._read_bytes = 0
        self._total_bytes = 0

    def check(self, needed: Mapping[str, Parameter], ignored_prefixes: tuple[str, ...] = ()) -> None:
        self._total_bytes = sum(parameter.num_elements for parameter in needed.values()) * self._dtype.itemsize

    def read(
        self, parameter: Parameter, *, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> torch.Tensor:
        tensor = self._drawn(parameter)
        self._read_bytes += tensor.nbytes
        self._on_bytes(self._read_bytes, self._total_bytes)
        if columns is not None:
            return tensor[:, columns[0] : columns[1]]
        return tensor if rows is None else tensor[rows[0] : rows[1]]

    def _drawn(self, parameter: Parameter) -> torch.Tensor:
        if parameter.name.lower().endswith("norm.weight"):
            return torch.ones(parameter.shape, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(parameter.name.encode()) ^ self._seed)
        drawn = torch.randn(parameter.shape, generator=generator, device=self._device)
        return drawn.mul_(_SCALE).to(self._dtype)


def _draws(device: torch.device) -> bool:
    try:
        torch.Generator(device)
    except RuntimeError:
        return False
    return True
