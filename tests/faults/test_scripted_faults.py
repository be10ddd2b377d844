"""What goes wrong inside a step, as clients see it."""

from pathlib import Path
from typing import Any

import pytest

from trimaran.tests.faults.crowd import Crowd, Ending, descendants, nothing_left
from trimaran.tests.server import Server


def fault(demo_folder: Path, script: str, *arguments: str) -> Server:
    """The boot token is step 1."""
    return Server(demo_folder, *arguments, script=f"step_ms=20 {script}")


def run_three(server: Server) -> list[Ending]:
    """Two streams and a plain request, together in every step once they run."""
    crowd = Crowd(server)
    crowd.add_stream("a", max_tokens=60)
    crowd.add_stream("b", max_tokens=60)
    crowd.add_plain("c", max_tokens=60)
    return crowd.endings()


@pytest.mark.user_pain("M6")
@pytest.mark.user_pain("C7")
@pytest.mark.parametrize(("script", "word"), [("fail_at=30", "out of memory"), ("error_at=30", "failed this step")])
def test_a_failed_step_fails_its_requests_only(demo_folder: Path, script: str, word: str) -> None:
    with nothing_left(fault(demo_folder, script)) as server:
        workers = server.pids("worker")
        endings = run_three(server)
        assert sorted(ending.kind for ending in endings) == ["500", "error", "error"]
        assert all(word in ending.text for ending in endings)
        if "fail" in script:
            assert all("--memory-utilization" in ending.text for ending in endings), "no cure"
        server.assert_idle()
        assert server.complete("d", max_tokens=10)["usage"]["completion_tokens"] == 10
        assert server.pids("worker") == workers, "the worker was restarted for one step"
        assert server.metrics()["request_failure_total"] == 3


@pytest.mark.user_pain("C7")
def test_an_error_event_is_the_last_and_in_time(demo_folder: Path) -> None:
    with fault(demo_folder, "error_at=9") as server:
        stream = server.stream("a", max_tokens=60)
        stream.read_all(10)
        events = stream.events()
        stream.vanish()
        texts = [event for event in events if event != "[DONE]" and "choices" in event]
        assert len(texts) >= 5 and set(events[-1]) == {"error"} and "[DONE]" not in events
        assert set(events[-1]["error"]) >= {"message", "type", "code"}


def test_numbers_that_are_none_fail_one_request(demo_folder: Path) -> None:
    with nothing_left(fault(demo_folder, "nan_at=30")) as server:
        endings = run_three(server)
        failed = [ending for ending in endings if ending.kind in ("error", "500")]
        assert len(failed) == 1 and len(endings) == 3, endings
        server.assert_idle()


@pytest.mark.user_pain("C8")
def test_ranks_that_disagree_are_a_device_fault(demo_folder: Path) -> None:
    """Both ranks are started again: nobody knows which of them is broken."""
    ranks = ("--tensor-parallel", "2")
    with nothing_left(fault(demo_folder, "wrong_at=30 until_generation=1", *ranks)) as server:
        workers, core = server.pids("worker"), server.pids("core")
        endings = run_three(server)
        assert sorted(ending.kind for ending in endings) == ["503", "error", "error"]
        assert all("rank 1" in ending.text for ending in endings), endings
        assert server.printed(r"lost in generation 1: step \d+ \(3 sequences, 3 tokens, .*with requests \[\d+, ")
        server.wait_ready(20)
        assert not set(server.pids("worker")) & set(workers) and server.pids("core") == core
        assert server.complete("d", max_tokens=40)["usage"]["completion_tokens"] == 40


@pytest.mark.user_pain("C8")
def test_a_worker_that_dies_in_every_generation_ends_the_server(demo_folder: Path) -> None:
    with fault(demo_folder, "die_at=5", "--max-restarts", "1") as server:
        children = descendants(server)
        for _ in range(2):
            server.wait_ready(10)
            crowd = Crowd(server)
            crowd.add_stream("a", max_tokens=60)
            assert crowd.endings()[0].kind in ("error", "closed")
        assert server.ended(10) == 1
        assert "worker 0 was killed by SIGKILL" in server.lines[-1]
        assert children


def test_more_than_one_fault_in_a_life(demo_folder: Path) -> None:
    """Eight different faults in a row; what is asked in between is answered or fails, and never hangs."""
    script = "fail_at=10,20 error_at=15,25 nan_at=30,35 die_at=60 hang_at=90 until_generation=2"
    with nothing_left(fault(demo_folder, script, "--stall-limit", "1")) as server:
        seen: set[str] = set()
        fields: dict[str, Any] = {"max_tokens": 8}
        for number in range(12):
            server.until(lambda: server.status("/ready") == 200, 10, "ready")
            crowd = Crowd(server)
            for kind in (crowd.add_plain, crowd.add_plain):
                kind(f"request {number}", **fields)
            seen |= {ending.kind for ending in crowd.endings(10)}
        assert "200" in seen and "500" in seen and seen <= {"200", "500", "503"}
        server.assert_idle()
