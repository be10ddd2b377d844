"""SIGTERM: what is live may end, what is new is turned away, and nothing is left."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from trimaran.tests.faults.crowd import Crowd, all_gone, descendants
from trimaran.tests.server import Server

ASK: dict[str, Any] = {"prompt": "x", "max_tokens": 1}


def sigterm(server: Server) -> float:
    server.process.send_signal(signal.SIGTERM)
    return time.monotonic()


@pytest.mark.user_pain("C6")
@pytest.mark.parametrize("count", [1, 2])
def test_a_drain_lets_live_streams_end(demo_folder: Path, count: int) -> None:
    with Server(demo_folder, "--frontends", str(count), "--drain-timeout", "20", script="step_ms=20") as server:
        children = descendants(server)
        crowd = Crowd(server)
        for number in range(8):
            crowd.add_stream(f"stream {number}", max_tokens=100)
        crowd.add_plain("plain", max_tokens=100)
        server.until(lambda: server.metrics()["num_requests_running"] == 9, 5, "all run")
        told_s = sigterm(server)
        server.until(lambda: server.status("/ready") == 503, 0.5, "/ready fails at once")
        for _ in range(4):
            answer = server.http.post("/v1/completions", json=ASK, headers={"connection": "close"})
            assert answer.status_code == 503 and "retry-after" in answer.headers
        assert server.status("/health") == 200, "alive is another question"
        assert sorted(ending.kind for ending in crowd.endings()) == ["200", *["done"] * 8]
        assert server.ended(10) == 0
        assert time.monotonic() - told_s < 10
        assert all_gone(children) and not list(server.run_parent.iterdir())


@pytest.mark.user_pain("C6")
@pytest.mark.parametrize("second", [False, True], ids=["limit", "second signal"])
def test_what_outlasts_the_drain_gets_an_error_event(demo_folder: Path, second: bool) -> None:
    timeout = "30" if second else "1"
    with Server(demo_folder, "--drain-timeout", timeout, script="step_ms=20") as server:
        children = descendants(server)
        crowd = Crowd(server)
        for number in range(8):
            crowd.add_stream(f"stream {number}", max_tokens=5000)
        crowd.add_plain("plain", max_tokens=5000)
        server.until(lambda: server.metrics()["num_requests_running"] == 9, 5, "all run")
        sigterm(server)
        if second:
            time.sleep(0.7)
            sigterm(server)
        endings = crowd.endings(10)
        assert sorted(ending.kind for ending in endings) == ["503", *["error"] * 8]
        assert all("shutting down" in ending.text for ending in endings)
        assert server.ended(10) == (1 if second else 0)
        assert all_gone(children) and not list(server.run_parent.iterdir())
        assert not [name for name in os.listdir("/dev/shm") if "trimaran" in name]


@pytest.mark.user_pain("C6")
def test_sigterm_while_loading_ends_at_once(demo_folder: Path) -> None:
    with Server(demo_folder, script="load_ms=20000", wait=False) as server:
        server.until(lambda: server.printed("weights"), 10, "weights are loaded")
        children = descendants(server)
        told_s = sigterm(server)
        assert server.ended(10) == 0
        assert time.monotonic() - told_s < 4
        assert all_gone(children) and not list(server.run_parent.iterdir())


@pytest.mark.user_pain("C6")
def test_a_worker_that_dies_during_the_drain(demo_folder: Path) -> None:
    """Its requests fail, and the drain is over: there is nothing to wait for."""
    with Server(demo_folder, "--drain-timeout", "20", script="step_ms=20") as server:
        crowd = Crowd(server)
        crowd.add_stream("a", max_tokens=5000)
        told_s = sigterm(server)
        server.until(lambda: server.status("/ready") == 503, 2, "draining")
        server.kill("worker")
        assert [ending.kind for ending in crowd.endings()] == ["error"]
        assert server.ended(10) == 0
        assert time.monotonic() - told_s < 8


@pytest.mark.user_pain("C6")
def test_a_stopped_worker_does_not_hold_the_end_up(demo_folder: Path) -> None:
    with Server(demo_folder, "--drain-timeout", "1", script="step_ms=20") as server:
        crowd = Crowd(server)
        crowd.add_stream("a", max_tokens=5000)
        children = descendants(server)
        server.kill("worker", signal.SIGSTOP)
        told_s = sigterm(server)
        assert [ending.kind for ending in crowd.endings()] == ["error"]
        assert server.ended(12) == 0
        assert time.monotonic() - told_s < 10
        assert all_gone(children)
