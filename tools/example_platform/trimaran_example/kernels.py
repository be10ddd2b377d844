"""The vendor's own kernels: they stand ahead of Trimaran's in their chains. Importing this imports no torch.

Each is checked against Trimaran's reference when it is loaded, and served only if it agrees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trimaran.ipc.facts import DeviceProfile, Problem
from trimaran.kernels.implementation import DeclaredImplementation, FunctionKernel, Kernel, KernelMetadata, Services

_HERE = KernelMetadata(platforms=frozenset({"example"}))


def _rms_norm(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .device import shadow_of

    def rms_norm(out: Any, x: Any, weight: Any, eps: float) -> None:
        numbers = shadow_of(x).float()
        scale = (numbers.square().mean(-1, keepdim=True) + eps).rsqrt()
        shadow_of(out).copy_((numbers * scale).to(x.dtype) * shadow_of(weight))

    return FunctionKernel(rms_norm)


def _paged_attention(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    """In one launch: nothing goes to the host between a block table and its keys."""
    from torch import Tensor

    from .attention import attend
    from .device import unwrapped

    def paged_attention(*arguments: Any) -> None:
        attend(*(unwrapped(argument) if isinstance(argument, Tensor) else argument for argument in arguments))

    return FunctionKernel(paged_attention)


def _offered(kernel: str, loader: Callable[[DeviceProfile, Problem, Services], Kernel]) -> DeclaredImplementation:
    return DeclaredImplementation(name=f"example_{kernel}", kernel=kernel, loader=loader, metadata=_HERE)


KERNELS = (_offered("rms_norm", _rms_norm), _offered("paged_attention", _paged_attention))
