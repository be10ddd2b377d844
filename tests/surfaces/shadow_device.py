"""A strict accelerator in Python: tensors of a device type of their own, computed on the CPU behind it.

As on real devices, an operation that mixes this device's tensors with the host's is an error (scalars aside), and
nothing crosses over but by a copy. Importing this file registers the device for the whole process.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from trimaran.device_workers.platforms.contract import Clause, FoundDevice, Look
from trimaran.device_workers.platforms.torch_accelerator import (
    AcceleratorBackend,
    BackendParts,
    TorchAccelerator,
    capability,
    detected,
)
from trimaran.device_workers.streams.immediate import ImmediateStreams
from trimaran.ipc.facts import DeviceProfile, Feature

NAME = "shadow"
MEMORY_BYTES = 8 << 30
num_operations: Counter[str] = Counter()
_held = [0]


class ShadowModule:
    """What torch asks of `torch.shadow`, and what the backend does."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None:
        return None

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        return None

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: Any = None) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return MEMORY_BYTES - _held[0], MEMORY_BYTES

    def memory_allocated(self, device: Any = None) -> int:
        return _held[0]

    def memory_reserved(self, device: Any = None) -> int:
        return _held[0]


MODULE = ShadowModule()
_setup_privateuseone_for_python_backend(NAME, backend_module=MODULE)


def _wrap(on_cpu: torch.Tensor) -> torch.Tensor:
    """A tensor of the device; its bytes hang on the storage, which views and copies of the handle share."""
    made: torch.Tensor = torch._C._acc.create_empty_tensor(tuple(on_cpu.shape), on_cpu.dtype)  # type: ignore[attr-defined]
    made.untyped_storage().shadow = on_cpu  # type: ignore[attr-defined]
    return made


def _is_ours(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def _behind(value: Any) -> Any:
    if _is_ours(value):
        return value.untyped_storage().shadow
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value


def _check_no_mixture(name: str, leaves: list[Any]) -> None:
    foreign = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not _is_ours(leaf) and leaf.dim() > 0]
    if foreign and any(map(_is_ours, leaves)):
        raise RuntimeError(f"{name}: tensors are on different devices: {NAME} and {foreign[0].device}")


def _as_declared(operation: Any, args: Any) -> tuple[Any, ...]:
    """Numbers where the operation declares a tensor: torch hands scalars over bare."""
    declared = operation._schema.arguments
    return tuple(
        torch.tensor(value) if isinstance(value, int | float) and str(argument.type) == "Tensor" else value
        for value, argument in zip(args, declared, strict=False)
    )


def _run(operation: Any, *args: Any, **kwargs: Any) -> Any:
    leaves = _pytree.tree_leaves((args, kwargs))
    name = operation.name()
    num_operations[name] += 1
    _check_no_mixture(name, leaves)
    given = [leaf for leaf in leaves if _is_ours(leaf)]
    handle_of = {id(_behind(leaf)): leaf for leaf in given}
    cpu_args, cpu_kwargs = _pytree.tree_map(_behind, (_as_declared(operation, args), kwargs))
    if name in ("aten::view", "aten::_unsafe_view", "aten::_reshape_alias"):  # the handle claims to be contiguous
        result = cpu_args[0].reshape(cpu_args[1])
    else:
        result = operation(*cpu_args, **cpu_kwargs)
    for leaf in given:  # an `out=` may have been resized
        if leaf.shape != _behind(leaf).shape:
            leaf.data = _wrap(_behind(leaf))

    def handed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return handle_of.get(id(value)) if id(value) in handle_of else _wrap(value)

    return _pytree.tree_map(handed, result)


_library = torch.library.Library("_", "IMPL")
_library.fallback(_run, "PrivateUse1")
_aten = torch.library.Library("aten", "IMPL")
_VIEWS = (
    "transpose.int permute t slice.Tensor select.int expand unsqueeze squeeze squeeze.dim squeeze.dims split.Tensor "
    "split_with_sizes unbind.int diagonal unfold alias view view.dtype _unsafe_view _reshape_alias"
)


def _register_views() -> None:
    """Torch's own view kernels would compute with the handle's strides."""
    for entry in _VIEWS.split():
        name, _, overload = entry.partition(".")
        operation = getattr(getattr(torch.ops.aten, name), overload or "default")
        _aten.impl(entry, lambda *args, _op=operation, **kwargs: _run(_op, *args, **kwargs), "PrivateUse1")


def _count(on_cpu: torch.Tensor) -> torch.Tensor:
    size = on_cpu.nbytes
    _held[0] += size
    weakref.finalize(on_cpu.untyped_storage(), _let_go, size)
    return _wrap(on_cpu)


def _let_go(size: int) -> None:
    _held[0] -= size


def _empty(size: Any, *, dtype: Any = None, **options: Any) -> torch.Tensor:
    return _count(torch.empty(size, dtype=dtype, device="cpu"))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **options: Any) -> torch.Tensor:
    return _count(torch.empty(size, dtype=dtype, device="cpu"))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    num_operations["copy"] += 1
    _behind(target).copy_(_behind(source))
    return target


def _as_strided(tensor: torch.Tensor, size: Any, stride: Any, storage_offset: Any = None) -> torch.Tensor:
    if tuple(size) == tuple(tensor.shape) and tuple(stride) == tuple(tensor.stride()):
        return _wrap(_behind(tensor))  # the same view once more, by the handle's own strides
    # Of a strided tensor torch asks this only to look at shapes; a write through it would be lost, and tokens differ.
    return _wrap(_behind(tensor).contiguous().as_strided(size, stride, storage_offset))


def _item(tensor: torch.Tensor) -> Any:
    num_operations["item"] += 1
    return _behind(tensor).item()


_register_views()
_aten.impl("as_strided", _as_strided, "PrivateUse1")
_aten.impl("_copy_from", _copy_from, "PrivateUse1")
_aten.impl("empty.memory_format", _empty, "PrivateUse1")
_aten.impl("empty_strided", _empty_strided, "PrivateUse1")
_aten.impl("_local_scalar_dense", _item, "PrivateUse1")


class ShadowPlatform(TorchAccelerator):
    """The device as a platform: one stream that is always done, plain memory, no graphs."""

    name = NAME
    vendor = "nobody"
    device_type = NAME
    collectives = None
    graph_classes = ()
    declines = {
        Clause.GRAPH_CAPTURE: "operations run in Python",
        Clause.STREAM_PRIORITIES: "every operation is done when its call returns",
        Clause.CONCURRENT_STREAMS: "every operation is done when its call returns",
        Clause.ASYNC_COPIES: "every operation is done when its call returns",
        Clause.PINNED_MEMORY: "its memory is the host's",
        Clause.COLLECTIVES: "there is one",
        Clause.MEMORY_HOLDERS: "nobody else can hold any",
        Clause.HEALTH: "there is no hardware",
    }

    def look(self) -> Look:
        return Look(hardware="a device in Python")

    def module(self) -> Any:
        return MODULE

    def misbuilt(self) -> str | None:
        return None

    def basic_mode(self, devices: tuple[FoundDevice, ...]) -> str | None:
        return "there is no compiler for it"

    def describe(self, index: int) -> FoundDevice:
        return FoundDevice(index=index, name="Shadow", memory_bytes=MEMORY_BYTES)

    def profile(self, index: int) -> DeviceProfile:
        features = frozenset({Feature.FP64, Feature.FP16, Feature.BF16})
        profile = DeviceProfile(
            platform=self.name,
            vendor=self.vendor,
            name="Shadow",
            index=index,
            memory_bytes=MEMORY_BYTES,
            capability=capability("shadow", features=features),
        )
        return detected(profile)

    def _backend(self, parts: BackendParts) -> AcceleratorBackend:
        return AcceleratorBackend(parts, ImmediateStreams())
