"""Ordered work on a device: streams, events between them. Torch-free.

Ordering comes from events, never from priorities: a device without priorities runs the same program.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Protocol


class StreamPriority(IntEnum):
    """Higher runs first, where the device honours it: computing is HIGH, copies to and from the host are LOW."""

    LOW = 0
    HIGH = 1


class Stream(Protocol):
    """A queue of work; `native` is the vendor's object, or None where work runs at once or in one queue."""

    @property
    def priority(self) -> StreamPriority: ...

    @property
    def native(self) -> object | None: ...


class Event(Protocol):
    """A point in a stream. `wait_blocking` belongs to the step thread."""

    def done(self) -> bool: ...

    def wait_blocking(self) -> None: ...


class StreamManager(Protocol):
    """Creates and orders streams of one device."""

    def create_stream(self, priority: StreamPriority) -> Stream: ...

    def current(self) -> Stream:
        """The stream that torch calls of this thread go to now."""
        ...

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        """Within it, torch calls of this thread go to `stream`."""
        ...

    def record(self, stream: Stream) -> Event: ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Work given to `stream` from now on runs after the event."""
        ...

    def synchronize(self, stream: Stream) -> None:
        """Block until all work of the stream is done."""
        ...
