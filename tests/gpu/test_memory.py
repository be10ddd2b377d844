"""Memory and the start on the GPU, as a user meets them: refusals that name what fits, budgets that are kept, phases
that add up.

python -m pytest -m gpu tests/gpu/test_memory.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from trimaran.tools import bench_device
from trimaran.tools.device_bench.model_shapes import QWEN3_600M, write_model

from ..faults.bad_package import BadPackage
from ..server import Server

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
    pytest.mark.timeout(300),
]
_SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 4096,
}
DUMMY = ("--platform", "cuda", "--load-format", "dummy")
_MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("small"), {**QWEN3_600M, **_SMALL})


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One for all, so that kernels are compiled and checked once."""
    return str(tmp_path_factory.mktemp("cache"))


def used_bytes() -> int:
    """Of the device, by whoever."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def total_bytes() -> int:
    return torch.cuda.mem_get_info(0)[1]


@contextmanager
def neighbour(num_bytes: int) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds so much of the device until a line is written to it."""
    code = (
        f"import sys, torch\nx = torch.empty({num_bytes}, dtype=torch.int8, device='cuda')\ntorch.cuda.synchronize()\n"
        "print('held', flush=True)\nsys.stdin.readline()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline().strip() == "held"
        yield process
    finally:
        process.communicate("\n")


def refusal(model: Path, *options: str) -> str | None:
    """The last line of a server that does not start; None of one that does, and that then answers."""
    with Server(model, *DUMMY, *options, script=None, wait=False) as server:
        server.until(lambda: server.process.poll() is not None or server.status("/ready") == 200, 120, "an end of it")
        if server.process.poll() is None:
            server.complete([5, 6, 7], max_tokens=2)
            return None
        assert server.ended(10) == 2, server.output
        return server.lines[-1]


@pytest.mark.user_pain("M1")
def test_m1_a_context_that_does_not_fit_is_refused_and_the_named_one_is_served(model: Path, cache: str) -> None:
    options = ("--kv-memory-bytes", str(16 * _MIB), "--cache-dir", cache)
    last = refusal(model, *options, "--max-model-len", "4096")
    assert last is not None
    named = re.search(r"[\d.]+ [GM]iB.*available.*start with --max-model-len (\d+)", last)
    assert named, last
    with Server(model, *DUMMY, *options, "--max-model-len", named.group(1), script=None) as server:
        length = int(named.group(1))
        assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == length
        prompt = [5 + place % 90 for place in range(length - 4)]
        (choice,) = server.complete(prompt, max_tokens=4, ignore_eos=True)["choices"]
        assert choice["finish_reason"] == "length"


@pytest.mark.user_pain("M3")
def test_m3_each_fraction_starts_or_names_one_that_does(model: Path, cache: str) -> None:
    """While a neighbour holds more than half of the device: below, at and above what is left by it."""
    outcomes = set()
    with neighbour(int(total_bytes() * 0.55)):
        for fraction in ("0.30", "0.56", "0.74", "0.98"):
            last = refusal(model, "--memory-utilization", fraction, "--cache-dir", cache)
            if last is None:
                outcomes.add("starts")
                continue
            named = re.search(r"raise --memory-utilization (?:from [\d.]+ to|to) ([\d.]+)", last)
            assert named and float(named.group(1)) > float(fraction), last
            assert refusal(model, "--memory-utilization", named.group(1), "--cache-dir", cache) is None
            outcomes.add("named one that does")
    assert outcomes == {"starts", "named one that does"}


@pytest.mark.user_pain("M2")
@pytest.mark.user_pain("M4")
def test_m4_a_neighbour_that_lets_go_meanwhile_does_no_harm(model: Path, cache: str) -> None:
    with neighbour(2 << 30) as other:
        options = (*DUMMY, "--memory-utilization", "0.5", "--cache-dir", cache)
        with Server(model, *options, script=None, wait=False) as server:
            server.until(lambda: server.printed("kernels|weights|rehearsal"), 60, "the device is open")
            assert other.stdin is not None
            other.stdin.write("\n")
            other.stdin.flush()
            other.wait(30)
            server.wait_ready(120)
            server.complete([5, 6, 7], max_tokens=2)


@pytest.mark.user_pain("M5")
def test_m5_the_largest_batch_of_the_longest_prompts_stays_within_what_was_announced(model: Path, cache: str) -> None:
    """Every row full to the limit, twice over, with log probabilities and penalties."""
    length, rows = 1024, 64
    sizes = ("--max-model-len", str(length), "--max-num-seqs", str(rows), "--kv-memory-bytes", str(2 << 30))
    with Server(model, *DUMMY, *sizes, "--cache-dir", cache, script=None) as server:
        before, answers = used_bytes(), []
        peak = [before]

        def ask(number: int) -> None:
            prompt = [(100 + 31 * number + 7 * place) % 4000 for place in range(length - 16)]
            body = {"model": server.model, "prompt": prompt, "max_tokens": 16, "ignore_eos": True, "seed": number}
            sampling = {"temperature": 0.9, "top_p": 0.9, "logprobs": 5, "presence_penalty": 0.5, "n": 1 + number % 2}
            answers.append(httpx.post(f"{server.url}/v1/completions", json=body | sampling, timeout=110))

        crowd = [threading.Thread(target=ask, args=(number,)) for number in range(2 * rows)]
        for thread in crowd:
            thread.start()
        while any(thread.is_alive() for thread in crowd):
            peak.append(used_bytes())
            time.sleep(0.01)
        assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers][-1]
        assert len(answers) == 2 * rows
        print(f"before the load {before / _MIB:.0f} MiB, at most {max(peak) / _MIB:.0f}")
        assert max(peak) - before <= 0.02 * total_bytes(), "steps took memory that was not set aside before"
        server.assert_idle()


@pytest.mark.user_pain("M6")
def test_m6_a_step_without_memory_costs_its_requests_and_no_more(model: Path, cache: str, tmp_path: Path) -> None:
    package = BadPackage(tmp_path, "rms_norm", "exhausts the device")
    options: dict[str, Any] = {"script": None, "environment": package.environment}
    with Server(model, *DUMMY, "--cache-dir", cache, "--max-num-seqs", "16", **options) as server:
        worker = server.pids("worker")
        before = server.complete([5, 6, 7], max_tokens=8, temperature=0)["choices"][0]["text"]
        answers: list[httpx.Response] = []

        def ask() -> None:
            body = {"model": server.model, "prompt": [8, 9], "max_tokens": 4000, "ignore_eos": True, "n": 4}
            answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))

        thread = threading.Thread(target=ask)
        thread.start()
        server.until(lambda: server.metrics()["num_requests_running"] == 1, 20, "it runs")
        package.strike()
        began = time.monotonic()
        thread.join(60)
        assert time.monotonic() - began < 10
        (answer,) = answers
        assert answer.status_code >= 500 and "memory" in answer.json()["error"]["message"], answer.text
        assert server.complete([5, 6, 7], max_tokens=8, temperature=0)["choices"][0]["text"] == before
        assert server.pids("worker") == worker, "the device is sound, and so is its worker"
        server.assert_idle()


@pytest.mark.user_pain("M7")
@pytest.mark.parametrize("fraction", [0.4, 0.9])
def test_m7_no_more_than_the_fraction_is_used_and_the_parts_add_up(model: Path, cache: str, fraction: float) -> None:
    """Recordings among them; all sizes are told apart in the server's facts and in its log."""
    empty = used_bytes()
    options = ("--memory-utilization", str(fraction), "--cache-dir", cache)
    with Server(model, *DUMMY, *options, script=None) as server:
        used = used_bytes()
        memory = server.http.get("/v1/server_info").json()["memory"]
    assert {"weights", "activations", "kv_cache", "graphs"} <= memory.keys()
    assert used <= (fraction + 0.02) * total_bytes()
    assert sum(memory.values()) == pytest.approx(used - empty, rel=0.03, abs=1 << 30), memory
    told = next(line for line in server.lines if line.startswith("memory = "))
    for part, size in memory.items():
        assert f"{part.replace('_', ' ')} {size / 2**30:.2f} GiB" in told


@pytest.mark.user_pain("M8")
def test_m8_phases_add_up_and_the_second_start_compiles_next_to_nothing(model: Path, tmp_path: Path) -> None:
    options = ("--cache-dir", str(tmp_path / "cache"))
    environment = {"TRITON_CACHE_DIR": str(tmp_path / "compiled")}
    starts = [_timed_start(model, *options, environment=environment) for _ in range(2)]
    for took, phases in starts:
        assert sum(phases.values()) == pytest.approx(took, rel=0.05, abs=0.3), phases
    compiling = [
        sum(phases.get(name, 0.0) for name in ("kernel compilation", "kernels", "rehearsal", "step compilation"))
        for _, phases in starts
    ]
    print(f"compiled and checked in {compiling[0]:.1f} s, then in {compiling[1]:.1f} s")
    assert compiling[1] < 0.3 * compiling[0]
    took, phases = _timed_start(model, *options, "--enforce-eager", environment=environment)
    with_graphs = starts[1][1]
    assert phases.get("warm-up", 0.0) <= with_graphs.get("warm-up", 0.0)


def _timed_start(model: Path, *options: str, environment: dict[str, str]) -> tuple[float, dict[str, float]]:
    with Server(model, *DUMMY, *options, script=None, environment=environment) as server:
        info = server.http.get("/v1/server_info").json()
    ready = next(found for line in server.lines if (found := re.match(r"Ready after ([\d.]+) s", line)))
    return float(ready.group(1)), {phase["name"]: phase["took_s"] or 0.0 for phase in info["phases"]}


@pytest.mark.user_pain("P2")
def test_p2_the_device_hardly_waits_between_steps(tmp_path: Path) -> None:
    """Of the time between tokens that streams of a small model see: the share that the device is idle."""
    record = tmp_path / "figures.json"
    command = [sys.executable, bench_device.__file__, "profile", str(tmp_path), "--record", str(record)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(record.read_text())["profile"]["figures"]["trimaran"]["seen"]
    print(seen)
    for size in ("1", "64"):
        assert seen[size]["idle_share"] < 0.15, seen
    assert seen["64"]["core_ms"] + seen["64"]["build_ms"] < 1.0
