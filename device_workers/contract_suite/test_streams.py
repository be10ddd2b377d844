"""Streams and events: order is what events say, an event is never early, fences wait for all they name."""

from __future__ import annotations

import time

import pytest
import torch

from ..platforms.contract import Clause, FenceScope
from ..streams.contract import Stream, StreamPriority
from .judgement import clause, demand
from .subject import Subject, until_done

_NUMBERS = 4096
_LARGE, _CROWD = 4096, 20
_WAITS, _ACTS = 0.1, 0.8
"""Shares: of a crowd's time that a wait must be to be one; of a low stream's wait that a high one's may be."""


def _both(subject: Subject) -> tuple[Stream, Stream]:
    return subject.streams.create_stream(StreamPriority.HIGH), subject.streams.create_stream(StreamPriority.LOW)


def _all(numbers: torch.Tensor, value: float) -> bool:
    return bool((numbers == value).all())


@clause("streams.priorities_kept")
def test_streams_remember_their_priority(subject: Subject) -> None:
    for priority in StreamPriority:
        kept = subject.streams.create_stream(priority).priority
        demand(kept is priority, f"a stream of priority {priority.name} says {StreamPriority(kept).name}")


@clause("streams.order_by_events", Clause.EVENTS)
def test_events_order_streams(subject: Subject) -> None:
    """One stream writes for long, the other waits for its event and reads."""
    writer, reader = _both(subject)
    place, copy = subject.put(torch.zeros(_NUMBERS)), subject.put(torch.zeros(_NUMBERS))
    for value in (1.0, 2.0, 3.0):
        subject.start_long_work(writer, place, value)
        event = subject.streams.record(writer)
        subject.streams.wait(reader, event)
        subject.backend.copy(copy, place, reader)
        subject.streams.synchronize(reader)
        found = subject.seen_elsewhere(copy)
        demand(_all(found, value), "work that waits for an event of another stream ran before that stream's work")


@clause("streams.order_back", Clause.EVENTS)
def test_events_hold_a_writer_back(subject: Subject) -> None:
    """The reader is the slow one: what it reads must not be overwritten before."""
    reader, writer = _both(subject)
    place, copy, idle = (subject.put(torch.full((_NUMBERS,), value)) for value in (1.0, 0.0, 0.0))
    subject.start_long_work(reader, idle, 1)
    subject.backend.copy(copy, place, reader)
    subject.streams.wait(writer, subject.streams.record(reader))
    subject.launch(lambda place: place.fill_(2), place, stream=writer)
    subject.streams.synchronize(writer)
    demand(_all(subject.read(copy), 1), "work that waits for an event overwrote what the work before that event reads")


@clause("events.not_early", Clause.EVENTS)
def test_an_event_is_not_done_before_its_work(subject: Subject) -> None:
    """Polled at once and until it is done: what it stands for is then seen by all."""
    worker, _ = _both(subject)
    for value in (1.0, 2.0, 3.0):
        place = subject.put(torch.zeros(_NUMBERS))
        subject.start_long_work(worker, place, value)
        event = subject.streams.record(worker)
        demand(until_done(event), "an event was not done a minute after a sixth of a second of work")
        found = subject.seen_elsewhere(place)
        demand(_all(found, value), "an event said it was done before the work that was given to its stream")
    copied = subject.put(torch.zeros(_NUMBERS))
    subject.backend.copy(copied, torch.full((_NUMBERS,), 4.0), worker)
    event = subject.streams.record(worker)
    demand(until_done(event), "an event was not done a minute after a small copy")
    demand(_all(subject.seen_elsewhere(copied), 4), "an event said it was done before the copy in its stream")


@clause("events.wait_blocking", Clause.EVENTS)
def test_waiting_for_an_event(subject: Subject) -> None:
    worker, _ = _both(subject)
    place = subject.put(torch.zeros(_NUMBERS))
    subject.start_long_work(worker, place, 6)
    event = subject.streams.record(worker)
    event.wait_blocking()
    demand(event.done(), "an event is not done after wait_blocking")
    demand(_all(subject.seen_elsewhere(place), 6), "wait_blocking returned before the work of its stream was done")


@clause("streams.current")
def test_the_current_stream(subject: Subject) -> None:
    """Within `use`, torch calls go to that stream; after it, to the one before."""
    worker, _ = _both(subject)
    place = subject.put(torch.zeros(_NUMBERS))
    before = subject.streams.current()
    with subject.streams.use(worker):
        inside = subject.streams.current()
        place.add_(1)
    subject.streams.synchronize(worker)
    demand(_all(subject.seen_elsewhere(place), 1), "torch calls within `use` did not go to that stream")
    demand(inside.native == worker.native, "within `use`, the current stream is another one")
    demand(subject.streams.current().native == before.native, "after `use`, the current stream is another one")


@clause("fences.stream")
def test_a_fence_of_the_current_stream(subject: Subject) -> None:
    worker, _ = _both(subject)
    place = subject.put(torch.zeros(_NUMBERS))
    subject.start_long_work(worker, place, 3)
    with subject.streams.use(worker):
        subject.backend.synchronize(FenceScope.STREAM)
    demand(_all(subject.seen_elsewhere(place), 3), "a fence of the current stream returned before its work was done")


@clause("fences.device")
def test_a_fence_of_the_device(subject: Subject) -> None:
    """Waits for every stream, whichever is the current one."""
    streams = _both(subject)
    places = [subject.put(torch.zeros(_NUMBERS)) for _ in streams]
    for stream, place in zip(streams, places, strict=True):
        subject.start_long_work(stream, place, 8)
    subject.backend.synchronize(FenceScope.DEVICE)
    for place in places:
        demand(_all(subject.seen_elsewhere(place), 8), "a fence of the device returned before a stream's work was done")


@clause("streams.concurrent", Clause.CONCURRENT_STREAMS, Clause.EVENTS)
def test_streams_run_side_by_side(subject: Subject) -> None:
    """At least once of several times short work on one stream is done while long work on another one is not."""
    for _ in range(6):
        busy, free = _both(subject)
        places = [subject.put(torch.zeros(_NUMBERS)) for _ in "ab"]
        subject.start_long_work(busy, places[0], 1)
        behind = subject.streams.record(busy)
        subject.launch(lambda place: place.fill_(1), places[1], stream=free)
        subject.streams.synchronize(free)
        if not behind.done():
            subject.backend.synchronize()
            return
    demand(False, f"short work never passed long work on another stream; decline {Clause.CONCURRENT_STREAMS}")


@clause("streams.priorities_act", Clause.STREAM_PRIORITIES, Clause.CONCURRENT_STREAMS)
def test_high_priority_goes_first(subject: Subject) -> None:
    """Short work behind a crowd that fills the device: on a high stream it waits less than on a low one."""
    large = torch.ones(_LARGE, _LARGE, device=subject.device)
    crowd_s = min(_crowd_s(subject, large) for _ in range(3))
    waits = {priority: min(_wait_s(subject, large, priority) for _ in range(7)) for priority in StreamPriority}
    high, low = waits[StreamPriority.HIGH], waits[StreamPriority.LOW]
    if low < _WAITS * crowd_s:
        pytest.skip("short work does not wait for a crowd on another stream, so priorities cannot be told apart")
    text = f"behind low work, a high stream waits {high * 1e3:.1f} ms and a low one {low * 1e3:.1f} ms"
    demand(high <= _ACTS * low, f"{text}; decline {Clause.STREAM_PRIORITIES}")


def _crowd_s(subject: Subject, large: torch.Tensor) -> float:
    began_s = time.perf_counter()
    _crowd(large)
    subject.backend.synchronize()
    return time.perf_counter() - began_s


def _crowd(large: torch.Tensor) -> None:
    for _ in range(_CROWD):
        torch.mm(large, large)


def _wait_s(subject: Subject, large: torch.Tensor, priority: StreamPriority) -> float:
    crowd, stream = subject.streams.create_stream(StreamPriority.LOW), subject.streams.create_stream(priority)
    place = subject.put(torch.zeros(_NUMBERS))
    subject.launch(_crowd, large, stream=crowd)
    began_s = time.perf_counter()
    subject.launch(lambda place: place.fill_(1), place, stream=stream)
    subject.streams.synchronize(stream)
    waited_s = time.perf_counter() - began_s
    subject.backend.synchronize()
    return waited_s
