"""Explicit memory of one device by kind, aligned, and accounted until its last tensor is gone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from math import prod

import torch

from ..platforms.contract import MemoryKind, NotSupported
from .exhaustion import exhaustion_as_memory_error

MakeBytes = Callable[[int], torch.Tensor]
"""Returns so many bytes as a flat uint8 tensor, at any alignment. May raise RuntimeError when memory ran out."""


class PooledMemory:
    """A DeviceMemory of the pool."""

    def __init__(self, aligned: torch.Tensor, kind: MemoryKind) -> None:
        self._bytes = aligned
        self.kind = kind

    @property
    def num_bytes(self) -> int:
        return self._bytes.numel()

    @property
    def address(self) -> int:
        return self._bytes.data_ptr()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = prod(shape) * dtype.itemsize
        assert num_bytes <= self.num_bytes, (shape, dtype, self.num_bytes)
        return self._bytes[:num_bytes].view(dtype).view(shape)


class MemoryPool:
    """`makers` says how each kind is allocated, `declines` why another does not exist here; `release` is called when
    memory ran out.
    """

    def __init__(
        self,
        makers: Mapping[MemoryKind, MakeBytes],
        declines: Mapping[MemoryKind, str],
        release: Callable[[], None],
    ) -> None:
        self._makers = makers
        self._declines = declines
        self._release = release
        self._held = dict.fromkeys(makers, 0)

    def allocate(self, num_bytes: int, kind: MemoryKind, alignment_bytes: int) -> PooledMemory:
        """Raises MemoryError, and NotSupported for a kind that does not exist here."""
        assert num_bytes >= 0 and alignment_bytes > 0, (num_bytes, alignment_bytes)
        if kind not in self._makers:
            raise NotSupported(self._declines[kind])
        with exhaustion_as_memory_error(self._release):
            whole = self._makers[kind](num_bytes + alignment_bytes)
        begin = -whole.data_ptr() % alignment_bytes
        self._hold(whole, kind)
        return PooledMemory(whole[begin : begin + num_bytes], kind)

    def held_bytes(self, kind: MemoryKind) -> int:
        """What was allocated here and is still referred to, by the memory itself or by a tensor of it."""
        return self._held.get(kind, 0)

    def _hold(self, whole: torch.Tensor, kind: MemoryKind) -> None:
        num_bytes = whole.numel()
        self._held[kind] += num_bytes
        weakref.finalize(whole.untyped_storage(), self._let_go, kind, num_bytes)

    def _let_go(self, kind: MemoryKind, num_bytes: int) -> None:
        self._held[kind] -= num_bytes
