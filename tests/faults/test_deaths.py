"""kill -9 of every process in every phase: terminals in time, a 503 meanwhile, service again, nothing left."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from trimaran.tests.faults.crowd import (
    TERMINAL_LIMIT_S,
    Crowd,
    all_gone,
    assert_failed_in_time,
    descendants,
    nothing_left,
)
from trimaran.tests.server import Server

ROLES = ("frontend", "core", "worker")
SCRIPT = "step_ms=10 prefill_us_per_token=1000"
LONG_PROMPT = [7] * 3000  # three seconds of prefill
PHASES = ("idle", "prefill", "decode", "20 streams")
TWO_RANKS = ("--tensor-parallel", "2")


def keep_busy(crowd: Crowd, phase: str) -> None:
    """Requests that are live in this phase."""
    server = crowd.server
    if phase == "prefill":
        crowd.add_stream(LONG_PROMPT, wait_first=False, max_tokens=100)
        crowd.add_plain(LONG_PROMPT, max_tokens=100)
        server.until(lambda: server.metrics()["num_requests_running"] >= 1, 5, "prefill runs")
    elif phase == "decode":
        crowd.add_stream("one", max_tokens=4000)
        crowd.add_plain("two", max_tokens=400)
        server.until(lambda: server.metrics()["num_requests_running"] == 2, 5, "both decode")
    elif phase == "20 streams":
        for number in range(20):
            crowd.add_stream(f"stream {number}", max_tokens=4000)


def assert_serves(server: Server) -> None:
    assert server.complete("once more", max_tokens=3)["usage"]["completion_tokens"] == 3
    server.assert_idle()


@pytest.mark.user_pain("C3")
@pytest.mark.parametrize("phases", [PHASES[:2], PHASES[2:]], ids=["idle+prefill", "decode+20"])
@pytest.mark.parametrize("victim", ["core", "worker", pytest.param("rank 1", marks=pytest.mark.long)])
def test_a_dead_part_of_the_engine(demo_folder: Path, victim: str, phases: tuple[str, ...]) -> None:
    role = "core" if victim == "core" else "worker"
    ranks = TWO_RANKS if victim == "rank 1" else ()
    with nothing_left(Server(demo_folder, "--frontends", "2", *ranks, script=SCRIPT)) as server:
        for phase in phases:
            others = {name: server.pids(name) for name in ROLES if name != role}
            before = server.pids(role)
            crowd = Crowd(server)
            keep_busy(crowd, phase)
            killed_s = time.monotonic()
            server.kill(role, which=len(before) - 1)
            server.until(lambda: server.status("/ready") == 503, TERMINAL_LIMIT_S, "/ready says 503")
            answer = server.http.post("/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            assert_failed_in_time(crowd.endings(), killed_s, ("error", "503"))
            server.wait_ready(20)
            assert others == {name: server.pids(name) for name in others}, "more than the dead part was restarted"
            after = server.pids(role)
            assert len(after) == len(before) and not set(before) & set(after)
            assert_serves(server)
        assert server.printed(r"(worker \d|core) was killed by SIGKILL.*restart 1 of 5")


@pytest.mark.user_pain("C3")
@pytest.mark.parametrize("role", ROLES)
def test_death_while_loading(demo_folder: Path, role: str) -> None:
    with nothing_left(Server(demo_folder, script="load_ms=2000 step_ms=5", wait=False)) as server:
        server.until(lambda: server.printed("weights") and server.status("/ready") == 503, 10, "weights are loaded")
        others = {name: server.pids(name) for name in ROLES if name != role}
        killed = server.kill(role)
        server.wait_ready(20)
        assert others == {name: server.pids(name) for name in others}
        assert len(server.pids(role)) == 1 and killed not in server.pids(role)
        assert_serves(server)


@pytest.mark.parametrize("phases", [("idle", "prefill"), ("decode", "20 streams")], ids=["idle+prefill", "decode+20"])
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_dead_frontend(demo_folder: Path, count: int, phases: tuple[str, ...]) -> None:
    """Its connections close; the engine forgets its requests; other frontends' streams go on."""
    with nothing_left(Server(demo_folder, "--frontends", str(count), script=SCRIPT)) as server:
        for phase in phases:
            others = {name: server.pids(name) for name in ("core", "worker")}
            before = server.pids("frontend")
            crowd = Crowd(server)
            keep_busy(crowd, phase)
            killed_s = time.monotonic()
            killed = server.kill("frontend")
            if count == 1:
                assert_failed_in_time(crowd.endings(), killed_s, ("closed",))
            server.until(lambda: len(server.pids("frontend")) == count, 10, "a new frontend")
            assert set(before) - {killed} <= set(server.pids("frontend"))
            server.wait_ready(10)
            assert others == {name: server.pids(name) for name in others}
            if phase == "20 streams":
                ended, num_open = list(crowd.found), crowd.hang_up()
                expected = range(1, 20) if count == 2 else (0,)
                assert num_open in expected, f"of 20 streams {num_open} went on; the others: {ended}"
            elif count == 2:
                crowd.hang_up()
            server.assert_idle()
            assert_serves(server)


@pytest.mark.user_pain("C4")
@pytest.mark.parametrize(
    "phase",
    ["loading", "prefill", "20 streams", *(pytest.param(name, marks=pytest.mark.long) for name in ("idle", "decode"))],
)
def test_a_dead_supervisor_takes_all_along(demo_folder: Path, phase: str) -> None:
    loads = phase == "loading"
    script = SCRIPT + (" load_ms=3000" if loads else "")
    server = Server(demo_folder, "--frontends", "2", *TWO_RANKS, script=script, wait=not loads)
    with server:
        crowd: Crowd | None = None
        if loads:
            server.until(lambda: server.printed("weights"), 10, "weights are loaded")
        else:
            crowd = Crowd(server)
            keep_busy(crowd, phase)
        children = descendants(server)
        assert len(children) >= 5
        killed_s = time.monotonic()
        server.process.kill()
        if crowd is not None:
            assert_failed_in_time(crowd.endings(), killed_s, ("closed",))
        server.until(lambda: all_gone(children), 10, "all children are gone")
        server.process.wait(5)
        server.start()  # at once, on the same port and folder
        server.wait_ready(30)
        assert_serves(server)
        assert server.stop() == 0
        assert not list(server.run_parent.iterdir())


@pytest.mark.user_pain("C3")
@pytest.mark.parametrize("role", ROLES)
def test_after_the_limit_the_server_ends_with_the_cause(demo_folder: Path, role: str) -> None:
    with Server(demo_folder, "--max-restarts", "1") as server:
        children = descendants(server)
        first = server.kill(role)
        server.until(lambda: server.pids(role) not in ([], [first]) and server.status("/ready") == 200, 20, "again")
        children += descendants(server)
        server.kill(role)
        assert server.ended(15) == 1
        assert role in server.lines[-1] and "SIGKILL" in server.lines[-1] and "--max-restarts" in server.lines[-1]
        assert all_gone(children)
        assert not list(server.run_parent.iterdir())


def test_two_parts_die_at_the_same_instant(demo_folder: Path) -> None:
    with nothing_left(Server(demo_folder, script=SCRIPT)) as server:
        crowd = Crowd(server)
        keep_busy(crowd, "decode")
        frontends = server.pids("frontend")
        killed_s = time.monotonic()
        for pid in server.pids("core") + server.pids("worker"):
            os.kill(pid, signal.SIGKILL)
        assert_failed_in_time(crowd.endings(), killed_s, ("error", "503"))
        server.wait_ready(20)
        assert server.pids("frontend") == frontends
        assert_serves(server)


@pytest.mark.long
@pytest.mark.user_pain("C3")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.timeout(150)
def test_deaths_at_random(demo_folder: Path, seed: int) -> None:
    """Parts die while others start, drain their queues or die themselves; every request still ends."""
    draw = random.Random(seed)
    arguments = ("--frontends", "2", "--tensor-parallel", "2", "--max-restarts", "100")
    with nothing_left(Server(demo_folder, *arguments, script=SCRIPT)) as server:
        crowd = Crowd(server)
        for number in range(9):
            for _ in range(3):
                crowd.add_plain(f"request {number}", max_tokens=draw.randint(1, 100))
            living = [pid for role in ROLES for pid in server.pids(role)]
            os.kill(draw.choice(living), signal.SIGKILL)
            time.sleep(draw.choice([0.0, 0.05, 0.3, 1.0, 2.5]))
        kinds = {ending.kind for ending in crowd.endings(30)}
        assert kinds <= {"200", "503", "closed"}, kinds
        server.wait_ready(60)
        assert [len(server.pids(role)) for role in ROLES] == [2, 1, 2]
        assert_serves(server)


@pytest.mark.long
@pytest.mark.user_pain("C4")
@pytest.mark.model
def test_death_in_the_middle_of_real_work(demo_folder: Path) -> None:
    """The same with tensors: a worker in a real step, a core in front of it, and the supervisor at last."""
    with Server(demo_folder, "--max-model-len", "512", "--dtype", "float32", script=None) as server:
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
        expected = server.complete("The capital of France is", **fields)["choices"][0]["text"]
        for role in ("worker", "core"):
            crowd = Crowd(server)
            crowd.add_stream("Once upon a time", max_tokens=400)
            crowd.add_plain("Once upon a time", max_tokens=400)
            frontends, killed_s = server.pids("frontend"), time.monotonic()
            server.kill(role)
            assert_failed_in_time(crowd.endings(), killed_s, ("error", "503"))
            server.wait_ready(30)
            assert server.pids("frontend") == frontends
            assert server.complete("The capital of France is", **fields)["choices"][0]["text"] == expected
        children = descendants(server)
        server.process.kill()
        server.until(lambda: all_gone(children), 10, "all children are gone")
