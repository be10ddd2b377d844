#!/usr/bin/env python3
"""What the host path costs: null platform, real HTTP, real tokenizer, raw-socket clients in a process of their own.

Prints JSON: the share of the ideal token rate that clients receive, the longest gap in any stream, and streamed tokens
per CPU-second of a frontend process (all threads), per CPU-second of its Python thread, and per CPU-second of the core.

    python tools/bench_host.py --streams 256 --step-ms 10 --tokens 500 --frontends 1
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import msgspec

from trimaran.frontend.bench.load import Load
from trimaran.frontend.bench.stream_client import Outcome
from trimaran.frontend.bench.workload import Ask

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(stat: Path) -> float:
    """User and system seconds in a /proc stat file."""
    fields = stat.read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def children_of(pid: int) -> dict[int, str]:
    """Our processes below the supervisor, by the module they run."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        if parent == pid:
            found[int(entry.name)] = next((part.decode() for part in command if part.startswith(b"trimaran.")), "?")
    return found


def usage(pids: dict[int, str]) -> dict[str, float]:
    """CPU seconds so far, by role; a frontend's Python thread is its main thread."""
    spent: dict[str, float] = {"frontend": 0.0, "frontend python thread": 0.0, "core": 0.0, "worker": 0.0}
    for pid, module in pids.items():
        process = cpu_s(Path(f"/proc/{pid}/stat"))
        if "frontend" in module:
            spent["frontend"] += process
            spent["frontend python thread"] += cpu_s(Path(f"/proc/{pid}/task/{pid}/stat"))
        elif "engine_core" in module:
            spent["core"] += process
        else:
            spent["worker"] += process
    return spent


def wait_ready(url: str, server: subprocess.Popen[bytes], limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        assert server.poll() is None, f"the server ended with {server.returncode}"
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not become ready")


def drive(load: Load) -> list[Outcome]:
    """Run the load in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "trimaran.frontend.bench.load"],
        input=msgspec.json.encode(load),
        stdout=subprocess.PIPE,
        check=True,
    )
    return msgspec.msgpack.decode(done.stdout, type=list[Outcome])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=10)
    parser.add_argument("--frontends", type=int, default=1)
    parser.add_argument("--port", type=int, default=18431)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--model", default=None, help="a directory with a tokenizer; default: the demo model")
    options = parser.parse_args()
    command = [sys.executable, "-m", "trimaran.frontend.launch.commands", "serve"]
    command += [options.model] if options.model else []
    command += [
        "--platform",
        "null",
        "--null-script",
        f"step_ms={options.step_ms:g} reads=last",
        "--port",
        str(options.port),
    ]
    command += ["--frontends", str(options.frontends), "--max-num-seqs", str(max(options.streams, 16))]
    command += ["--max-batched-tokens", str(max(8192, options.streams * options.prompt_tokens))]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{options.port}"
    try:
        wait_ready(url, server)
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            model = json.load(answer)["data"][0]["id"]
        prompts = [[1000 + (stream * 37 + place) % 20_000 for place in range(options.prompt_tokens)]
                   for stream in range(options.streams)]  # fmt: skip
        load = Load(
            host="127.0.0.1", port=options.port, model=model, asks=[Ask(prompt, 8) for prompt in prompts], timeout_s=600
        )
        drive(load)  # warm-up
        pids = children_of(server.pid)
        before = usage(pids)
        outcomes = drive(msgspec.structs.replace(load, asks=[Ask(prompt, options.tokens) for prompt in prompts]))
        after = usage(pids)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    failed = [outcome.error for outcome in outcomes if not outcome.success]
    spent = {name: after[name] - before[name] for name in after}
    num_tokens = sum(outcome.output_tokens for outcome in outcomes)
    first = min(outcome.started_s + outcome.ttft_s for outcome in outcomes)
    last = max(outcome.started_s + outcome.latency_s for outcome in outcomes)
    ideal_s = (options.tokens - 1) * options.step_ms / 1e3
    report = {
        "streams": options.streams,
        "frontends": options.frontends,
        "step_ms": options.step_ms,
        "tokens": num_tokens,
        "failed": failed[:3],
        "num_failed": len(failed),
        "share_of_ideal_rate": sum(ideal_s / (o.latency_s - o.ttft_s) for o in outcomes) / len(outcomes),
        "share_of_ideal_rate_with_ramp": ideal_s / (last - first),
        "longest_gap_ms": max(max(outcome.itls_s, default=0.0) for outcome in outcomes) * 1e3,
        "cpu_s": spent,
        "tokens_per_frontend_cpu_s": num_tokens / max(spent["frontend"], TICK_S),
        "tokens_per_python_thread_s": num_tokens / max(spent["frontend python thread"], TICK_S),
        "tokens_per_core_cpu_s": num_tokens / max(spent["core"], TICK_S),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
