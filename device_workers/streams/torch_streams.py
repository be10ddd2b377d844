"""Streams of an accelerator by its torch module (`Stream`, `Event`, `stream`, `current_stream`), whichever vendor's.

In every such module a lower number is a higher priority, and the default is 0.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from .contract import Event, Stream, StreamPriority

_FALLBACK_RANGE = (0, -1)
"""Least and greatest priority where the module has no `priority_range`: the two that each vendor documents."""


class TorchStream:
    """One of the vendor's queues."""

    def __init__(self, native: Any, priority: StreamPriority) -> None:
        self.native = native
        self.priority = priority


class TorchEvent:
    """A point recorded in a vendor's queue."""

    def __init__(self, native: Any) -> None:
        self.native = native

    def done(self) -> bool:
        return bool(self.native.query())

    def wait_blocking(self) -> None:
        self.native.synchronize()


class TorchStreams:
    """StreamManager of one device; `module` is torch's module of the vendor."""

    def __init__(self, module: Any, index: int) -> None:
        self._module = module
        self._index = index
        ask = getattr(module.Stream, "priority_range", None)
        least, greatest = _FALLBACK_RANGE if ask is None else ask()
        self._numbers = {StreamPriority.LOW: least, StreamPriority.HIGH: greatest}

    def create_stream(self, priority: StreamPriority) -> Stream:
        return TorchStream(self._module.Stream(device=self._index, priority=self._numbers[priority]), priority)

    def current(self) -> Stream:
        native = self._module.current_stream(self._index)
        number = getattr(native, "priority", 0)
        return TorchStream(native, StreamPriority.HIGH if number < 0 else StreamPriority.LOW)

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self._module.stream(stream.native)
        return context

    def record(self, stream: Stream) -> Event:
        event = self._module.Event()
        event.record(stream.native)
        return TorchEvent(event)

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, TorchEvent)
        native: Any = stream.native
        native.wait_event(event.native)

    def synchronize(self, stream: Stream) -> None:
        native: Any = stream.native
        native.synchronize()
