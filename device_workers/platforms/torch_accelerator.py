"""What the accelerators that torch drives have in common: detection in steps, and one backend over a torch module.

A vendor's file says how to look for its hardware, what its torch module is called and what its devices are. Modules of
one shape (`torch.cuda`, `torch.xpu`, `torch.npu`) share all that is here; what differs is a method to override.
"""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from msgspec import structs

from ...ipc.facts import DeviceCapability, DeviceHealth, DeviceProfile, Feature, MemoryFacts, Provenance
from ...kernels.implementation import Communicator, Kernel
from ..streams.contract import Stream, StreamManager, StreamPriority
from ..streams.torch_streams import TorchStreams
from .contract import (
    Clause,
    DeviceMemory,
    FenceScope,
    Found,
    FoundDevice,
    Graph,
    Look,
    MemoryKind,
    NotSupported,
    Refused,
    WorkerGroup,
)
from .host import Host
from .visibility import hiding, shown

if TYPE_CHECKING:
    import ctypes

    import torch

_ALIGNMENT_BYTES = 256
_EMPTY_RECORDING = "is empty"
"""Part of the warning by which torch says that a capture recorded nothing."""


class TorchAccelerator(ABC):
    """A Platform on a torch module. Subclasses set the names and answer the abstract methods."""

    name: str
    vendor: str
    device_type: str
    collectives: str | None
    """Name of the vendor's backend in torch.distributed."""
    graph_classes: tuple[str, ...]
    """Names of the module's graph class, newest first; empty: it has none."""
    visibility: tuple[str, ...] = ()
    software_features: frozenset[Feature] = frozenset()
    computes = True
    declines: Mapping[Clause, str] = {}

    def __init__(self, host: Host | None = None) -> None:
        self.host = Host() if host is None else host

    # -- what a vendor says

    @abstractmethod
    def look(self) -> Look: ...

    @abstractmethod
    def module(self) -> Any:
        """Torch's module of the vendor."""

    @abstractmethod
    def misbuilt(self) -> str | None:
        """Why the torch that is installed cannot drive this vendor's devices, with the cure; None: it can."""

    @abstractmethod
    def describe(self, index: int) -> FoundDevice: ...

    @abstractmethod
    def profile(self, index: int) -> DeviceProfile: ...

    def outdated(self) -> str | None:
        """Which version of driver, runtime or system is below its minimum: installed, minimum, cure."""
        return None

    def unsupported(self, index: int) -> str | None:
        """Why torch holds no code for this device's architecture, naming those it has; None: it has."""
        return None

    def basic_mode(self, devices: tuple[FoundDevice, ...]) -> str | None:
        """Why hardware-specific kernels stay off; None: they are on."""
        if not self.host.has_module("triton"):
            return "Triton is not installed, so kernels made for the device are off: pip install triton"
        return None

    def num_devices(self) -> int:
        module = self.module()
        return int(module.device_count()) if module.is_available() else 0

    def torch_device(self, index: int) -> torch.device:
        import torch

        return torch.device(self.device_type, index)

    # -- detection

    def detect(self) -> Found | Refused:
        look = self.look()
        if look.hardware is None or look.obstacle is not None:
            return Refused(reason=look.obstacle or f"no {self.vendor} device is there", hardware=look.hardware)
        reason = self._unusable()
        if reason is not None:
            return Refused(reason=reason, hardware=look.hardware)
        try:
            devices, refused = self._devices()
        except RuntimeError as error:
            return Refused(reason=f"a device does not answer: {first_line(error)}", hardware=look.hardware)
        if not devices:
            return Refused(reason="; ".join(refused), hardware=look.hardware)
        visible = shown(self.host.variables, self.visibility)
        notes = (*([f"visible devices: {visible}"] if visible else []), *(f"not used: {text}" for text in refused))
        return Found(devices=devices, basic_mode=self.basic_mode(devices), notes=notes)

    def _unusable(self) -> str | None:
        hidden = hiding(self.host.variables, self.visibility)
        if hidden is not None:
            return hidden
        if self.host.package_version("torch") is None:
            return "PyTorch is not installed: pip install torch"
        reason = self.misbuilt() or self.outdated()
        if reason is not None:
            return reason
        with warnings.catch_warnings(record=True) as said:  # torch tells the driver's trouble by a warning
            warnings.simplefilter("always")
            try:
                count = self.num_devices()
            except RuntimeError as error:
                return f"PyTorch cannot start the device: {first_line(error)}"
        if count:
            return None
        story = "; ".join(first_line(warning.message) for warning in said)
        visible = shown(self.host.variables, self.visibility)
        return f"PyTorch {torch_version()} sees no device" + "".join(f" ({text})" for text in (story, visible) if text)

    def _devices(self) -> tuple[tuple[FoundDevice, ...], list[str]]:
        devices, refused = [], []
        for index in range(self.num_devices()):
            reason = self.unsupported(index)
            if reason is None:
                devices.append(self.describe(index))
            else:
                refused.append(reason)
        return tuple(devices), refused

    def busy(self, index: int) -> str | None:
        """A small allocation tells: it makes the driver's context."""
        import torch

        try:
            torch.empty(1, device=self.torch_device(index))
            self._synchronize(index)
        except RuntimeError as error:
            return first_line(error)
        return None

    def _synchronize(self, index: int) -> None:
        self.module().synchronize(index)

    # -- the live device

    def open(
        self, index: int, *, num_threads: int, cache_dir: Path | None, warn: Callable[[str], None]
    ) -> AcceleratorBackend:
        import torch

        torch.set_num_threads(num_threads)
        self._select(index)
        parts = BackendParts(
            profile=self.profile(index),
            module=self.module(),
            device=self.torch_device(index),
            index=index,
            graph_class=self._graph_class(),
            collectives=self.collectives,
            num_threads=num_threads,
            declines=self.declines,
            health=self.health_reader(index),
            holders=self.holders_reader(index),
            on_battery=self.host.on_battery,
        )
        return self._backend(parts)

    def _select(self, index: int) -> None:
        self.module().set_device(index)

    def _backend(self, parts: BackendParts) -> AcceleratorBackend:
        return AcceleratorBackend(parts, TorchStreams(parts.module, parts.index))

    def _graph_class(self) -> Any:
        """The module's own class, else torch's generic one (since 2.13)."""
        import torch

        module = self.module()
        own = next((getattr(module, name) for name in self.graph_classes if hasattr(module, name)), None)
        return own if own is not None or not self.graph_classes else getattr(torch.accelerator, "Graph", None)

    def health_reader(self, index: int) -> Callable[[], DeviceHealth]:
        return DeviceHealth

    def holders_reader(self, index: int) -> Callable[[], dict[str, int]]:
        return dict

    def libraries(self) -> dict[str, str]:
        """Versions of what runs on the device, by package name."""
        names = ("torch", "triton")
        return {name: found for name in names if (found := self.host.package_version(name)) is not None}

    def common_features(self, devices: tuple[FoundDevice, ...] = ()) -> set[Feature]:
        """Those that follow from the clauses and from basic mode."""
        features = set()
        if Clause.GRAPH_CAPTURE not in self.declines:
            features.add(Feature.GRAPH_CAPTURE)
        if Clause.STREAM_PRIORITIES not in self.declines:
            features.add(Feature.STREAM_PRIORITIES)
        if self.basic_mode(devices) is None:
            features.add(Feature.TRITON)
        return features


@dataclass(frozen=True, kw_only=True)
class BackendParts:
    """What a platform hands its live device."""

    profile: DeviceProfile
    module: Any
    device: torch.device
    index: int
    graph_class: Any
    collectives: str | None
    num_threads: int
    declines: Mapping[Clause, str]
    health: Callable[[], DeviceHealth]
    holders: Callable[[], dict[str, int]]
    on_battery: Callable[[], bool | None]


def _end_allocating(device: torch.device, pool: Any) -> None:
    """The allocator of a recording that the driver broke off believes in it for ever, and gives nothing back that it
    keeps for later. Torch has no public name for this; `torch.cuda.use_mem_pool` calls the same.
    """
    import torch

    end = getattr(torch._C, f"_{device.type}_endAllocateToPool", None)
    if end is not None and pool is not None and device.type != "cpu":
        with suppress(RuntimeError):  # it had ended in order
            end(device.index or 0, pool)


class AcceleratorGraph:
    """Work recorded by the vendor's graph class, for the sizes that it was recorded with."""

    num_launches: int | None = None

    def __init__(self, native: Any) -> None:
        self._native = native

    def replay(self, num_tokens: int, num_sequences: int, progress: ctypes.c_int64 | None) -> None:
        self._native.replay()


class AcceleratorBackend:
    """A live device behind a torch module."""

    graphs_take_any_size = False

    def __init__(self, parts: BackendParts, streams: StreamManager) -> None:
        from ..memory.memory_pool import MemoryPool

        self.profile = parts.profile
        self.streams = streams
        self.torch_device = parts.device
        self.num_threads = parts.num_threads
        self._parts = parts
        self._module = parts.module
        makers: dict[MemoryKind, Callable[[int], torch.Tensor]] = {MemoryKind.DEVICE: self._device_bytes}
        if Clause.PINNED_MEMORY not in parts.declines:
            makers[MemoryKind.PINNED_HOST] = pinned_bytes
        refusals = {MemoryKind.PINNED_HOST: parts.declines.get(Clause.PINNED_MEMORY, "")}
        self._pool = MemoryPool(makers, refusals, self.release_cached_memory)
        self._graph_pool: Any = None
        self._graphs: WeakSet[AcceleratorGraph] = WeakSet()
        self._capture_stream: Stream | None = None

    def _device_bytes(self, num_bytes: int) -> torch.Tensor:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    # -- memory

    def allocate_memory(self, num_bytes: int, *, kind: MemoryKind, alignment_bytes: int) -> DeviceMemory:
        return self._pool.allocate(num_bytes, kind, alignment_bytes)

    def memory_facts(self) -> MemoryFacts:
        free, total = self._free_and_total()
        reserved, allocated = self._reserved(), self._allocated()
        return MemoryFacts(
            total_bytes=total,
            free_bytes=free,
            ours_bytes=reserved,
            holders=self._parts.holders(),
            by_kind={
                MemoryKind.DEVICE: allocated,
                MemoryKind.PINNED_HOST: self._pool.held_bytes(MemoryKind.PINNED_HOST),
            },
            fragment_bytes=reserved - allocated,
        )

    def _free_and_total(self) -> tuple[int, int]:
        free, total = self._module.mem_get_info(self._parts.index)
        return int(free), int(total)

    def _reserved(self) -> int:
        return int(self._module.memory_reserved(self._parts.index))

    def _allocated(self) -> int:
        return int(self._module.memory_allocated(self._parts.index))

    def release_cached_memory(self) -> None:
        self._module.empty_cache()

    # -- work

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        with self.streams.use(stream):
            target.copy_(source, non_blocking=Clause.ASYNC_COPIES not in self._parts.declines)
        self._outlive((target, source), stream)

    def launch(self, kernel: Kernel, tensors: tuple[Any, ...], stream: Stream) -> None:
        with self.streams.use(stream):
            kernel(*tensors)
        self._outlive(tensors, stream)

    def _outlive(self, tensors: tuple[Any, ...], stream: Stream) -> None:
        """The allocator must not reuse a tensor's memory, once dropped, while another stream still works on it."""
        if stream.native is None:
            return
        for tensor in tensors:
            if getattr(tensor, "device", None) == self.torch_device and tensor.device.type != "cpu":
                tensor.record_stream(stream.native)

    def synchronize(self, scope: FenceScope = FenceScope.DEVICE) -> None:
        if scope is FenceScope.STREAM:
            self.streams.synchronize(self.streams.current())
        else:
            self._module.synchronize(self._parts.index)

    def capture_graph(self, run: Callable[[], None]) -> Graph:
        if self._parts.graph_class is None:
            reason = self._parts.declines.get(Clause.GRAPH_CAPTURE, "this PyTorch has no graphs for the device")
            raise NotSupported(reason)
        if self._capture_stream is None:
            self._capture_stream = self.streams.create_stream(StreamPriority.HIGH)
        if self._graph_pool is None or not self._graphs:  # a pool is gone with the last graph that lived in it
            self._graph_pool = self._module.graph_pool_handle()
        self.synchronize()
        native = self._parts.graph_class()
        try:
            self._record(native, run)
        except (RuntimeError, NotSupported) as error:
            self._forget(native)
            if isinstance(error, NotSupported):
                raise
            raise NotSupported(f"the recording failed: {first_line(error)}") from error
        except BaseException:
            self._forget(native)
            raise
        graph = AcceleratorGraph(native)
        self._graphs.add(graph)
        return graph

    def _forget(self, native: Any) -> None:
        """After a recording that failed: its stream and memory pool may still believe that they are recording."""
        with suppress(RuntimeError):
            native.reset()
        _end_allocating(self.torch_device, self._graph_pool)
        self._capture_stream = self._graph_pool = None
        self.synchronize()

    def _record(self, native: Any, run: Callable[[], None]) -> None:
        assert self._capture_stream is not None
        with self.streams.use(self._capture_stream), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            native.capture_begin(pool=self._graph_pool)
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # the first failure is the one to tell
                    native.capture_end()
                raise
            native.capture_end()
        if any(_EMPTY_RECORDING in str(warning.message) for warning in said):
            raise NotSupported("nothing was launched on the device")

    def communicator(self, group: WorkerGroup) -> Communicator | None:
        if group.num_ranks == 1:
            return None
        if self._parts.collectives is None:
            raise NotSupported(self._parts.declines[Clause.COLLECTIVES])
        from .torch_collectives import TorchCommunicator

        return TorchCommunicator(self._parts.collectives, group, self.torch_device)

    def health(self) -> DeviceHealth:
        """What the driver's own library or files say, and of memory what is ours: torch is not asked of the device,
        because a recording may be under way on another thread.
        """
        health = structs.replace(self._parts.health(), on_battery=self._parts.on_battery())
        if health.memory is None:
            return health
        return structs.replace(
            health, memory=structs.replace(health.memory, ours_bytes=self._reserved(), holders=self._parts.holders())
        )

    def close(self) -> None:
        self.synchronize()
        self.release_cached_memory()


def pinned_bytes(num_bytes: int) -> torch.Tensor:
    """Host memory that the device copies from and to without the processor."""
    import torch

    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def torch_version() -> str:
    import torch

    return torch.__version__


def first_line(error: object) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def without_suffix(architecture: str) -> str:
    """The architecture's name without the feature flags behind a colon: "gfx942:sramecc+:xnack-" is "gfx942"."""
    return architecture.split(":", 1)[0]


def uuid_text(value: object, prefix: str = "") -> str | None:
    """A UUID as the vendor's tools print it; torch gives text, bytes or an object that prints as one."""
    if value is None:
        return None
    text = value.hex() if isinstance(value, bytes) else str(value)
    if re.fullmatch(r"[0-9a-fA-F]{32}", text):
        text = "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
    return text if text.startswith(prefix) else prefix + text


def detected(profile: DeviceProfile) -> DeviceProfile:
    """The profile with provenance DETECTED for every value that is there."""
    provenance = {name: Provenance.DETECTED for name, value in structs.asdict(profile).items() if _is_told(value)}
    del provenance["capability"]
    for name, value in structs.asdict(profile.capability).items():
        if name == "features":
            provenance |= {f"capability.features.{feature}": Provenance.DETECTED for feature in value}
        elif _is_told(value):
            provenance[f"capability.{name}"] = Provenance.DETECTED
    return structs.replace(profile, provenance=provenance)


def _is_told(value: object) -> bool:
    return value is not None and value not in ({}, (), frozenset())


def capability(architecture: str, **values: Any) -> DeviceCapability:
    """Of the values that the driver told; None stays unknown."""
    told = {name: value for name, value in values.items() if value is not None}
    defaults: dict[str, Any] = {"architecture": architecture, "allocation_alignment_bytes": _ALIGNMENT_BYTES}
    return DeviceCapability(**(defaults | told))
