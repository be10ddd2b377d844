"""A sound platform whose streams are queues of their own: the example device with everything that it declines.

Copies and launches are done later, by a thread of each stream; recordings hold every operation of PyTorch. The broken
platforms are this one with one thing wrong.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from trimaran_example.platform import ExampleBackend, ExamplePlatform

from trimaran.device_workers.memory.memory_pool import MemoryPool
from trimaran.device_workers.platforms.contract import (
    Clause,
    DeviceMemory,
    FenceScope,
    MemoryKind,
    NotSupported,
)
from trimaran.device_workers.streams.contract import StreamPriority
from trimaran.ipc.facts import DeviceHealth, DeviceProfile, MemoryFacts
from trimaran.kernels.implementation import Kernel

Work = Callable[[], object]


class Lane:
    """A stream: work done one after the other, later."""

    def __init__(self, priority: StreamPriority, num_threads: int = 1) -> None:
        self.priority = priority
        self.native = object()
        self._threads = ThreadPoolExecutor(num_threads)
        self._given: list[Future[Any]] = []

    def give(self, work: Work) -> "Future[Any]":
        def run() -> None:
            with torch.inference_mode():
                work()

        future = self._threads.submit(run)
        self._given = [*(known for known in self._given if not known.done()), future]
        return future

    def finish(self) -> None:
        for future in self._given:
            future.result()


class FirstLane(Lane):
    """The stream that torch's own calls go to: done at once."""

    def __init__(self) -> None:
        super().__init__(StreamPriority.HIGH)

    def give(self, work: Work) -> "Future[Any]":
        work()
        future: Future[Any] = Future()
        future.set_result(None)
        return future


class LaneEvent:
    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait_blocking(self) -> None:
        self._future.result()


class Lanes:
    """StreamManager of lanes. Torch's calls within `use` run once the lane is empty, so that order is kept."""

    def __init__(self) -> None:
        self.first = FirstLane()
        self.all: list[Lane] = [self.first]
        self._current: list[Lane] = [self.first]

    def create_stream(self, priority: StreamPriority) -> Lane:
        self.all.append(Lane(priority))
        return self.all[-1]

    def current(self) -> Lane:
        return self._current[-1]

    @contextmanager
    def use(self, stream: Lane) -> Iterator[None]:
        stream.finish()
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def record(self, stream: Lane) -> LaneEvent:
        return LaneEvent(stream.give(lambda: None))

    def wait(self, stream: Lane, event: LaneEvent) -> None:
        stream.give(event.wait_blocking)

    def synchronize(self, stream: Lane) -> None:
        stream.finish()


class Tape(TorchDispatchMode):
    """Every operation of PyTorch that runs under it, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, int | float):
            raise NotSupported("the host reads a number")
        self.entries.append((func, args, kwargs or {}, result))
        return result


class TapeGraph:
    """Plays a tape again, on whatever its tensors hold by then."""

    num_launches: int | None = None

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def replay(self, num_tokens: int, num_sequences: int, progress: Any) -> None:
        made: dict[int, Any] = {}

        def current(value: Any) -> Any:
            return made.get(id(value), value)

        for func, args, kwargs, was in self._tape.entries:
            now = func(*tree_map(current, args), **tree_map(current, kwargs))
            olds, news = ([item] if isinstance(item, torch.Tensor) else item or [] for item in (was, now))
            made |= {id(old): new for old, new in zip(olds, news, strict=True)}


def host_bytes(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


class QueuedBackend(ExampleBackend):
    """The example device, live, with lanes, pinned memory and tapes."""

    def __init__(self, profile: DeviceProfile, num_threads: int) -> None:
        super().__init__(profile, num_threads)
        self.streams: Any = Lanes()
        self._pinned = MemoryPool({MemoryKind.PINNED_HOST: host_bytes}, {}, self.release_cached_memory)

    def allocate_memory(self, num_bytes: int, *, kind: MemoryKind, alignment_bytes: int) -> DeviceMemory:
        if kind is MemoryKind.PINNED_HOST:
            memory = self._pinned.allocate(num_bytes, kind, alignment_bytes)
            memory.tensor((0,), torch.uint8).untyped_storage().is_pinned_here = True  # type: ignore[attr-defined]
            return memory
        return super().allocate_memory(num_bytes, kind=kind, alignment_bytes=alignment_bytes)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        is_pinned = hasattr(source.untyped_storage(), "is_pinned_here")
        if source.device.type == "cpu" and not is_pinned:
            source = source.clone()  # the caller may change it at once
        stream.give(lambda: target.copy_(source))

    def launch(self, kernel: Kernel, tensors: tuple[Any, ...], stream: Any) -> None:
        stream.give(lambda: kernel(*tensors))

    def synchronize(self, scope: FenceScope = FenceScope.DEVICE) -> None:
        for lane in self.streams.all if scope is FenceScope.DEVICE else [self.streams.current()]:
            lane.finish()

    def memory_facts(self) -> MemoryFacts:
        facts = super().memory_facts()
        pinned = self._pinned.held_bytes(MemoryKind.PINNED_HOST)
        return replace(facts, by_kind={**facts.by_kind, MemoryKind.PINNED_HOST: pinned})

    def capture_graph(self, run: Callable[[], None]) -> Any:
        tape = Tape()
        try:
            with tape:
                run()
        except RuntimeError as error:
            raise NotSupported(f"the recording failed: {error}") from error
        if not tape.entries:
            raise NotSupported("nothing was launched")
        return TapeGraph(tape)

    def health(self) -> DeviceHealth:
        return DeviceHealth(clocks={"core": 1400.0}, temperature=55.0, compute_utilization=0.5)


class QueuedPlatform(ExamplePlatform):
    """Sound."""

    name = "queued"
    backend = QueuedBackend
    declines: Mapping[Clause, str] = {
        Clause.STREAM_PRIORITIES: "threads have no priorities here",
        Clause.MEMORY_HOLDERS: ExamplePlatform.declines[Clause.MEMORY_HOLDERS],
        Clause.COLLECTIVES: ExamplePlatform.declines[Clause.COLLECTIVES],
    }

    def open(
        self, index: int, *, num_threads: int, cache_dir: Path | None, warn: Callable[[str], None]
    ) -> ExampleBackend:
        return self.backend(self.profile(index), num_threads)
