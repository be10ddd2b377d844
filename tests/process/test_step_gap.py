"""The device waits for nobody: what lies between two steps of a worker that always has work."""

import statistics
import threading
import time
from pathlib import Path

import pytest

from trimaran.engine_core.bench import step_cost
from trimaran.tests.server import Server

PARTS = ("build", "forward", "sample", "copy")


def busy_s(server: Server) -> float:
    metrics = server.metrics()
    return sum(metrics[f'worker_step_seconds_total{{part="{part}"}}'] for part in PARTS)


def idle_share(server: Server, num_streams: int, num_tokens: int) -> float:
    """Share of wall time that the worker spent outside steps while `num_streams` decode."""
    readers = [
        server.stream([1000 + 7 * stream, 2000 + place], max_tokens=num_tokens, temperature=0)
        for place, stream in enumerate(range(num_streams))
    ]
    threads = [threading.Thread(target=reader.read_all, args=(120,)) for reader in readers]
    for thread in threads:
        thread.start()
    server.until(lambda: server.metrics()["num_requests_running"] == num_streams, 30, "all streams run")
    shares = []
    busy, began = busy_s(server), time.monotonic()
    while all(thread.is_alive() for thread in threads):
        time.sleep(0.25)
        now_busy, now = busy_s(server), time.monotonic()
        shares.append(1 - (now_busy - busy) / (now - began))
        busy, began = now_busy, now
    for thread, reader in zip(threads, readers, strict=True):
        thread.join()
        reader.vanish()
    return statistics.median(shares[:-1] or shares)


@pytest.mark.user_pain("P2")
@pytest.mark.parametrize("num_streams", [1, 64])
def test_idle_share_between_steps(demo_folder: Path, num_streams: int) -> None:
    """A 10 ms step, as of a small model on a GPU: the next plan is there before the step ends."""
    with Server(demo_folder, script="step_ms=10 reads=last") as server:
        assert idle_share(server, num_streams, 300) < 0.15


@pytest.mark.user_pain("P2")
def test_scheduling_and_input_preparation_at_batch_64() -> None:
    assert step_cost(64, 100).total_ms < 1.0
