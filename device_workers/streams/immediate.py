"""Streams of a device that runs every operation before the call returns: first in, first out, always done."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from .contract import Event, Stream, StreamPriority


class ImmediateStream:
    """Work given to it is done when the call returns."""

    native = None

    def __init__(self, priority: StreamPriority) -> None:
        self.priority = priority


class PastEvent:
    """An event that has happened."""

    def done(self) -> bool:
        return True

    def wait_blocking(self) -> None:
        return None


class ImmediateStreams:
    """StreamManager of such a device."""

    def create_stream(self, priority: StreamPriority) -> Stream:
        return ImmediateStream(priority)

    def current(self) -> Stream:
        return ImmediateStream(StreamPriority.HIGH)

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self, stream: Stream) -> Event:
        return PastEvent()

    def wait(self, stream: Stream, event: Event) -> None:
        return None

    def synchronize(self, stream: Stream) -> None:
        return None
