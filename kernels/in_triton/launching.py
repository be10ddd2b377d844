"""What all Triton kernels share: how they are launched. No choices are left when one is called."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..compilations import asks_anew, is_rehearsing

Launch = Callable[..., Any]
"""`(kernel, grid, *arguments, **constants)`."""


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch on the current device and stream; in a rehearsal, ask for what that would take."""
    if not is_rehearsing():
        kernel[grid](*arguments, **constants)
    elif asks_anew(code_of(kernel, arguments, constants)):
        kernel.warmup(*arguments, grid=grid, **constants)


def code_of(kernel: Any, arguments: tuple[Any, ...], constants: Mapping[str, Any]) -> Hashable:
    """Launches for which this is equal take the same code."""
    return kernel, *map(_of_argument, arguments), *constants.items()


def _of_argument(argument: Any) -> Hashable:
    """What of it code may depend on, in any of Triton's backends; finer does no harm."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16, argument.untyped_storage().size() < 1 << 31
    if type(argument) is int:
        return argument == 1, argument % 16, -(1 << 31) <= argument < 1 << 31, argument < 1 << 63
    if argument is None or isinstance(argument, float):
        return type(argument).__name__
    if isinstance(argument, TensorDescriptor):
        return _of_argument(argument.base), *argument.shape, *argument.strides, *argument.block_shape
    return object()  # of another kind: every one may need code of its own


class TritonKernel:
    """A launcher of compiled code. `launch` runs it; the compile matrix puts one there that only compiles."""

    workspace_bytes = 0
    capturable = True
    launch: Launch = staticmethod(run)


def next_power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
