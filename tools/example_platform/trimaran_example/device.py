"""The device as PyTorch sees it: `torch.device("example")`, its operations and its memory.

A vendor's PyTorch adapter stands here, usually in C++. This one is Python: each tensor of the device keeps a *shadow*,
the processor's tensor that holds its numbers, on its storage; one fallback runs every operation on the shadows. The
tensor itself always claims to be contiguous; strides live in the shadow.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "example"
TOTAL_BYTES = 2 << 30

counts: Counter[str] = Counter()
"""Operations by name since the process began; copies as "copy to device", "copy to host", "copy on device", and
"host read" for each number that the host waited for."""

_VIEWS = (
    "transpose.int permute t slice.Tensor select.int expand unsqueeze squeeze squeeze.dim squeeze.dims split.Tensor "
    "split_with_sizes unbind.int diagonal unfold alias view view.dtype _unsafe_view _reshape_alias narrow_copy "
    "index.Tensor"
)
"""PyTorch's own versions would compute strides from the tensor, which does not know them."""

_held_bytes = 0


class DeviceModule:
    """What `torch.example` answers."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def set_device(self, index: int) -> None:
        assert index == 0

    def device_count(self) -> int:
        return 1

    def manual_seed_all(self, seed: int) -> None: ...

    def synchronize(self, index: int | None = None) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def held_bytes() -> int:
    """By all tensors of the device that are alive."""
    return _held_bytes


def on_device(shadow: torch.Tensor) -> torch.Tensor:
    """The device's tensor of these numbers."""
    _account(shadow)
    tensor = torch._C._acc.create_empty_tensor(tuple(shadow.shape), shadow.dtype)
    tensor.untyped_storage().shadow = shadow
    return tensor


def shadow_of(tensor: torch.Tensor) -> torch.Tensor:
    shadow: torch.Tensor = tensor.untyped_storage().shadow  # type: ignore[attr-defined]
    return shadow


def unwrapped(value: Any) -> Any:
    """The shadow of a tensor of the device, and the processor for the device; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.device.type == NAME:
        return shadow_of(value)
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value


def _account(shadow: torch.Tensor) -> None:
    """Each storage counts once, until its last tensor is gone."""
    global _held_bytes
    storage = shadow.untyped_storage()
    if not hasattr(storage, "is_accounted"):
        storage.is_accounted = True  # type: ignore[attr-defined]
        _held_bytes += storage.nbytes()
        weakref.finalize(storage, _let_go, storage.nbytes())


def _let_go(num_bytes: int) -> None:
    global _held_bytes
    _held_bytes -= num_bytes


def check_room(num_bytes: int) -> None:
    """Raises RuntimeError in the words of a driver whose memory ran out."""
    if _held_bytes + num_bytes > TOTAL_BYTES:
        raise RuntimeError(f"example: out of memory: {num_bytes} bytes wanted, {TOTAL_BYTES - _held_bytes} free")


def _run(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation, on the shadows."""
    counts[operation.name()] += 1
    ours = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.device.type == NAME]
    tensor_of = {id(shadow_of(tensor)): tensor for tensor in ours}
    host_args, host_kwargs = tree_map(unwrapped, (args, kwargs))
    if operation.name() in ("aten::view", "aten::_unsafe_view", "aten::_reshape_alias"):
        result = host_args[0].reshape(host_args[1])
    else:
        result = _callable(operation, host_args)(*host_args, **host_kwargs)
    for tensor in ours:  # an `out` may have got another size
        if tensor.shape != shadow_of(tensor).shape:
            tensor.data = on_device(shadow_of(tensor))

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        known = tensor_of.get(id(value))
        return on_device(value) if known is None else known

    return tree_map(wrapped, result)


def _callable(operation: Any, args: tuple[Any, ...]) -> Any:
    """PyTorch hands plain numbers where some operations want tensors; then another overload of it is meant."""
    wanted = zip(operation._schema.arguments, args, strict=False)
    has_number = any(isinstance(value, int | float) and str(argument.type) == "Tensor" for argument, value in wanted)
    return operation.overloadpacket if has_number else operation


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    ends = (source.device.type == NAME, target.device.type == NAME)
    counts[{(False, True): "copy to device", (True, False): "copy to host"}.get(ends, "copy on device")] += 1
    unwrapped(target).copy_(unwrapped(source))
    return target


def _empty(size: Any, *, dtype: torch.dtype | None = None, **layout: Any) -> torch.Tensor:
    shape = torch.Size(size)
    check_room(shape.numel() * (dtype or torch.get_default_dtype()).itemsize)
    return on_device(torch.empty(shape, dtype=dtype))


def _empty_strided(size: Any, stride: Any, *, dtype: torch.dtype | None = None, **layout: Any) -> torch.Tensor:
    return _empty(size, dtype=dtype)


def _as_strided(tensor: torch.Tensor, size: Any, stride: Any, offset: int | None = None) -> torch.Tensor:
    assert shadow_of(tensor).is_contiguous(), "as_strided of a tensor whose strides only its shadow knows"
    return on_device(shadow_of(tensor).as_strided(size, stride, offset))


def _local_scalar_dense(tensor: torch.Tensor) -> Any:
    counts["host read"] += 1
    return shadow_of(tensor).item()


def _bound(name: str) -> Any:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return lambda *args, **kwargs: _run(operation, *args, **kwargs)


_setup_privateuseone_for_python_backend(NAME, backend_module=DeviceModule())
_every = torch.library.Library("_", "IMPL")
_every.fallback(_run, "PrivateUse1")
_aten = torch.library.Library("aten", "IMPL")
for _name in _VIEWS.split():
    _aten.impl(_name, _bound(_name), "PrivateUse1")
_aten.impl("as_strided", _as_strided, "PrivateUse1")
_aten.impl("_copy_from", _copy_from, "PrivateUse1")
_aten.impl("empty.memory_format", _empty, "PrivateUse1")
_aten.impl("empty_strided", _empty_strided, "PrivateUse1")
_aten.impl("_local_scalar_dense", _local_scalar_dense, "PrivateUse1")
