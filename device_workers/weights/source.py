"""Where weights come from: the contract that a model reads through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from ..models.parameters import Parameter

OnBytes = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes to read in all."""


class WeightSource(Protocol):
    """Named tensors of a checkpoint. Only the asked part of a tensor is read."""

    def check(self, needed: Mapping[str, Parameter], ignored_prefixes: tuple[str, ...] = ()) -> None:
        """Raises Refusal naming missing, unexpected and misshapen tensors; those with such a prefix may be there."""
        ...

    def read(
        self, parameter: Parameter, *, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """The tensor, or the half-open range of its first (`rows`) or second (`columns`) dimension. Not to be
        written.
        """
        ...
