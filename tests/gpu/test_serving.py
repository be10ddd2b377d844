"""A server on the GPU: a device that breaks under load, and thousands of requests without growth.

python -m pytest -m gpu tests/gpu/test_serving.py
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from trimaran.tools.device_bench.model_shapes import QWEN3_600M, write_model

from ..faults.bad_package import BadPackage
from ..server import Server

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]
_TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 2048,
}
NUM_REQUESTS = 30_000
LOAD_LIMIT_S = 360.0
NUM_CLIENTS = 48
DEVICE_GROWTH_BYTES = 32 << 20
HOST_GROWTH_SHARE = 0.05
_MOST = ("--max-model-len", "512", "--kv-memory-bytes", str(256 << 20), "--max-num-seqs", "64")
SIZES = ("--platform", "cuda", "--load-format", "dummy", *_MOST)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and a tokenizer: what a server needs."""
    return write_model(tmp_path_factory.mktemp("tiny"), {**QWEN3_600M, **_TINY})


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.user_pain("C8")
@pytest.mark.timeout(240)
def test_a_broken_device_ends_the_worker_and_service_recovers(model: Path, cache: Path, tmp_path: Path) -> None:
    """The log names the requests and the sizes of the steps that were lost; nothing is tried again on that device."""
    package = BadPackage(tmp_path, "rms_norm", "breaks the device")
    options: dict[str, Any] = {"script": None, "environment": package.environment}
    with Server(model, *SIZES, "--cache-dir", str(cache), **options) as server:
        before = server.complete([5, 6, 7], max_tokens=8, temperature=0)["choices"][0]["text"]
        worker = server.pids("worker")
        answers: list[httpx.Response] = []

        def ask(place: int) -> None:
            body = {"prompt": [3 + place, 4, 5], "max_tokens": 400, "ignore_eos": True}
            answers.append(server.http.post("/v1/completions", json=body))

        threads = [threading.Thread(target=ask, args=(place,)) for place in range(3)]
        for thread in threads:
            thread.start()
        server.until(lambda: server.metrics()["num_requests_running"] == 3, 20, "all three run")
        package.strike()
        began = time.monotonic()
        for thread in threads:
            thread.join(60)
        assert time.monotonic() - began < 10, "whoever waits hears of it"
        assert [answer.status_code for answer in answers] == [503] * 3
        server.wait_ready(120)
        assert server.pids("worker") != worker
        log = server.output
        assert re.search(r"DeviceFault: .*(step \d+ \(\d+ sequences, \d+ tokens\)|launch of kernel)", log), log[-4000:]
        assert re.search(r"lost in generation 1: step \d+ \(3 sequences, \d+ tokens, .*\) with requests \[\d+", log)
        assert not [entry for entry in server.http.get("/v1/server_info").json()["kernels"] if entry["demoted"]]
        assert server.metrics()["engine_generation"] == 2
        assert server.complete([5, 6, 7], max_tokens=8, temperature=0)["choices"][0]["text"] == before
        server.assert_idle()


class Memory:
    """What the server's processes and the device hold now."""

    def __init__(self, server: Server) -> None:
        processes = [psutil.Process(pid) for role in ("frontend", "core", "worker") for pid in server.pids(role)]
        self.host = {process.pid: process.memory_info().rss for process in processes}
        free, total = torch.cuda.mem_get_info(0)
        self.device = total - free


def bodies() -> Iterator[dict[str, Any]]:
    """Requests of every kind, the same in each run."""
    chance = random.Random(11)
    while True:
        length = chance.choice((1, 3, 15, 16, 17, 40, 100, 200))
        body: dict[str, Any] = {
            "prompt": [chance.randrange(3, 200) for _ in range(length)],
            "max_tokens": chance.choice((1, 2, 8, 20)),
            "ignore_eos": True,
        }
        body |= chance.choice(
            (
                {"temperature": 0},
                {"temperature": 0},
                {"temperature": 0.8},
                {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "seed": 3},
                {"temperature": 0.7, "min_p": 0.1, "presence_penalty": 0.5, "repetition_penalty": 1.1},
                {"temperature": 0, "logprobs": 3},
                {"temperature": 0, "n": 2, "logit_bias": {"7": 2.0}},
            )
        )
        yield body


@pytest.mark.timeout(500)
def test_thousands_of_requests_leave_no_trace(model: Path, cache: Path) -> None:
    """Memory of device and host after a tenth of them is that at the end, and nothing was compiled while serving."""
    with Server(model, *SIZES, "--cache-dir", str(cache), "--frontends", "4", script=None) as server:
        stream, lock = bodies(), threading.Lock()
        ends = time.monotonic() + LOAD_LIMIT_S
        done = 0
        early: list[Memory] = []

        def client() -> None:
            nonlocal done
            with httpx.Client(base_url=server.url, timeout=60) as http:
                while True:
                    with lock:
                        if done >= NUM_REQUESTS or time.monotonic() > ends:
                            return
                        body, number = next(stream), done
                        done += 1
                        if number == NUM_REQUESTS // 10 or (not early and time.monotonic() > ends - 0.8 * LOAD_LIMIT_S):
                            early.append(Memory(server))
                    answer = http.post("/v1/completions", content=json.dumps(body))
                    assert answer.status_code == 200, answer.text

        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            for future in [pool.submit(client) for _ in range(NUM_CLIENTS)]:
                future.result()
        server.assert_idle()
        late, before = Memory(server), early[0]
        print(f"{done} requests; device {late.device - before.device:+d} bytes, host {late.host} from {before.host}")
        assert late.device - before.device < DEVICE_GROWTH_BYTES
        assert late.host.keys() == before.host.keys(), "a process was restarted"
        for pid, size in late.host.items():
            assert size < before.host[pid] * (1 + HOST_GROWTH_SHARE) + (16 << 20), f"process {pid} grew"
        assert server.metrics()["kernels_compiled_after_ready_total"] == 0
