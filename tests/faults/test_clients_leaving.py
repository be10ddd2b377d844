"""Clients that vanish: the engine forgets them, however they went and whatever they waited for."""

import statistics
import time
from pathlib import Path

import pytest

from trimaran.tests.faults.crowd import nothing_left
from trimaran.tests.server import Server, StreamReader


@pytest.fixture(scope="module")
def server(demo_folder: Path):  # type: ignore[no-untyped-def]
    arguments = ("--frontends", "2", "--max-num-seqs", "64")
    with nothing_left(Server(demo_folder, *arguments, script="step_ms=10")) as running:
        yield running


def plain(server: Server, prompt: str, **fields: object) -> StreamReader:
    """A request that is answered whole, on a connection that can vanish."""
    body = {"model": server.model, "prompt": prompt, "ignore_eos": True, **fields}
    return StreamReader(server.port, "/v1/completions", body)


def latency_s(server: Server) -> float:
    """A fresh request's, the middle of five."""
    took = []
    for _ in range(5):
        began_s = time.monotonic()
        server.complete("fresh", max_tokens=4)
        took.append(time.monotonic() - began_s)
    return statistics.median(took)


@pytest.mark.user_pain("C1")
@pytest.mark.timeout(120)
def test_two_hundred_clients_vanish_in_the_middle(server: Server) -> None:
    """A third of them still waits in the queue, half resets its connection."""
    streams = [server.stream(f"client {number}", max_tokens=5000) for number in range(200)]
    for stream in streams[:40]:
        stream.read_until(b"data: ", 20)
    server.until(lambda: sum(_load(server)) == 200, 20, "200 clients")
    assert _load(server)[0] == 64
    for number, stream in enumerate(streams):
        stream.vanish(reset=number % 2 == 0)
    server.assert_idle(10)


def _load(server: Server) -> tuple[float, float]:
    metrics = server.metrics()
    return metrics["num_requests_running"], metrics["num_requests_waiting"]


@pytest.mark.user_pain("C1")
@pytest.mark.timeout(120)
def test_five_rounds_leave_no_trace(server: Server) -> None:
    """40 streams and 40 plain requests, closed and reset."""
    before_s = latency_s(server)
    for _ in range(5):
        streams = [server.stream(f"stream {number}", max_tokens=5000) for number in range(40)]
        plains = [plain(server, f"plain {number}", max_tokens=5000) for number in range(40)]
        streams[0].read_until(b"data: ", 20)
        server.until(lambda: sum(_load(server)) == 80, 20, "80 requests")
        for number, reader in enumerate(streams + plains):
            reader.vanish(reset=number % 2 == 0)
        server.assert_idle(10)
    after_s = latency_s(server)
    assert after_s < before_s * 1.5 + 0.02, (before_s, after_s)


@pytest.mark.user_pain("C1")
def test_queued_requests_of_gone_clients_are_never_scheduled(server: Server) -> None:
    running = [server.stream(f"long {number}", max_tokens=5000) for number in range(64)]
    for stream in running:
        stream.read_until(b"data: ", 20)
    assert _load(server) == (64, 0)
    prompts_before = server.metrics()["request_prompt_tokens_count"]
    queued = [server.stream(f"queued {number}", max_tokens=5) for number in range(20)]
    queued += [plain(server, f"queued too {number}", max_tokens=5) for number in range(20)]
    server.until(lambda: _load(server) == (64, 40), 10, "40 wait")
    for number, reader in enumerate(queued):
        reader.vanish(reset=number % 2 == 0)
    server.until(lambda: _load(server) == (64, 0), 10, "none waits")
    for stream in running:
        stream.vanish()
    server.assert_idle()
    assert server.complete("later", max_tokens=2)["usage"]["completion_tokens"] == 2
    assert server.metrics()["request_prompt_tokens_count"] == prompts_before + 1


@pytest.mark.user_pain("C2")
@pytest.mark.parametrize("what", ["queued", "prefill", "decode", "just finished", "n = 4"])
def test_a_hundred_aborts(server: Server, what: str) -> None:
    """In each phase; the free blocks are all there again."""
    fields: dict[str, object] = {"max_tokens": 5000}
    prompt: object = "abort me"
    if what == "just finished":
        fields = {"max_tokens": 3}
    elif what == "n = 4":
        fields["n"] = 4
    elif what == "prefill":
        prompt = [9] * 4000
    number = 100 if what == "queued" else 50
    for _ in range(100 // number):
        streams = [server.stream(prompt, **fields) for _ in range(number)]
        if what in ("decode", "n = 4"):
            streams[0].read_until(b"data: ", 20)
        elif what == "just finished":
            streams[-1].read_until(b"[DONE]", 20)
        for stream in streams:
            stream.vanish(reset=True)
    server.assert_idle(10)
    assert server.complete("after", max_tokens=3)["usage"]["completion_tokens"] == 3
