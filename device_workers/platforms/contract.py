"""What a vendor family offers: `Platform` detects, `Backend` is one live device. Torch-free to import.

Memory is explicit everywhere: device memory or pinned host memory, with a stated alignment. There is no managed memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from ...ipc.conditions import TrimaranError
from ...ipc.facts import DeviceHealth, DeviceProfile, Feature, MemoryFacts
from ...kernels.implementation import Communicator, Kernel
from ..streams.contract import Stream, StreamManager

if TYPE_CHECKING:
    import ctypes

    import torch


class Clause(StrEnum):
    """Optional parts of the contract; a platform that lacks one declines it with a reason."""

    COMPUTE = "compute"
    GRAPH_CAPTURE = "graph_capture"
    STREAM_PRIORITIES = "stream_priorities"
    CONCURRENT_STREAMS = "concurrent_streams"
    EVENTS = "events"
    ASYNC_COPIES = "async_copies"
    PINNED_MEMORY = "pinned_memory"
    MEMORY_ACCOUNTING = "memory_accounting"
    MEMORY_HOLDERS = "memory_holders"
    COLLECTIVES = "collectives"
    HEALTH = "health"


class MemoryKind(StrEnum):
    """Where memory lies."""

    DEVICE = "device"
    PINNED_HOST = "pinned_host"


class FenceScope(StrEnum):
    """What `Backend.synchronize` waits for: the work of the current stream, or all work given to the device."""

    STREAM = "stream"
    DEVICE = "device"


class NotSupported(TrimaranError):
    """The device declines this clause; the text is the reason."""


class FoundDevice(Struct, frozen=True, kw_only=True):
    """One device as detection sees it. `index` is torch's, after the vendor's visibility variable had its say.

    `is_integrated` is True for a small GPU beside the machine's real ones or in its processor, which is used only when
    asked for; where the integrated one is the machine's accelerator by design (Apple, NVIDIA's boards) it is False.
    """

    index: int
    name: str
    uuid: str | None = None
    memory_bytes: int | None = None
    is_integrated: bool = False
    note: str = ""

    def __str__(self) -> str:
        memory = "" if self.memory_bytes is None else f", {self.memory_bytes / (1 << 30):.1f} GiB"
        identity = "" if self.uuid is None else f", {self.uuid}"
        note = f" ({self.note})" if self.note else ""
        return f"device {self.index}: {self.name}{identity}{memory}{note}"


class Found(Struct, frozen=True, kw_only=True):
    """The platform can be used, on these devices in index order.

    `basic_mode` says why kernels made for the hardware stay off and plain PyTorch is used; None: they are on.
    `notes` are lines for the log.
    """

    devices: tuple[FoundDevice, ...]
    basic_mode: str | None = None
    notes: tuple[str, ...] = ()


class Refused(Struct, frozen=True, kw_only=True):
    """It cannot; why, and the cure where there is one. `hardware` names the hardware that is there all the same."""

    reason: str
    hardware: str | None = None


class Look(Struct, frozen=True, kw_only=True):
    """What a quick look at the host shows, without torch: the hardware (None: none), and what keeps it from use."""

    hardware: str | None
    obstacle: str | None = None


class WorkerGroup(Struct, frozen=True, kw_only=True):
    """This worker's place among its peers, and where they meet."""

    rank: int
    num_ranks: int
    generation: int
    run_directory: str
    timeout_s: float


class DeviceMemory(Protocol):
    """Memory that stays until dropped: the last reference to it or to a tensor of it gives it back."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def kind(self) -> MemoryKind: ...

    @property
    def address(self) -> int:
        """Where it begins, as the device counts: a multiple of the alignment asked for."""
        ...

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A view of the beginning. Asserts that it fits."""
        ...


class Graph(Protocol):
    """Recorded work. Its tensors stay at their addresses. `num_launches` is None where the vendor does not say."""

    num_launches: int | None

    def replay(self, num_tokens: int, num_sequences: int, progress: ctypes.c_int64 | None) -> None:
        """Run it, in the current stream. Sizes count only where graphs take any size; others hold those recorded."""
        ...


class Backend(Protocol):
    """One live device. Used by one thread."""

    profile: DeviceProfile
    streams: StreamManager
    graphs_take_any_size: bool
    """Whether one recording replays for every number of tokens up to the recorded one."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def num_threads(self) -> int: ...

    def allocate_memory(self, num_bytes: int, *, kind: MemoryKind, alignment_bytes: int) -> DeviceMemory:
        """Aligned memory, its contents undefined. Raises MemoryError, after which all else stays usable, and
        NotSupported for a kind that does not exist here.
        """
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Copy in the order of the stream. The host may run on before it is done, and must then leave a pinned source
        as it is until an event recorded after the copy is done.
        """
        ...

    def launch(self, kernel: Kernel, tensors: tuple[Any, ...], stream: Stream) -> None:
        """Call a loaded kernel in the order of the stream."""
        ...

    def synchronize(self, scope: FenceScope = FenceScope.DEVICE) -> None:
        """Block until the work is done; what it wrote is then seen by the host and by every stream."""
        ...

    def memory_facts(self) -> MemoryFacts:
        """Read afresh at each call."""
        ...

    def release_cached_memory(self) -> None:
        """Give memory that the allocator keeps for later back to the device: after an exhaustion, fragments go."""
        ...

    def capture_graph(self, run: Callable[[], None]) -> Graph:
        """Record what `run` launches. Every kernel it calls must be capturable and have run once.

        Raises NotSupported when the recording fails or (where the vendor tells) holds nothing; the device stays usable.
        """
        ...

    def communicator(self, group: WorkerGroup) -> Communicator | None:
        """None for a group of one. Blocks until all ranks are there. Raises NotSupported."""
        ...

    def health(self) -> DeviceHealth: ...

    def close(self) -> None: ...


class Platform(Protocol):
    """One vendor family; stateless. Nothing of it imports torch unless `look` found usable hardware."""

    @property
    def name(self) -> str: ...

    @property
    def computes(self) -> bool:
        """False: it has no tensors, and steps are simulated."""
        ...

    @property
    def declines(self) -> Mapping[Clause, str]: ...

    @property
    def visibility(self) -> tuple[str, ...]:
        """Environment variables by which the vendor's driver hides devices, strongest first; empty where none does."""
        ...

    @property
    def software_features(self) -> frozenset[Feature]:
        """What the platform's software gives any of its devices: assumed of one that is declared and not here."""
        ...

    def look(self) -> Look:
        """Quick and without torch: device nodes, libraries, files."""
        ...

    def detect(self) -> Found | Refused: ...

    def profile(self, index: int) -> DeviceProfile: ...

    def busy(self, index: int) -> str | None:
        """None: the device takes work now. Text: what its driver says instead; it may be free later."""
        ...

    def open(self, index: int, *, num_threads: int, cache_dir: Path | None, warn: Callable[[str], None]) -> Backend:
        """Make the device live. May import torch."""
        ...
