"""Streams of a device with one queue (Metal's, by torch's module): first in, first out, whatever stream is named."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .contract import Event, Stream, StreamPriority


class QueueStream:
    """A name for the only queue."""

    native = None

    def __init__(self, priority: StreamPriority) -> None:
        self.priority = priority


class QueueEvent:
    """A point in the only queue."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def done(self) -> bool:
        return bool(self._native.query())

    def wait_blocking(self) -> None:
        self._native.synchronize()


class SingleQueue:
    """StreamManager of such a device. Order between streams is the order of the calls, so `wait` has nothing to do."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def create_stream(self, priority: StreamPriority) -> Stream:
        return QueueStream(priority)

    def current(self) -> Stream:
        return QueueStream(StreamPriority.HIGH)

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self, stream: Stream) -> Event:
        event = self._module.Event()
        event.record()
        return QueueEvent(event)

    def wait(self, stream: Stream, event: Event) -> None:
        return None

    def synchronize(self, stream: Stream) -> None:
        self._module.synchronize()
