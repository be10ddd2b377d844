"""A response of server-sent events, written from the batch callback."""

import asyncio
from enum import Enum, auto

from .asgi import Exchange, Headers
from .errors import INTERNAL_ERROR, api_error
from .pusher import Pusher, StartTask

_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"


class StreamEnd(Enum):
    """How a stream ended."""

    COMPLETE = auto()
    FAILED = auto()
    CLIENT_LEFT = auto()
    READER_TOO_SLOW = auto()


class EventStream:
    """Events go in from the batch callback by `write`; the request's task waits for `ended`."""

    def __init__(self, exchange: Exchange, start_task: StartTask) -> None:
        self._pusher = Pusher(exchange, start_task, [*_HEADERS, *exchange.headers], self._reader_is_slow)
        self.write = self._pusher.push  # whole events; runs per token, hence without a call between
        self._ended: asyncio.Future[StreamEnd] = asyncio.get_running_loop().create_future()
        self.error: Exception | None = None

    @property
    def is_started(self) -> bool:
        """The status has been sent; errors now travel as events."""
        return self._pusher.is_started

    def _reader_is_slow(self) -> None:
        self.end(StreamEnd.READER_TOO_SLOW)

    def fail(self, error: Exception) -> None:
        """One error event, if the stream has begun, and the end."""
        if self._ended.done():
            return
        self.error = error
        if self.is_started:
            self.write(b"data: " + (api_error(error) or INTERNAL_ERROR).body() + b"\n\n")
        self.end(StreamEnd.FAILED)

    def end(self, how: StreamEnd) -> None:
        """The first end counts."""
        if not self._ended.done():
            self._ended.set_result(how)

    async def ended(self) -> StreamEnd:
        """How it ended. Raises the error of a stream that failed before it began."""
        how = await self._ended
        if self.error is not None and not self.is_started:
            raise self.error
        if how in (StreamEnd.COMPLETE, StreamEnd.FAILED):
            await self._pusher.finish()
        else:
            self._pusher.cut()
        return how
