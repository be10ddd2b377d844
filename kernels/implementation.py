"""What an implementation of a kernel is: its metadata, its match, and what loading it gives. Torch-free.

A kernel is a named operation whose meaning its plain PyTorch reference defines. An implementation is one way to
compute it. This file does not choose (`registry`), name (`catalog`) or check (`verification`) implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..ipc.facts import AttentionStrategy, DeviceProfile, Feature, Problem

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, kw_only=True)
class KernelMetadata:
    """What an implementation accepts. An empty set means any; sizes in elements.

    `head_dim_multiple` is the divisor every head size must have; `max_head_dim` and `max_head_bytes` 0 mean no limit.
    `not_platforms` are those it never runs on; `not_offered` maps an architecture to the reason why it is not offered
    there.
    `same_kv_dtype`: the cache must have the model's dtype. `min_shared_memory_bytes`: what one thread block takes.
    `strategy`: the way of walking the cache that it follows; a problem that asks for it puts it first in its chain.
    `depends_on_batch`: sums are added up in another order for other numbers of rows, or of queries.
    `takes_caps_and_sinks`: attention whose scores have a soft cap, whose heads have sinks, or both.
    `uses`: names of the implementations that do a part of it; it is forbidden where one of them is.
    """

    platforms: frozenset[str] = frozenset()
    not_platforms: frozenset[str] = frozenset()
    not_offered: Mapping[str, str] = field(default_factory=dict)
    dtypes: frozenset[str] = frozenset()
    kv_dtypes: frozenset[str] = frozenset()
    head_dim_multiple: int = 1
    max_head_dim: int = 0
    max_head_bytes: int = 0
    block_sizes: frozenset[int] = frozenset()
    features: frozenset[Feature] = frozenset()
    min_compute_capability: str | None = None
    same_kv_dtype: bool = False
    min_shared_memory_bytes: int = 0
    strategy: AttentionStrategy | None = None
    depends_on_batch: bool = False
    takes_caps_and_sinks: bool = False
    uses: frozenset[str] = frozenset()

    def misfit(self, profile: DeviceProfile, problem: Problem) -> str | None:
        """None when it fits; otherwise the first reason why not."""
        return (
            _misfit_device(self, profile)
            or _misfit_choice("dtype", problem.dtype, self.dtypes)
            or _misfit_choice("kv dtype", problem.kv_dtype, self.kv_dtypes)
            or _misfit_cache(self, problem)
            or _misfit_sizes(self, problem)
            or _misfit_batch(self, problem)
        )


def _misfit_device(metadata: KernelMetadata, profile: DeviceProfile) -> str | None:
    if metadata.platforms and profile.platform not in metadata.platforms:
        return f"needs platform {_listed(metadata.platforms)}, device is on {profile.platform}"
    if profile.platform in metadata.not_platforms:
        return f"does not run on platform {profile.platform}"
    return _misfit_architecture(metadata, profile) or _misfit_capability(metadata, profile)


def _misfit_architecture(metadata: KernelMetadata, profile: DeviceProfile) -> str | None:
    architecture = profile.capability.architecture
    reason = metadata.not_offered.get(architecture)
    return None if reason is None else f"not offered on {architecture}: {reason}"


def _misfit_capability(metadata: KernelMetadata, profile: DeviceProfile) -> str | None:
    missing = metadata.features - profile.capability.features
    if missing:
        return f"needs {_listed(missing)}, which {profile.name} does not have"
    needed, has = metadata.min_compute_capability, profile.capability.compute_capability
    if needed is not None and (has is None or _version(has) < _version(needed)):
        return f"needs compute capability {needed}, device has {has or 'none'}"
    shared, device_has = metadata.min_shared_memory_bytes, profile.capability.shared_memory_per_block_bytes
    if device_has is not None and device_has < shared:
        return f"needs {shared} bytes of shared memory per block, device has {device_has}"
    return None


def _misfit_cache(metadata: KernelMetadata, problem: Problem) -> str | None:
    if metadata.same_kv_dtype and problem.kv_dtype not in (None, problem.dtype):
        return f"needs a cache of the model's dtype {problem.dtype}, not {problem.kv_dtype}"
    return None


def _misfit_scores(metadata: KernelMetadata, problem: Problem) -> str | None:
    if metadata.takes_caps_and_sinks or not (problem.caps_scores or problem.has_sinks):
        return None
    return f"has no {'soft cap of scores' if problem.caps_scores else 'attention sinks'}"


def _misfit_choice(what: str, value: str | None, allowed: frozenset[str]) -> str | None:
    if not allowed or value is None or value in allowed:
        return None
    return f"takes {what} {_listed(allowed)}, not {value}"


def _misfit_sizes(metadata: KernelMetadata, problem: Problem) -> str | None:
    head_dim, block_size = problem.head_dim, problem.block_size
    if head_dim % metadata.head_dim_multiple:
        return f"needs a head size that is a multiple of {metadata.head_dim_multiple}, not {head_dim}"
    if metadata.max_head_dim and head_dim > metadata.max_head_dim:
        return f"takes head sizes up to {metadata.max_head_dim}, not {head_dim}"
    head_bytes = head_dim * (4 if problem.dtype == "float32" else 2)
    if metadata.max_head_bytes and head_bytes > metadata.max_head_bytes:
        return f"takes heads of up to {metadata.max_head_bytes} bytes, not {head_bytes}"
    if metadata.block_sizes and block_size and block_size not in metadata.block_sizes:
        return f"takes block sizes {', '.join(str(size) for size in sorted(metadata.block_sizes))}, not {block_size}"
    return None


def _misfit_batch(metadata: KernelMetadata, problem: Problem) -> str | None:
    if problem.batch_invariant and metadata.depends_on_batch:
        return "what a row gets depends on how many others there are"
    return None


def _listed(values: frozenset[str] | frozenset[Feature] | set[str]) -> str:
    return ", ".join(sorted(str(value) for value in values))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


class Kernel(Protocol):
    """Loaded code with its parameter layout and launch geometry. Calling it makes no choices.

    `workspace_bytes`: scratch memory it holds. `capturable`: whether a graph may record the call.
    The call's parameters are those of the kernel's reference; it writes only the tensors the reference says it writes.
    It returns nothing, but where the reference allows an answer in a tensor of the kernel's own.
    """

    workspace_bytes: int
    capturable: bool

    def __call__(self, *arguments: Any) -> torch.Tensor | None: ...


class Communicator(Protocol):
    """Collectives among the ranks of one worker group, in place where the name says so."""

    rank: int
    num_ranks: int

    def all_reduce(self, tensor: torch.Tensor) -> None: ...

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Services:
    """What `load` may use: the device by torch's name ("cuda:0"), threads of it, a directory for what it builds (None:
    nothing may be written), the communicator, and where to leave a warning."""

    device: str = "cpu"
    num_threads: int = 1
    cache_dir: Path | None = None
    communicator: Communicator | None = None
    warn: Callable[[str], None] = field(default=lambda text: None)


class Implementation(Protocol):
    """One way to compute a kernel. `misfit` imports no torch; only `load` does."""

    @property
    def name(self) -> str: ...

    @property
    def kernel(self) -> str: ...

    @property
    def metadata(self) -> KernelMetadata: ...

    def misfit(self, profile: DeviceProfile, problem: Problem) -> str | None:
        """None: it fits. Text: why it does not."""
        ...

    def load(self, profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
        """Compile or look up. May raise anything: the registry then demotes it with that reason."""
        ...


Loader = Callable[[DeviceProfile, Problem, Services], Kernel]


@dataclass(frozen=True, kw_only=True)
class DeclaredImplementation:
    """An implementation whose match is its metadata and whose load is one function."""

    name: str
    kernel: str
    loader: Loader
    metadata: KernelMetadata = KernelMetadata()

    def misfit(self, profile: DeviceProfile, problem: Problem) -> str | None:
        misfit = self.metadata.misfit(profile, problem)
        if misfit is None and self.kernel == "paged_attention":
            return _misfit_scores(self.metadata, problem)
        return misfit

    def load(self, profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
        return self.loader(profile, problem, services)


class FunctionKernel:
    """A kernel that is one function of tensors, needs no scratch memory and is not recorded by graphs."""

    workspace_bytes = 0
    capturable = False

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        self._function(*arguments)


class Packed(Protocol):
    """A weight as a `linear` kernel keeps it."""

    @property
    def num_bytes(self) -> int: ...


class PlainWeight(NamedTuple):
    """A `Packed` weight as the checkpoint has it: `[N, K]`, and its bias `[N]`."""

    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.weight_NK.nbytes + (0 if self.bias_N is None else self.bias_N.nbytes)


@dataclass(frozen=True)
class HostLengths:
    """What the host knows of an attention's lengths, for kernels may not wait for the device to tell: integers, as many
    as its tensors hold.
    """

    query_starts: np.ndarray[Any, np.dtype[Any]]
    kv_lengths: np.ndarray[Any, np.dtype[Any]]

    def first_chunks(self, least: int) -> list[int]:
        """The sequences that have at least so many queries and nothing before them, in order."""
        num_queries = self.query_starts[1:] - self.query_starts[:-1]
        found: list[int] = ((num_queries >= least) & (num_queries == self.kv_lengths)).nonzero()[0].tolist()
        return found


class LinearKernel(Kernel, Protocol):
    """A `linear` kernel: packs a weight once into its own layout, then multiplies by it."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        """The weight `[N, K]` and bias `[N]` in the layout that the call takes. May keep or copy the tensors."""
        ...
