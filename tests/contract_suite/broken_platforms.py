"""Platforms with one thing wrong each, and the words in which the suite must say so."""

import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from trimaran_example import device
from trimaran_example.platform import ExampleBackend, ExampleMemory

from trimaran.device_workers.platforms.contract import (
    Clause,
    DeviceMemory,
    FenceScope,
    Found,
    FoundDevice,
    MemoryKind,
    NotSupported,
    Refused,
    WorkerGroup,
)
from trimaran.device_workers.platforms.cpu import CpuBackend, CpuPlatform
from trimaran.device_workers.streams.contract import StreamPriority
from trimaran.ipc.facts import DeviceHealth, MemoryFacts
from trimaran.kernels.implementation import Communicator, DeclaredImplementation, FunctionKernel, KernelMetadata

from .queued_platform import Lane, LaneEvent, Lanes, QueuedBackend, QueuedPlatform, Tape, TapeGraph, Work


class Expected(NamedTuple):
    """Which clause must be named, and with which words."""

    clause: str
    words: str


class Careless(QueuedBackend):
    """Aligns to 16 bytes, whatever is asked."""

    def allocate_memory(self, num_bytes: int, *, kind: MemoryKind, alignment_bytes: int) -> DeviceMemory:
        if kind is not MemoryKind.DEVICE or num_bytes > device.TOTAL_BYTES:
            return super().allocate_memory(num_bytes, kind=kind, alignment_bytes=alignment_bytes)
        memory = super().allocate_memory(num_bytes + 16, kind=kind, alignment_bytes=4096)
        assert isinstance(memory, ExampleMemory)
        return ExampleMemory(memory._shadow[16 : 16 + num_bytes])


class CrowdedLane(Lane):
    """Has several threads, and begins every other piece of work late, so that the next one overtakes it."""

    def __init__(self, priority: StreamPriority) -> None:
        super().__init__(priority, num_threads=4)
        self._numbers = itertools.count()

    def give(self, work: Work) -> "Future[Any]":
        pause_s = 0.0 if next(self._numbers) % 2 else 0.002

        def run() -> None:
            time.sleep(pause_s)
            work()

        return super().give(run)


class CrowdedLanes(Lanes):
    def create_stream(self, priority: StreamPriority) -> Lane:
        self.all.append(CrowdedLane(priority))
        return self.all[-1]


class Unordered(QueuedBackend):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.streams = CrowdedLanes()


class EarlyEvent(LaneEvent):
    def done(self) -> bool:
        return True


class EarlyLanes(Lanes):
    def record(self, stream: Lane) -> LaneEvent:
        return EarlyEvent(stream.give(lambda: None))


class Early(QueuedBackend):
    """Its events are done as soon as they are recorded."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.streams = EarlyLanes()


class DeafLanes(Lanes):
    def wait(self, stream: Lane, event: LaneEvent) -> None: ...


class Deaf(QueuedBackend):
    """Its streams do not wait for events of others."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.streams = DeafLanes()


class Silent(QueuedBackend):
    """Recordings succeed and hold nothing."""

    def capture_graph(self, run: Callable[[], None]) -> Any:
        super().capture_graph(run)
        return TapeGraph(Tape())


class Stale(QueuedBackend):
    """Recordings keep the inputs as they were."""

    def capture_graph(self, run: Callable[[], None]) -> Any:
        graph = super().capture_graph(run)
        tape = graph._tape
        made = {id(entry[3]) for entry in tape.entries}

        def kept(value: Any) -> Any:
            is_input = isinstance(value, torch.Tensor) and id(value) not in made
            return value.clone() if is_input else value

        tape.entries = [(func, tuple(map(kept, args)), kwargs, was) for func, args, kwargs, was in tape.entries]
        return graph


class Brittle(QueuedBackend):
    """What cannot be recorded ends in whatever happens."""

    def capture_graph(self, run: Callable[[], None]) -> Any:
        try:
            return super().capture_graph(run)
        except NotSupported as error:
            raise RuntimeError("capture failed with status 901") from error


class Leaking(QueuedBackend):
    """Memory that is released is kept for ever."""

    kept: list[DeviceMemory] = []

    def allocate_memory(self, num_bytes: int, *, kind: MemoryKind, alignment_bytes: int) -> DeviceMemory:
        self.kept.append(super().allocate_memory(num_bytes, kind=kind, alignment_bytes=alignment_bytes))
        return self.kept[-1]


class Forgetful(QueuedBackend):
    """Memory is used again, and the figures only grow."""

    taken_bytes = 0

    def allocate_memory(self, num_bytes: int, *, kind: MemoryKind, alignment_bytes: int) -> DeviceMemory:
        memory = super().allocate_memory(num_bytes, kind=kind, alignment_bytes=alignment_bytes)
        self.taken_bytes += num_bytes
        return memory

    def memory_facts(self) -> MemoryFacts:
        taken = min(self.taken_bytes, device.TOTAL_BYTES)
        return MemoryFacts(
            total_bytes=device.TOTAL_BYTES,
            free_bytes=device.TOTAL_BYTES - taken,
            ours_bytes=taken,
            by_kind={MemoryKind.DEVICE: taken},
        )


class Rough(QueuedBackend):
    """Exhaustion comes in the driver's own words."""

    def allocate_memory(self, num_bytes: int, *, kind: MemoryKind, alignment_bytes: int) -> DeviceMemory:
        device.check_room(num_bytes)
        return super().allocate_memory(num_bytes, kind=kind, alignment_bytes=alignment_bytes)


class Poisoned(QueuedBackend):
    """After one exhaustion nothing can be had any more."""

    is_poisoned = False

    def allocate_memory(self, num_bytes: int, *, kind: MemoryKind, alignment_bytes: int) -> DeviceMemory:
        if self.is_poisoned:
            raise MemoryError("the device was lost")
        try:
            return super().allocate_memory(num_bytes, kind=kind, alignment_bytes=alignment_bytes)
        except MemoryError:
            self.is_poisoned = True
            raise


class Truncating(QueuedBackend):
    """Copies the first row of a view only."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        cut = slice(0, 1) if target.dim() > 1 else slice(None)
        super().copy(target[cut], source[cut], stream)


class Hasty(QueuedBackend):
    """Copies at once, whatever the stream still has to do."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        target.copy_(source)


class HalfFenced(QueuedBackend):
    """A fence of the device waits for the current stream only."""

    def synchronize(self, scope: FenceScope = FenceScope.DEVICE) -> None:
        super().synchronize(FenceScope.STREAM)


class Hot(QueuedBackend):
    """Tells utilisation in percent."""

    def health(self) -> DeviceHealth:
        return DeviceHealth(compute_utilization=87.0)


class WrongMath(ExampleBackend):
    """The device's reciprocal square root is a little off, so that even plain PyTorch is wrong on it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        run = device._run

        def off(operation: Any, *args: Any, **kwargs: Any) -> Any:
            result = run(operation, *args, **kwargs)
            if operation.name().startswith("aten::rsqrt"):
                device.shadow_of(result).mul_(1.001)
            return result

        device._aten.impl("rsqrt", lambda *args: off(torch.ops.aten.rsqrt.default, *args), "PrivateUse1")


class WrongSum(CpuBackend):
    """The second rank's part is added twice."""

    def communicator(self, group: WorkerGroup) -> Communicator | None:
        honest = super().communicator(group)
        return None if honest is None else _Doubling(honest)


class _Doubling:
    def __init__(self, honest: Communicator) -> None:
        self._honest = honest
        self.rank, self.num_ranks = honest.rank, honest.num_ranks

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if self.rank == 1:
            tensor.mul_(2)
        self._honest.all_reduce(tensor)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._honest.all_gather(out, tensor)


class Moody(QueuedPlatform):
    """Finds another device each time."""

    seen = itertools.count()

    def detect(self) -> Found | Refused:
        return Found(devices=(FoundDevice(index=0, name=f"Example {next(self.seen)}"),))


class Mute(QueuedPlatform):
    """Is refused, and does not say why."""

    def detect(self) -> Found | Refused:
        return Refused(reason=" ")


class Curt(QueuedPlatform):
    """Declines with a shrug."""

    declines: Mapping[Clause, str] = QueuedPlatform.declines | {Clause.HEALTH: "no"}


class WrongSums(CpuPlatform):
    def open(self, index: int, *, num_threads: int, cache_dir: Any, warn: Any) -> CpuBackend:
        return WrongSum(self.profile(index), self.host, num_threads, cache_dir, warn)


_BACKENDS: dict[str, tuple[type[ExampleBackend], Expected]] = {
    "careless": (
        Careless,
        Expected("memory.alignment", "asked for 64 bytes, got an address that is a multiple of 16 only"),
    ),
    "unordered": (Unordered, Expected("copies.order", "a stream did not keep order")),
    "early": (Early, Expected("events.not_early", "an event said it was done before the work")),
    "deaf": (Deaf, Expected("streams.order_by_events", "ran before that stream's work")),
    "silent": (Silent, Expected("graph_capture.replay", "a replay left its output as it was")),
    "stale": (Stale, Expected("graph_capture.replay", "computed with the inputs of the recording")),
    "brittle": (Brittle, Expected("graph_capture.refusal", "the contract says NotSupported")),
    "leaking": (Leaking, Expected("memory.reuse", "were taken and released, then there were none left")),
    "forgetful": (Forgetful, Expected("memory.accounting", "memory that nobody holds still counts")),
    "rough": (Rough, Expected("memory.exhaustion", "raised RuntimeError: example: out of memory")),
    "poisoned": (Poisoned, Expected("memory.exhaustion", "MemoryError: the device was lost")),
    "truncating": (Truncating, Expected("copies.partial_views", "rows, from device to device")),
    "hasty": (Hasty, Expected("copies.after_long_work", "a copy ran before the kernel")),
    "half_fenced": (HalfFenced, Expected("fences.device", "returned before a stream's work was done")),
    "hot": (Hot, Expected("health.plausible", "its compute utilization is 87.0: shares are 0 to 1")),
    "wrong_math": (
        WrongMath,
        Expected("kernels.agree", "plain_rms_norm on float32, 6 heads on 2 of size 64, blocks of 16: rms_norm dis"),
    ),
}
_PLATFORMS: dict[str, tuple[type, Expected]] = {
    "moody": (Moody, Expected("detection.stateless", "the first said found device 0: Example")),
    "mute": (Mute, Expected("detection.usable", "it was refused without a reason")),
    "curt": (Curt, Expected("declines.reasons", "health is declined without a reason")),
    "wrong_sum": (WrongSums, Expected("collectives.two_ranks", "says: all_reduce of")),
}
BROKEN: dict[str, Expected] = {name: expected for name, (_, expected) in {**_BACKENDS, **_PLATFORMS}.items()}


def make(name: str) -> Any:
    """The platform of this name."""
    if name in _PLATFORMS:
        platform = _PLATFORMS[name][0]()
    else:
        platform = QueuedPlatform()
        platform.backend = _BACKENDS[name][0]
    platform.name = name
    return platform


def __getattr__(name: str) -> Any:
    """`make_NAME`, for entry points."""
    if name.removeprefix("make_") in BROKEN:
        return lambda: make(name.removeprefix("make_"))
    raise AttributeError(name)


def _hasty_norm(*_: Any) -> FunctionKernel:
    return FunctionKernel(lambda out, x, weight, eps: out.copy_(x * weight))


WRONG_KERNELS = (
    DeclaredImplementation(
        name="hasty_rms_norm",
        kernel="rms_norm",
        loader=_hasty_norm,
        metadata=KernelMetadata(platforms=frozenset({"queued"})),
    ),
)
"""A norm that forgets to divide: the suite names it, and the registry serves the next one."""
