"""Reading a request's body within limits, whatever its sender does."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from trimaran.frontend.http import asgi
from trimaran.frontend.http.asgi import Receive, read_body
from trimaran.frontend.http.errors import ApiError


def sending(events: Sequence[dict[str, Any]]) -> Receive:
    """Those events, then silence."""
    left = list(events)

    async def receive() -> dict[str, Any]:
        if left:
            return left.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    return receive


def piece(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


SCOPE: dict[str, Any] = {"headers": []}


async def test_pieces_are_joined() -> None:
    assert await read_body(SCOPE, sending([piece(b"whole", False)]), 10) == b"whole"
    pieces = [piece(b"a", True), piece(b"", True), piece(b"b", True), piece(b"c", False)]
    assert await read_body(SCOPE, sending(pieces), 3) == b"abc"
    assert await read_body(SCOPE, sending([piece(b"", False)]), 3) == b""


@pytest.mark.parametrize(
    "events", [[piece(b"abcd", False)], [piece(b"ab", True), piece(b"cd", False)], [piece(b"ab", True)] * 9]
)
async def test_too_much_is_413(events: list[dict[str, Any]]) -> None:
    with pytest.raises(ApiError) as caught:
        await read_body(SCOPE, sending(events), 3)
    assert caught.value.status == 413


async def test_a_declared_length_is_believed_before_reading() -> None:
    with pytest.raises(ApiError) as caught:
        await read_body({"headers": [(b"content-length", b"4")]}, sending([]), 3)
    assert caught.value.status == 413


async def test_a_stalled_body_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "_STALLED_BODY_S", 0.02)
    with pytest.raises(ApiError) as caught:
        await read_body(SCOPE, sending([piece(b"a", True)]), 3)
    assert caught.value.status == 408


async def test_a_body_that_breaks_off_is_refused() -> None:
    """The client may still read: without an answer the HTTP server would say 500 for us."""
    with pytest.raises(ApiError, match="broke off") as refused:
        await read_body(SCOPE, sending([piece(b"a", True), {"type": "http.disconnect"}]), 3)
    assert refused.value.status == 400
