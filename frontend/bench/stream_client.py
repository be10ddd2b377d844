"""A streaming HTTP/1.1 client that does little enough per event not to be what is measured.

One connection per request, a plain asyncio protocol, chunked transfer decoding, and a time stamp per server-sent
event. Not a general client: it knows the answers of OpenAI-style completion routes.
"""

import asyncio
import json
import time

from msgspec import Struct


class Outcome(Struct):
    """What one request got. Times in seconds; `itls` are gaps between events that carried text."""

    success: bool = False
    error: str = ""
    started_s: float = 0.0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itls_s: list[float] = []
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""


class _Stream(asyncio.Protocol):
    """Feeds the body's events to an Outcome."""

    def __init__(self, request: bytes, outcome: Outcome, keep_text: bool) -> None:
        self._request = request
        self._outcome = outcome
        self._keep_text = keep_text
        self._raw = bytearray()
        self._body = bytearray()
        self._status = 0
        self._is_chunked = False
        self._last_s = 0.0
        self._transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._outcome.started_s = self._last_s = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._raw += data
        if not self._status and not self._read_head():
            return
        is_whole = self._is_chunked and self._read_chunks()
        if not self._is_chunked:
            self._body += self._raw
            self._raw.clear()
        if self._status == 200:
            self._read_events()
        if is_whole:
            self._finish(self._said())

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(self._said() if error is None else repr(error))

    def _said(self) -> str:
        """What a server said that did not stream to the end."""
        if self._status in (0, 200):
            return "the connection closed before [DONE]"
        return f"HTTP {self._status}: {bytes(self._body[:500]).decode(errors='replace')}"

    def _read_head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._raw[:end]).lower()
        self._status = int(head.split(b" ", 2)[1])
        self._is_chunked = b"transfer-encoding: chunked" in head
        del self._raw[: end + 4]
        return True

    def _read_chunks(self) -> bool:
        """Whether the last one has come."""
        while (end := self._raw.find(b"\r\n")) > 0:
            size = int(self._raw[:end].split(b";")[0], 16)
            if len(self._raw) < end + 2 + size + 2:
                return False
            self._body += self._raw[end + 2 : end + 2 + size]
            del self._raw[: end + 2 + size + 2]
            if size == 0:
                return True
        return False

    def _read_events(self) -> None:
        while (end := self._body.find(b"\n\n")) >= 0:
            event = bytes(self._body[6:end])
            del self._body[: end + 2]
            self._event(event)

    def _event(self, event: bytes) -> None:
        outcome = self._outcome
        if event == b"[DONE]":
            outcome.success = True
            self._finish("")
            return
        if event.startswith(b'{"error"'):
            self._finish(event.decode(errors="replace"))
            return
        if b'"usage":{' in event:
            usage = json.loads(event)["usage"]
            outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            if b'"choices":[]' in event:
                return
        now = time.perf_counter()
        if outcome.ttft_s == 0.0:
            outcome.ttft_s = now - outcome.started_s
        else:
            outcome.itls_s.append(now - self._last_s)
        self._last_s = now
        outcome.latency_s = now - outcome.started_s
        if self._keep_text:
            outcome.text += json.loads(event)["choices"][0]["text"]

    def _finish(self, error: str) -> None:
        if not self.done.done():
            if not self._outcome.success:
                self._outcome.error = error
            self.done.set_result(None)
        if self._transport is not None:
            self._transport.close()


async def ask(
    host: str, port: int, path: str, body: bytes, headers: dict[str, str], *, timeout_s: float, keep_text: bool
) -> Outcome:
    """One streaming request; never raises, the outcome says what happened."""
    outcome = Outcome()
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}:{port}", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", "Connection: close", *(f"{name}: {headers[name]}" for name in headers)]
    request = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
    try:
        _, stream = await asyncio.get_running_loop().create_connection(
            lambda: _Stream(request, outcome, keep_text),
            host,
            port,
        )
        await asyncio.wait_for(stream.done, timeout_s)
    except (OSError, TimeoutError) as error:
        outcome.error = outcome.error or repr(error)
    return outcome
