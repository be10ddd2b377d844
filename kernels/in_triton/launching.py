"""What all Triton kernels share: how they are launched. No choices are left when one is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compilations import is_rehearsing

Launch = Callable[..., Any]
"""`(kernel, grid, *arguments, **constants)`."""


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch on the current device and stream; in a rehearsal, ask for what that would take."""
    if is_rehearsing():
        kernel.warmup(*arguments, grid=grid, **constants)
    else:
        kernel[grid](*arguments, **constants)


class TritonKernel:
    """A launcher of compiled code. `launch` runs it; the compile matrix puts one there that only compiles."""

    workspace_bytes = 0
    capturable = True
    launch: Launch = staticmethod(run)


def next_power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
