"""Many clients at once: streams and plain requests, what each got in the end and when."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil

from trimaran.tests.server import Server, StreamReader

TERMINAL_LIMIT_S = 2.0


class Ending:
    """How one request ended: `kind` is done, error, closed (no word) or an HTTP status; `at_s` on the monotonic
    clock.
    """

    def __init__(self, kind: str, at_s: float, text: str = "") -> None:
        self.kind = kind
        self.at_s = at_s
        self.text = text

    def __repr__(self) -> str:
        return f"{self.kind} {self.text[:200]}"


def ending_of_stream(stream: StreamReader, limit_s: float = 30) -> Ending:
    """Read to the end. A stream must end with [DONE], or with one error event and nothing after it."""
    try:
        raw = stream.read_all(limit_s)
    except ConnectionResetError:
        return Ending("closed", time.monotonic())
    at_s = time.monotonic()
    head = raw.split(b"\r\n", 1)[0]
    if head and b" 200 " not in head + b" ":
        return Ending(head.split()[1].decode(), at_s, raw.decode(errors="replace"))
    events = stream.events()
    errors = [event for event in events if isinstance(event, dict) and "error" in event]
    if not errors:
        return Ending("done" if events[-1:] == ["[DONE]"] else "closed", at_s, str(events[-1:]))
    assert errors == events[-1:], "something follows the error event, or there are two"
    return Ending("error", at_s, errors[0]["error"]["message"])


class Crowd:
    """Streams and plain requests in the background; `endings` waits for all."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._model = server.model
        self.streams: list[StreamReader] = []
        self.found: list[Ending] = []
        self._threads: list[threading.Thread] = []

    def add_stream(self, prompt: Any, *, port: int | None = None, wait_first: bool = True, **fields: Any) -> None:
        """A stream, read on a thread of its own once its first event is there."""
        body = {"model": self._model, "prompt": prompt, "stream": True, "ignore_eos": True, **fields}
        stream = StreamReader(port or self.server.port, "/v1/completions", body)
        self.streams.append(stream)
        if wait_first:
            stream.read_until(b"data: ", 20)
        self._run(lambda: self._streamed(stream))

    def _streamed(self, stream: StreamReader) -> Ending:
        try:
            return ending_of_stream(stream)
        finally:
            stream.socket.close()

    def hang_up(self) -> int:
        """Close the streams that are still open; how many were."""
        num_open = len(self._threads) - len(self.found)
        for stream in self.streams:
            with contextlib.suppress(OSError):
                stream.socket.shutdown(socket.SHUT_RDWR)
        self.endings()
        return num_open

    def add_plain(self, prompt: Any, **fields: Any) -> None:
        """A request that is answered whole."""
        self._run(lambda: self._plain({"model": self._model, "prompt": prompt, "ignore_eos": True, **fields}))

    def _plain(self, body: dict[str, Any]) -> Ending:
        try:
            answer = httpx.post(f"{self.server.url}/v1/completions", json=body, timeout=120)
        except httpx.HTTPError as error:
            return Ending("closed", time.monotonic(), repr(error))
        if answer.status_code != 200:
            assert json.loads(answer.text)["error"]["message"]
        return Ending(str(answer.status_code), time.monotonic(), answer.text)

    def _run(self, work: Callable[[], Ending]) -> None:
        def note() -> None:
            self.found.append(work())

        thread = threading.Thread(target=note, daemon=True)
        thread.start()
        self._threads.append(thread)

    def endings(self, limit_s: float = 20) -> list[Ending]:
        """One per request, in the order in which they came."""
        deadline_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        missing = sum(thread.is_alive() for thread in self._threads)
        assert not missing, f"{missing} of {len(self._threads)} requests have no terminal after {limit_s} s"
        return self.found


def assert_failed_in_time(endings: list[Ending], since_s: float, kinds: tuple[str, ...]) -> None:
    """Each request failed, in one of these ways, within the limit."""
    for ending in endings:
        assert ending.kind in kinds, ending
        assert ending.at_s - since_s < TERMINAL_LIMIT_S, f"{ending} after {ending.at_s - since_s:.2f} s"


def descendants(server: Server) -> list[psutil.Process]:
    """Every process of the server but the supervisor."""
    return psutil.Process(server.process.pid).children(recursive=True)


def all_gone(processes: list[psutil.Process]) -> bool:
    """None of them runs any more."""
    return not [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@contextmanager
def nothing_left(server: Server) -> Iterator[Server]:
    """Runs the server; afterwards it has exited with 0 and left no process, no shared memory and no run directory."""
    before = set(os.listdir("/dev/shm"))
    with server:
        yield server
        mine = descendants(server)
        pids = {str(process.pid) for process in mine} | {str(server.process.pid)}
        assert server.stop() == 0, server.output[-2000:]
        assert all_gone(mine)
        left = [
            name for name in set(os.listdir("/dev/shm")) - before if "trimaran" in name or pids & set(name.split("_"))
        ]
        assert not left
        assert not list(server.run_parent.iterdir())
