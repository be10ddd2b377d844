"""Whoever reads the server's output stops reading, or goes: the server does not care."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from trimaran.frontend.launch.outlet import Outlet
from trimaran.tests.server import Server


@contextmanager
def stderr_of(read: int, write: int) -> Iterator[None]:
    """Descriptor 2 is the pipe's end meanwhile."""
    kept = os.dup(2)
    os.dup2(write, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        for descriptor in (kept, read, write):
            os.close(descriptor)


def test_lines_wait_for_room_and_what_is_dropped_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing blocks, nothing is lost below the limit, and the order stays."""
    with capfd.disabled():
        read, write = os.pipe()
        with stderr_of(read, write), pytest.MonkeyPatch.context() as patch, open(2, "w", closefd=False) as stream:
            patch.setattr(sys, "stderr", stream)
            outlet = Outlet()
            lines = [f"line {number} " + "x" * 500 for number in range(4000)]  # about 2 MB into a pipe of 64 KiB
            for line in lines:
                outlet.line(line)
            taken = b""
            while b"dropped" not in taken:
                taken += os.read(read, 1 << 20)
                outlet.flush()
            told = taken.decode().splitlines()
    num_dropped = int(told[-1].split()[0])
    assert 0 < num_dropped < 3000 and told[:-1] == lines[: len(lines) - num_dropped]


@pytest.mark.parametrize("goes", [False, True], ids=["stops", "goes"])
def test_a_reader_that_is_no_more_stops_nothing(demo_folder: Path, goes: bool) -> None:
    server = Server(demo_folder, "--log-requests", wait=False)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "trimaran.frontend.launch.commands", "serve", *server.arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    server.process = process  # type: ignore[assignment]
    assert process.stderr is not None
    try:
        server.until(lambda: server.status("/ready") == 200, 30, "ready")
        if goes:
            process.stderr.close()
        with httpx.Client(base_url=server.url, timeout=5, headers={"x-request-id": "i" * 128}) as client:
            for _ in range(1200):  # 64 KiB of lines fill the pipe, as much again the frontend's own
                assert client.get("/health").status_code == 200
        assert server.complete("still there", max_tokens=3)["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert not list(server.run_parent.iterdir())
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        server.end()
