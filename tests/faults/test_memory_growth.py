"""A worker that leaks is restarted in order: nothing that runs is cut short, and who comes meanwhile is told why."""

import time
from pathlib import Path

import pytest

from trimaran.engine_core.growth_watch import GrowthWatch
from trimaran.ipc.worker_messages import Heartbeat
from trimaran.tests.faults.crowd import Crowd, nothing_left
from trimaran.tests.faults.quick_settling import COMMAND
from trimaran.tests.server import Server

MIB = 1 << 20
LEAKS = "step_ms=10 leak_kib_per_step=1024 until_generation=1"


def leaking(model: Path, script: str, *arguments: str) -> Server:
    return Server(model, "--memory-growth-limit", str(50 * MIB), *arguments, script=script, command=COMMAND)


def wait_told(server: Server) -> None:
    server.until(lambda: server.printed("WARNING .*the device workers are restarted to give memory back"), 20, "a word")


def test_streams_end_well_and_newcomers_are_told(demo_folder: Path) -> None:
    with nothing_left(leaking(demo_folder, LEAKS)) as server:
        worker, others = server.pids("worker"), server.pids("core") + server.pids("frontend")
        crowd = Crowd(server)
        for number in range(4):
            crowd.add_stream(f"stream {number}", max_tokens=1000)
        wait_told(server)
        server.until(lambda: server.status("/ready") == 503, 5, "not ready")
        answer = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert "--memory-growth-limit 50 MiB" in answer.text and "worker 0 grew by" in answer.text
        assert server.pids("worker") == worker, "it was not waited for the streams"
        assert len(crowd.found) < 4
        assert [ending.kind for ending in crowd.endings()] == ["done"] * 4
        server.until(lambda: server.pids("worker") not in ([], worker), 20, "a new worker")
        server.wait_ready(20)
        assert server.metrics()["engine_generation"] == 2
        assert server.pids("core") + server.pids("frontend") == others
        assert server.printed("worker 0 was killed: the device workers are restarted to give memory back")
        assert server.complete("again", max_tokens=100, ignore_eos=True)["usage"]["completion_tokens"] == 100
        assert server.metrics()["engine_generation"] == 2
        server.assert_idle()


@pytest.mark.long
def test_streams_without_end_have_the_drain_limit(demo_folder: Path) -> None:
    with nothing_left(leaking(demo_folder, LEAKS, "--drain-timeout", "2")) as server:
        crowd = Crowd(server)
        crowd.add_stream("for ever", max_tokens=8000)
        wait_told(server)
        told_s = time.monotonic()
        (ending,) = crowd.endings(15)
        assert ending.kind == "error" and "--memory-growth-limit" in ending.text
        assert ending.at_s - told_s > 1.0, "it was not given its time"
        server.wait_ready(20)
        assert server.complete("again", max_tokens=5)["usage"]["completion_tokens"] == 5


def test_what_stays_below_the_limit_is_left_alone(demo_folder: Path) -> None:
    with nothing_left(leaking(demo_folder, "leak_kib_per_step=64")) as server:
        assert server.complete("x", max_tokens=300, ignore_eos=True)["usage"]["completion_tokens"] == 300
        time.sleep(2)  # two looks
        assert server.metrics()["engine_generation"] == 1
        assert not server.printed("give memory back")


def beat(resident_mib: int, rank: int = 0) -> dict[int, Heartbeat]:
    said = Heartbeat(
        rank=rank, generation=1, step=None, step_age_s=0.0, progress_age_s=0.0, resident_bytes=resident_mib * MIB
    )
    return {rank: said}


def test_growth_counts_from_where_it_settled() -> None:
    watch = GrowthWatch(100 * MIB, ready_s=10.0, settling_s=60.0)
    assert watch.look(beat(500), 11.0) is None
    assert watch.look(beat(900), 69.0) is None, "it still settles"
    assert watch.look(beat(1000), 71.0) is None, "exactly the limit"
    grown = watch.look(beat(1001), 72.0)
    assert grown == "worker 0 grew by 101 MiB to 1001 MiB (--memory-growth-limit 100 MiB)"


@pytest.mark.parametrize("culprit", [0, 1])
def test_each_worker_has_its_own_baseline(culprit: int) -> None:
    watch = GrowthWatch(100 * MIB, ready_s=0.0, settling_s=1.0)
    assert watch.look({**beat(500), **beat(2000, 1)}, 2.0) is None
    sizes = [500, 2000]
    sizes[culprit] += 150
    grown = watch.look({**beat(sizes[0]), **beat(sizes[1], 1)}, 3.0)
    assert grown is not None and f"worker {culprit} grew by 150 MiB" in grown
