"""Copies: all of the numbers, no others, in the order of their stream."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..platforms.contract import Clause, MemoryKind
from ..streams.contract import StreamPriority
from .judgement import clause, demand
from .subject import Subject, until_done

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8, torch.bool)
Cut = Callable[[torch.Tensor], torch.Tensor]
_SIZES = (1, 3, 1000, 65_537)


def _numbers(size: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 120, (size,), generator=generator).to(dtype)


@clause("copies.contents")
def test_there_and_back(subject: Subject) -> None:
    """Through the device and a second place on it."""
    stream = subject.streams.create_stream(StreamPriority.LOW)
    for dtype in _DTYPES:
        for size in _SIZES:
            source = _numbers(size, dtype)
            first, second = (torch.empty(size, dtype=dtype, device=subject.device) for _ in range(2))
            back = torch.empty(size, dtype=dtype)
            subject.backend.synchronize()
            for target, origin in ((first, source), (second, first), (back, second)):
                subject.backend.copy(target, origin, stream)
            subject.streams.synchronize(stream)
            demand(torch.equal(back, source), f"{size} numbers of {dtype} came back changed from the device")


@clause("copies.partial_views")
def test_partial_views(subject: Subject) -> None:
    """Rows, columns, steps and transposed views, on either side: what lies beside them stays."""
    stream = subject.streams.current()
    cuts: dict[str, Cut] = {
        "rows": lambda t: t[3:7],
        "columns": lambda t: t[:, 2:9],
        "every third column": lambda t: t[:, ::3],
        "one element": lambda t: t[5, 5:6],
        "a transposed corner": lambda t: t[1:5, 4:12].t(),
    }
    whole = _numbers(12 * 16).view(12, 16)
    for name, cut in cuts.items():
        expected, target = torch.full((12, 16), -1.0), subject.put(torch.full((12, 16), -1.0))
        cut(expected).copy_(cut(whole))
        subject.backend.copy(cut(target), cut(subject.put(whole)), stream)
        _same(subject.read(target), expected, f"{name}, from device to device")
        target.fill_(-1)
        subject.backend.copy(cut(target), cut(whole), stream)
        _same(subject.read(target), expected, f"{name}, from host to device")
        host = torch.full((12, 16), -1.0)
        subject.backend.copy(cut(host), cut(subject.put(whole)), stream)
        subject.backend.synchronize()
        _same(host, expected, f"{name}, from device to host")


def _same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    demand(torch.equal(got, expected), f"{what}: {int((got != expected).sum())} of {got.numel()} numbers are wrong")


@clause("copies.order")
def test_copies_run_in_order(subject: Subject) -> None:
    """The same places are written and read over and over, in one stream, by copies and by kernels between them."""
    stream = subject.streams.create_stream(StreamPriority.HIGH)
    size, num_rounds = 1 << 16, 24
    sources = [_numbers(size, seed=number) for number in range(num_rounds)]
    on_device = [subject.put(source) for source in sources]
    place = subject.put(torch.zeros(size))
    seen = [subject.put(torch.zeros(size)) for _ in sources]
    subject.backend.synchronize()
    for number, (source, target) in enumerate(zip(on_device, seen, strict=True)):
        subject.backend.copy(place, source, stream)
        if number % 2:
            subject.launch(lambda place: place.add_(1), place, stream=stream)
        subject.backend.copy(target, place, stream)
    subject.streams.synchronize(stream)
    for number, (source, target) in enumerate(zip(sources, seen, strict=True)):
        is_right = torch.equal(subject.read(target), source + number % 2)
        demand(is_right, f"round {number} of {num_rounds} saw the numbers of another one: a stream did not keep order")


@clause("copies.after_long_work")
def test_a_copy_waits_for_the_work_before_it(subject: Subject) -> None:
    stream = subject.streams.create_stream(StreamPriority.HIGH)
    place, host = subject.put(torch.zeros(1000)), torch.zeros(1000)
    subject.start_long_work(stream, place, 5)
    subject.backend.copy(host, place, stream)
    subject.streams.synchronize(stream)
    demand(bool((host == 5).all()), "a copy ran before the kernel that was given to its stream first")


@clause("copies.pageable_source")
def test_ordinary_memory_is_free_when_the_call_returns(subject: Subject) -> None:
    """Only a pinned source must be left as it is until an event."""
    stream = subject.streams.create_stream(StreamPriority.LOW)
    for size in (16, 1000, 1 << 20):
        source, target = torch.full((size,), 4.0), subject.put(torch.zeros(size))
        subject.backend.copy(target, source, stream)
        source.fill_(-9)
        subject.streams.synchronize(stream)
        demand(bool((subject.read(target) == 4).all()), "a copy from ordinary memory read it after its call returned")


@clause("copies.pinned", Clause.PINNED_MEMORY)
def test_pinned_memory_both_ways(subject: Subject) -> None:
    stream = subject.streams.create_stream(StreamPriority.LOW)
    for size in _SIZES:
        up, down = (subject.take(4 * size, kind=MemoryKind.PINNED_HOST).tensor((size,), torch.float32) for _ in "ud")
        demand(up.device.type == "cpu", f"pinned memory is on {up.device}")
        target = subject.put(torch.zeros(size))
        source = _numbers(size)
        up.copy_(source)
        subject.backend.copy(target, up, stream)
        subject.backend.copy(down, target, stream)
        event = subject.streams.record(stream)
        event.wait_blocking()
        demand(torch.equal(down, source), f"{size} numbers came back changed by way of pinned memory")
        up.fill_(-9)
        _same(subject.read(target), source, "once its event was done, a copy still read its pinned source")


@clause("copies.asynchronous", Clause.ASYNC_COPIES, Clause.PINNED_MEMORY, Clause.EVENTS)
def test_the_host_runs_on(subject: Subject) -> None:
    """At least once of several times a large copy from pinned memory is still under way when its call returns."""
    size = 128 << 20
    source = subject.take(size, kind=MemoryKind.PINNED_HOST).tensor((size,), torch.uint8)
    target = subject.take(size).tensor((size,), torch.uint8)
    stream, ran_on = subject.streams.create_stream(StreamPriority.LOW), False
    for _ in range(5):
        subject.backend.copy(target, source, stream)
        event = subject.streams.record(stream)
        ran_on = ran_on or not event.done()
        demand(until_done(event), "the event after a copy was not done in a minute")
    demand(ran_on, f"{size} bytes were copied before the call returned, five times; decline {Clause.ASYNC_COPIES}")
