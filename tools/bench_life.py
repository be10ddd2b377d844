#!/usr/bin/env python3
"""How long a start takes, cold and warm, by phase; and what an idle server costs.

Prints JSON: seconds from the command to an open port and to ready, the phases of each start, the share of one core
that all processes together use while idle, and the first request after idleness against the ones that follow.

    python tools/bench_life.py --idle 60
"""

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench_host import children_of, cpu_s


class Started:
    """One server, timed from its command."""

    def __init__(self, cache: str, port: int, arguments: list[str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "trimaran.frontend.launch.commands", "serve", *arguments]
        began = time.monotonic()
        self.process = subprocess.Popen(
            [*command, "--port", str(port), "--cache-dir", cache], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.open_s = self._until(began, lambda: _connects(port))
        self.ready_s = self._until(began, self._is_ready)

    def _until(self, began: float, condition: Any) -> float:
        while not condition():
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}"
            assert time.monotonic() - began < 300, "the server did not become ready"
            time.sleep(0.005)
        return time.monotonic() - began

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5):
                return True
        except OSError:
            return False

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return dict(json.load(answer))

    def complete_s(self) -> float:
        """Seconds of one short completion."""
        body = json.dumps({"model": self.get("/v1/models")["data"][0]["id"], "prompt": "The sea", "max_tokens": 4})
        request = urllib.request.Request(
            f"{self.url}/v1/completions", body.encode(), {"Content-Type": "application/json"}
        )
        began = time.monotonic()
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
        return time.monotonic() - began

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far: the supervisor and each child."""
        pids = {self.process.pid: "supervisor", **children_of(self.process.pid)}
        return {f"{module} {pid}": cpu_s(Path(f"/proc/{pid}/stat")) for pid, module in pids.items()}

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    def report(self) -> dict[str, Any]:
        phases = [
            {"process": phase["process"], "phase": phase["name"], "took_s": round(phase["took_s"], 3)}
            for phase in self.get("/v1/server_info")["phases"]
            if phase["took_s"] is not None
        ]
        return {"port_open_s": round(self.open_s, 3), "ready_s": round(self.ready_s, 3), "phases": phases}


def _connects(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def idle(server: Started, seconds: float) -> dict[str, Any]:
    """CPU of all processes over `seconds` without traffic, then the first request against the next five."""
    for _ in range(3):
        server.complete_s()
    time.sleep(2)
    before, began = server.cpu_s(), time.monotonic()
    time.sleep(seconds)
    after, took_s = server.cpu_s(), time.monotonic() - began
    first_s = server.complete_s()
    later_s = [server.complete_s() for _ in range(5)]
    return {
        "seconds": took_s,
        "share_of_one_core": sum(after.values()) / took_s - sum(before.values()) / took_s,
        "by_process": {name: (after[name] - before[name]) / took_s for name in after},
        "first_request_after_s": first_s,
        "next_requests_median_s": statistics.median(later_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=float, default=60)
    parser.add_argument("--warm-starts", type=int, default=3)
    parser.add_argument("--port", type=int, default=18441)
    parser.add_argument("arguments", nargs="*", help="passed on to `trimaran serve`")
    options = parser.parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="trimaran-life-") as cache:
        server = Started(cache, options.port, options.arguments)
        report["cold"] = server.report()
        server.end()
        report["warm"] = []
        for start in range(options.warm_starts):
            server = Started(cache, options.port, options.arguments)
            report["warm"].append(server.report())
            if start == options.warm_starts - 1 and options.idle:
                report["idle"] = idle(server, options.idle)
            server.end()
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
