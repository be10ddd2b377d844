"""What a vendor family offers: `Platform` detects, `Backend` is one live device. Torch-free to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from ...ipc.conditions import TrimaranError
from ...ipc.facts import DeviceHealth, DeviceProfile, MemoryFacts
from ...kernels.implementation import Communicator
from ..streams.contract import StreamManager

if TYPE_CHECKING:
    import ctypes

    import torch


class Clause(StrEnum):
    """Optional parts of the contract; a platform that lacks one declines it with a reason."""

    COMPUTE = "compute"
    GRAPH_CAPTURE = "graph_capture"
    STREAM_PRIORITIES = "stream_priorities"
    COLLECTIVES = "collectives"
    MEMORY_HOLDERS = "memory_holders"
    HEALTH = "health"


class MemoryKind(StrEnum):
    """Where memory lies."""

    DEVICE = "device"
    PINNED_HOST = "pinned_host"


class NotSupported(TrimaranError):
    """The device declines this clause; the text is the reason."""


class Found(Struct, frozen=True, kw_only=True):
    """The platform can be used; names of its devices in index order."""

    devices: tuple[str, ...]


class Refused(Struct, frozen=True, kw_only=True):
    """It cannot; why, and the cure where there is one."""

    reason: str


class WorkerGroup(Struct, frozen=True, kw_only=True):
    """This worker's place among its peers, and where they meet."""

    rank: int
    num_ranks: int
    generation: int
    run_directory: str
    timeout_s: float


class DeviceMemory(Protocol):
    """Memory that stays until dropped."""

    num_bytes: int

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A view of the beginning. Asserts that it fits."""
        ...


class Graph(Protocol):
    """Recorded work. Its tensors stay at their addresses."""

    num_launches: int

    def replay(self, num_tokens: int, num_sequences: int, progress: ctypes.c_int64 | None) -> None: ...


class Backend(Protocol):
    """One live device. Used by one thread."""

    profile: DeviceProfile
    streams: StreamManager

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def num_threads(self) -> int: ...

    def allocate_memory(self, num_bytes: int, *, kind: MemoryKind, alignment_bytes: int) -> DeviceMemory:
        """Raises MemoryError."""
        ...

    def memory_facts(self) -> MemoryFacts: ...

    def capture_graph(self, run: Callable[[], None]) -> Graph:
        """Record what `run` launches. Every kernel it calls must be capturable. Raises NotSupported."""
        ...

    def communicator(self, group: WorkerGroup) -> Communicator | None:
        """None for a group of one. Blocks until all ranks are there. Raises NotSupported."""
        ...

    def health(self) -> DeviceHealth: ...

    def close(self) -> None: ...


class Platform(Protocol):
    """One vendor family; stateless. `detect` and `profile` import no torch."""

    name: str
    computes: bool
    """False: it has no tensors, and steps are simulated."""
    declines: Mapping[Clause, str]

    def detect(self) -> Found | Refused: ...

    def profile(self, index: int) -> DeviceProfile: ...

    def open(self, index: int, *, num_threads: int, cache_dir: Path | None, warn: Callable[[str], None]) -> Backend:
        """Make the device live. May import torch."""
        ...
