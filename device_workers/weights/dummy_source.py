"""Random weights from a config alone: the same for every rank and every start with one seed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from ..models.parameters import Parameter
from .source import OnBytes

_SCALE = 0.02
"""Standard deviation of weights; norms are one."""


class DummySource:
    """Tensors drawn per name, so that ranks agree on their parts of one model."""

    def __init__(self, seed: int, dtype: torch.dtype, on_bytes: OnBytes = lambda done, total: None) -> None:
        self._seed = seed
        self._dtype = dtype
        self._on_bytes = on_bytes
        self._read_bytes = 0
        self._total_bytes = 0

    def check(self, needed: Mapping[str, Parameter]) -> None:
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
        if parameter.name.endswith("norm.weight"):
            return torch.ones(parameter.shape, dtype=self._dtype)
        generator = torch.Generator().manual_seed(zlib.crc32(parameter.name.encode()) ^ self._seed)
        return (torch.randn(parameter.shape, generator=generator) * _SCALE).to(self._dtype)
