"""Sends a stream's bytes from the batch callback, without a task wake-up per token."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from .asgi import Event, Exchange, Headers

StartTask = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
_LIMIT_BYTES = 1 << 20


class _Rest:
    """An awaitable that was driven once by hand, for a task to drive on."""

    __slots__ = ("_first", "_iterator")

    def __init__(self, iterator: Generator[Any, Any, Any], first: Any) -> None:
        self._iterator, self._first = iterator, first

    def __await__(self) -> Generator[Any, Any, None]:
        yield self._first
        yield from self._iterator


class Pusher:
    """One response's body in pieces, in order: at most one send is in flight, later pieces join while it is.

    The server takes most sends at once; then `push` costs one call. The response starts with the first piece, so that
    an error before it can still have a status of its own. `on_slow` is called when the client reads too slowly: the
    limit of held bytes is passed.
    """

    __slots__ = (
        "_buffer",
        "_buffered_bytes",
        "_exchange",
        "_headers",
        "_on_slow",
        "_send",
        "_start_task",
        "_task",
        "is_started",
    )

    def __init__(
        self, exchange: Exchange, start_task: StartTask, headers: Headers, on_slow: Callable[[], None]
    ) -> None:
        self._exchange = exchange
        self._send = exchange.server_send
        self._start_task = start_task
        self._headers = headers
        self._on_slow = on_slow
        self._buffer: list[bytes] = []
        self._buffered_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self.is_started = False

    def push(self, data: bytes) -> None:
        """Runs per token."""
        if self._task is not None:
            self._hold(data)
        elif self.is_started:
            self._send_now({"type": "http.response.body", "body": data, "more_body": True})
        else:
            self._start(data)

    def _hold(self, data: bytes) -> None:
        self._buffer.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes > _LIMIT_BYTES:
            self._on_slow()

    async def finish(self) -> None:
        """After the last piece: wait until all are taken, then end the response."""
        if self._task is not None:
            await self._task
        with contextlib.suppress(RuntimeError):  # the connection is closed
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def cut(self) -> None:
        """Give up what is held."""
        self._buffer.clear()
        if self._task is not None:
            self._task.cancel()

    def _start(self, data: bytes) -> None:
        self.is_started = True
        self._exchange.begin(200)
        self._send_now({"type": "http.response.start", "status": 200, "headers": self._headers})
        self.push(data)

    def _send_now(self, event: Event) -> None:
        try:
            waiting = self._send(event).__await__()
            for first in waiting:  # not next(): a send that is taken at once ends the loop without an exception
                self._task = self._start_task(self._drain(_Rest(waiting, first)), "send what is held")
                return
        except RuntimeError:  # the connection is closed; whoever watches it ends the request
            return

    def _take(self) -> bytes:
        data = b"".join(self._buffer)
        self._buffer.clear()
        self._buffered_bytes = 0
        return data

    async def _drain(self, rest: _Rest) -> None:
        with contextlib.suppress(RuntimeError):  # the connection is closed
            await rest
            while self._buffer:
                await self._send({"type": "http.response.body", "body": self._take(), "more_body": True})
        self._task = None
