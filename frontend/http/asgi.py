"""The shapes of ASGI, and reading a request's head and body within limits."""

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from .errors import ApiError

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_STALLED_BODY_S = 30.0


class ClientLeft(Exception):
    """The client closed the connection; nobody reads an answer."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that lower-case name."""
    for found, value in scope["headers"]:
        if found == name:
            return bytes(value)
    return None


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes | bytearray:
    """The whole body. Raises ApiError 413 beyond the limit, 408 when it stalls, 400 when it breaks off."""
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    body = bytearray()  # one block, which goes back to the system whole; many small ones would not
    while True:
        try:
            async with asyncio.timeout(_STALLED_BODY_S):
                event = await receive()
        except TimeoutError:
            raise ApiError(408, f"the request's body stalled for {_STALLED_BODY_S:g} s; send it again") from None
        if event["type"] == "http.disconnect":  # a client that only broke its body off can still read an answer
            raise ApiError(400, "the request's body broke off or its chunks are malformed; send it again")
        piece: bytes = event.get("body", b"")
        if len(body) + len(piece) > limit_bytes:
            raise _too_large(limit_bytes)
        if not body and not event.get("more_body", False):
            return piece
        body += piece
        if not event.get("more_body", False):
            return body


async def read_json_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes | bytearray:
    """The body of a request that says it is JSON. Raises as read_body, and ApiError 415."""
    kind = header(scope, b"content-type")
    media = (kind or b"application/json").split(b";")[0].strip().lower()
    if media != b"application/json" and not media.endswith(b"+json"):
        raise ApiError(
            415,
            f"the content type {media.decode('latin-1')!r} is not JSON; send the header Content-Type: application/json",
        )
    return await read_body(scope, receive, limit_bytes)


class Exchange:
    """One request's answer on its way: its id, its status, whether it began."""

    __slots__ = ("began_s", "headers", "id", "server_send", "status")

    def __init__(self, scope: Scope, server_send: Send) -> None:
        given = header(scope, b"x-request-id")
        self.id = given if given is not None and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        self.headers: Headers = [(b"x-request-id", self.id)]
        self.server_send = server_send
        self.status = 0  # until the answer begins
        self.began_s = time.monotonic()

    @property
    def is_started(self) -> bool:
        """The status is on its way; nothing else can be answered."""
        return self.status != 0

    def begin(self, status: int) -> None:
        """The answer begins with this status."""
        self.status = status

    async def send(self, event: Event) -> None:
        """For answers made elsewhere; adds our headers. Raises ClientLeft."""
        if event["type"] == "http.response.start":
            self.begin(event["status"])
            event["headers"] = [*event["headers"], *self.headers]
        try:
            await self.server_send(event)
        except RuntimeError:  # the server's word for a closed connection
            raise ClientLeft from None

    async def send_whole(self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """One complete JSON response."""
        lines = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
        await self.send({"type": "http.response.start", "status": status, "headers": lines})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413, f"the request's body is over this server's limit of {limit_bytes} bytes", code="body_too_large"
    )
