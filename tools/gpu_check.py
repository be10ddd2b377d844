#!/usr/bin/env python3
"""Runs on a machine with a GPU what cannot run without one, and keeps what it said.

    python tools/gpu_check.py OUT [--model FOLDER] [--parts tests,suite,commands,serve]

tests: everything under tests/gpu. suite: the contract suite. commands: probe, doctor, kernels, diagnose. serve: a start
with dummy weights of the model's shape, and some tokens. Each part goes on where another failed; the exit code is 1 if
one did. With `trimaran` importable, nothing has to be installed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-P", "-m", "trimaran.frontend.launch.commands"]
PYTEST = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", "gpu", "--timeout", "400"]
NUM_SHARDS = 12
PLATFORM = "cuda"
SUITE = "trimaran.device_workers.contract_suite"
PLUGIN = f"{SUITE}.plugin"
PORT = 8765


class Parts:
    """What is run and how it ended; `summary.json` in the end."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.ended: dict[str, Any] = {}

    def run(self, name: str, command: list[str], *, limit_s: float) -> None:
        began = time.monotonic()
        with (self.out / f"{name}.txt").open("w") as log:
            try:
                code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=limit_s).returncode
            except subprocess.TimeoutExpired:
                code = 124
        self.ended[name] = {"code": code, "seconds": round(time.monotonic() - began, 1)}
        print(name, self.ended[name], flush=True)


def tests(parts: Parts) -> None:
    """The platform's alone, because they measure; those of kernels side by side, because compilers are slow."""
    parts.run("tests_platform", [*PYTEST, "tests/gpu/test_cuda_platform.py"], limit_s=240)
    listed = subprocess.run(
        [*PYTEST, "--collect-only", "tests/gpu"], capture_output=True, text=True, check=False
    ).stdout
    ids = [line for line in listed.splitlines() if "::" in line and "test_cuda_platform" not in line]
    shards = [ids[index::NUM_SHARDS] for index in range(NUM_SHARDS)]
    began = time.monotonic()
    with (parts.out / "tests_kernels.txt").open("w") as log:
        running = [
            subprocess.Popen([*PYTEST, *shard], stdout=log, stderr=subprocess.STDOUT) for shard in shards if shard
        ]
        codes = [_wait(process, began + 420) for process in running]
    parts.ended["tests_kernels"] = {"codes": codes, "code": max(codes, default=1), "seconds": time.monotonic() - began}
    print("tests_kernels", parts.ended["tests_kernels"], flush=True)


def _wait(process: subprocess.Popen[bytes], ends: float) -> int:
    try:
        return process.wait(max(1.0, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return 124


def suite(parts: Parts) -> None:
    found = entry_points(group="pytest11")  # an installed package's; beside one that is only importable it is named
    plugin = [] if any(entry.value == PLUGIN for entry in found) else ["-p", PLUGIN]
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", *plugin, "-v", "--platform", PLATFORM]
    parts.run("suite", [*command, "--pyargs", SUITE], limit_s=300)


def commands(parts: Parts) -> None:
    parts.run("probe", [*COMMAND, "probe"], limit_s=60)
    parts.run("doctor", [*COMMAND, "doctor"], limit_s=180)
    parts.run("kernels", [*COMMAND, "kernels", "check"], limit_s=180)
    parts.run("diagnose", [*COMMAND, "diagnose", "--output", str(parts.out / "measured.yaml")], limit_s=240)


def serve(parts: Parts, model: Path, ranks: int) -> None:
    """Start, wait, two identical greedy completions, the engine's own account, stop."""
    log = (parts.out / "serve.txt").open("w")
    command = [*COMMAND, "serve", str(model), "--load-format", "dummy", "--port", str(PORT)]
    command += ["--tensor-parallel", str(ranks)]
    began = time.monotonic()
    server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_ready(server, limit_s=180)
        ready_s = time.monotonic() - began
        name = _get("/v1/models")["data"][0]["id"]
        body = {"model": name, "prompt": "Once upon a time", "max_tokens": 64, "temperature": 0}
        took, texts = [], []
        for _ in range(3):
            start = time.monotonic()
            texts.append(_post("/v1/completions", body)["choices"][0]["text"])
            took.append(round(time.monotonic() - start, 3))
        (parts.out / "server_info.json").write_text(json.dumps(_get("/v1/server_info"), indent=1))
        code = 0 if len(set(texts)) == 1 and texts[0] else 1
        parts.ended["serve"] = {"code": code, "ready_s": round(ready_s, 2), "64_tokens_s": took}
    except Exception as error:
        parts.ended["serve"] = {"code": 1, "error": repr(error)}
    finally:
        server.terminate()
        server.wait(60)
    print("serve", parts.ended["serve"], flush=True)


def _wait_ready(server: subprocess.Popen[bytes], limit_s: float) -> None:
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            _get("/ready")
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError("not ready")


def _get(path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=30) as answer:
        return json.loads(answer.read() or b"null")


def _post(path: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="folder with config.json and tokenizer.json")
    parser.add_argument("--ranks", type=int, default=1, help="devices that the served model is split over")
    parser.add_argument("--parts", default="tests,suite,commands,serve")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    parts = Parts(arguments.out)
    run: dict[str, Callable[[], None]] = {
        "tests": lambda: tests(parts),
        "suite": lambda: suite(parts),
        "commands": lambda: commands(parts),
    }
    if arguments.model is not None:
        run["serve"] = lambda: serve(parts, arguments.model, arguments.ranks)
    for name in arguments.parts.split(","):
        if name in run:
            run[name]()
    (arguments.out / "summary.json").write_text(json.dumps(parts.ended, indent=1))
    return int(any(ended["code"] for ended in parts.ended.values()))


if __name__ == "__main__":
    sys.exit(main())
