"""Ordered work on a device: streams, events between them. Torch-free.

Ordering comes from events, never from priorities: a device without priorities runs the same program.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol


class StreamPriority(IntEnum):
    """Higher runs first, where the device honours it."""

    LOW = 0
    HIGH = 1


class Stream(Protocol):
    """A queue of work; `native` is the vendor's object, or None where work runs at once."""

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

    def record(self, stream: Stream) -> Event: ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Work given to `stream` from now on runs after the event."""
        ...

    def synchronize(self, stream: Stream) -> None:
        """Block until all work of the stream is done."""
        ...
