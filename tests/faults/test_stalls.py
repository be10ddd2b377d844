"""Parts that live but do not move: stopped, hung, or only slow."""

import signal
import time
from pathlib import Path

import pytest

from trimaran.tests.faults.crowd import Crowd, nothing_left
from trimaran.tests.server import Server

STALL_LIMIT_S = 1.5
NOTICE_S = 1.0  # heartbeats and looks, on top of the limit
LIMIT = ("--stall-limit", str(STALL_LIMIT_S))


@pytest.fixture(scope="module")
def server(demo_folder: Path):  # type: ignore[no-untyped-def]
    with nothing_left(Server(demo_folder, *LIMIT, script="step_ms=10")) as running:
        yield running


@pytest.mark.user_pain("C5")
@pytest.mark.parametrize("role", ["worker", "core"])
def test_stopped_in_the_middle_of_work(server: Server, role: str) -> None:
    crowd = Crowd(server)
    crowd.add_stream("a", max_tokens=500)
    stopped_s = time.monotonic()
    server.kill(role, signal.SIGSTOP)
    try:
        server.until(lambda: server.status("/ready") == 503, STALL_LIMIT_S + NOTICE_S, "/ready fails")
        assert time.monotonic() - stopped_s > STALL_LIMIT_S * 0.5
        assert server.status("/health") == 200
    finally:
        server.kill(role, signal.SIGCONT)
    server.until(lambda: server.status("/ready") == 200, 3, "/ready recovers")
    assert [ending.kind for ending in crowd.endings()] == ["done"]
    server.assert_idle()


@pytest.mark.user_pain("C5")
def test_stopped_while_idle(server: Server) -> None:
    server.assert_idle()
    server.kill("worker", signal.SIGSTOP)
    try:
        server.until(lambda: server.status("/ready") == 503, STALL_LIMIT_S + NOTICE_S, "/ready fails")
        reason = server.http.get("/ready").json()["error"]["message"]
        assert "worker 0 has been silent" in reason
    finally:
        server.kill("worker", signal.SIGCONT)
    server.until(lambda: server.status("/ready") == 200, 3, "/ready recovers")
    assert server.complete("b", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.user_pain("C5")
def test_a_long_prefill_is_no_stall(demo_folder: Path) -> None:
    _prefill_for(demo_folder, 3)


@pytest.mark.long
@pytest.mark.user_pain("C5")
def test_a_prefill_of_thirty_seconds_is_no_stall(demo_folder: Path) -> None:
    _prefill_for(demo_folder, 30)


def _prefill_for(demo_folder: Path, seconds: int) -> None:
    with Server(demo_folder, *LIMIT, script=f"prefill_us_per_token={seconds * 1000}") as server:
        crowd = Crowd(server)
        began_s = time.monotonic()
        crowd.add_plain([5] * 1000, max_tokens=2)
        while not crowd.found:
            assert server.status("/ready") == 200
            time.sleep(0.05)
        assert crowd.endings()[0].kind == "200"
        assert time.monotonic() - began_s > seconds * 0.9


@pytest.mark.user_pain("C5")
def test_a_hung_step_is_seen_and_its_group_restarted(demo_folder: Path) -> None:
    """The boot token is step 1; step 4 of the first generation never ends."""
    limit_s = 1.0
    script = "step_ms=10 hang_at=4 until_generation=1"
    with nothing_left(Server(demo_folder, "--stall-limit", str(limit_s), script=script)) as server:
        frontends, worker = server.pids("frontend"), server.pids("worker")
        crowd = Crowd(server)
        crowd.add_stream("a", max_tokens=50)
        crowd.add_plain("b", max_tokens=50)
        hung_s = time.monotonic()
        server.until(lambda: server.status("/ready") == 503, limit_s + NOTICE_S, "/ready fails")
        assert {ending.kind for ending in crowd.endings()} == {"error", "503"}
        assert time.monotonic() - hung_s < 6 * limit_s + 3
        assert all("got nowhere" in ending.text for ending in crowd.found), crowd.found
        server.wait_ready(15)
        assert server.pids("frontend") == frontends and not set(server.pids("worker")) & set(worker)
        assert server.complete("c", max_tokens=50)["usage"]["completion_tokens"] == 50


@pytest.mark.long
@pytest.mark.user_pain("C5")
def test_a_boot_token_that_hangs_is_seen(demo_folder: Path) -> None:
    """Not ready yet is no reason to wait for ever."""
    script = "hang_at=1 until_generation=1"
    with Server(demo_folder, "--stall-limit", "1", script=script, wait=False) as server:
        server.wait_ready(15)
        assert server.printed("was killed: it hung: step 1")
        assert server.complete("c", max_tokens=5)["usage"]["completion_tokens"] == 5


@pytest.mark.long
@pytest.mark.user_pain("C5")
def test_a_frontend_that_hangs_is_restarted(demo_folder: Path) -> None:
    """It holds a share of all connections; the others go on meanwhile."""
    with nothing_left(Server(demo_folder, "--stall-limit", "1", "--frontends", "2", script="step_ms=10")) as server:
        stopped = server.kill("frontend", signal.SIGSTOP)
        server.until(lambda: server.printed("frontend .* was taken for hung"), 15, "noticed")
        server.until(
            lambda: len(server.pids("frontend")) == 2 and stopped not in server.pids("frontend"), 5, "a new one"
        )
        server.wait_ready(10)
        server.assert_idle()


@pytest.mark.user_pain("C5")
def test_a_core_that_hangs_is_restarted(demo_folder: Path) -> None:
    with nothing_left(Server(demo_folder, "--stall-limit", "1", script="step_ms=10")) as server:
        crowd = Crowd(server)
        crowd.add_stream("a", max_tokens=4000)
        workers = server.pids("worker")
        server.kill("core", signal.SIGSTOP)
        assert [ending.kind for ending in crowd.endings(15)] == ["error"]
        server.wait_ready(15)
        assert server.pids("worker") == workers
        assert server.complete("c", max_tokens=5)["usage"]["completion_tokens"] == 5
