"""A whole server under test: `trimaran serve` as a user starts it, with its processes, its output and its clients."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

ROLES = {"frontend": "frontend.http.process", "core": "engine_core.process", "worker": "device_workers.process"}


def free_port() -> int:
    """A port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """Starts on entering, ends on leaving; `lines` holds what it printed. Null platform unless told otherwise.

    Without a model it serves the demo, as a user's `trimaran serve` does.
    """

    def __init__(
        self,
        model: Path | str | None,
        *arguments: str,
        script: str | None = "",
        environment: dict[str, str] | None = None,
        run_parent: Path | None = None,
        wait: bool = True,
        command: list[str] | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = tempfile.TemporaryDirectory(prefix="tri-")
        self.run_parent = run_parent or Path(self._folder.name)
        null = ["--platform", "null", "--null-script", script or "step_ms=0"] if script is not None else []
        named = [] if model is None else [str(model)]
        self.arguments = [*named, "--port", str(self.port), "--run-dir", str(self.run_parent), *null, *arguments]
        self._environment = environment or {}
        self._command = command or [sys.executable, "-P", "-m", "trimaran.frontend.launch.commands"]
        self._wait = wait
        self.lines: list[str] = []
        self.process: subprocess.Popen[str]
        self._reader: threading.Thread | None = None
        self.http = httpx.Client(base_url=self.url, timeout=60)

    @cached_property
    def openai(self) -> Any:
        """The official client. Made when asked for: where a GPU is lent it need not be installed."""
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=60, max_retries=0)

    def __enter__(self) -> "Server":
        try:
            self.start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        if kind is not None:
            sys.stderr.write("\n".join(["--- server output", *self.lines[-60:], "---\n"]))

    def start(self) -> None:
        """Spawn and, unless told not to, wait until ready."""
        self._close_output()
        self.lines = []
        self.process = subprocess.Popen(
            [*self._command, "serve", *self.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", **self._environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if self._wait:
            self.wait_ready()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def stop(self, limit_s: float = 30) -> int:
        """SIGTERM, then wait; SIGKILL where that does not help. The exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(limit_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait(10)
        self._join_reader()
        return code

    def end(self, limit_s: float = 30) -> int:
        """Stop, and give back what the test holds of it. The exit code."""
        code = self.stop(limit_s)
        self._close_output()
        self.http.close()
        if "openai" in self.__dict__:
            self.openai.close()
        self._folder.cleanup()
        return code

    def _join_reader(self) -> None:
        if self._reader is not None:
            self._reader.join(10)

    def _close_output(self) -> None:
        """Of the process before, if there was one."""
        if self._reader is not None:
            self._join_reader()
            assert self.process.stdout is not None
            self.process.stdout.close()

    def ended(self, limit_s: float) -> int:
        """Wait for it to end by itself; the exit code."""
        code = self.process.wait(limit_s)
        self._join_reader()
        return code

    @property
    def output(self) -> str:
        """All it printed so far."""
        return "\n".join(self.lines)

    # waiting

    def until(self, condition: Any, limit_s: float, what: str) -> None:
        """Poll until `condition()` is true."""
        deadline_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline_s, f"not within {limit_s} s: {what}\n{self.output[-3000:]}"
            time.sleep(0.02)

    def status(self, path: str) -> int:
        """The HTTP status of a GET, 0 when nobody answers."""
        try:
            return self.http.get(path, timeout=5, headers={"connection": "close"}).status_code
        except httpx.HTTPError:
            return 0

    def wait_ready(self, limit_s: float = 60) -> None:
        """Until every frontend's /ready answers 200."""
        num_looks = 1 if "--frontends" not in self.arguments else 8  # each connection may meet another frontend

        def is_ready() -> bool:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}\n{self.output}"
            if not self.printed("^Listening") or not all(map(self._listens, self.pids("frontend"))):
                return False
            return all(self.status("/ready") == 200 for _ in range(num_looks))

        self.until(is_ready, limit_s, "ready")

    def _listens(self, pid: int) -> bool:
        """Whether new connections may come to this frontend: a restarted one joins the others some time later."""
        try:
            connections = psutil.Process(pid).net_connections("tcp")
        except psutil.NoSuchProcess:
            return False
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == self.port for each in connections)

    def printed(self, pattern: str) -> bool:
        """Whether some line matches."""
        return any(re.search(pattern, line) for line in list(self.lines))

    # processes

    def pids(self, role: str) -> list[int]:
        """Living processes of a role, by what they run."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if any(ROLES[role] in part for part in child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child.pid)
            except psutil.NoSuchProcess:
                continue
        return sorted(found)

    def kill(self, role: str, number: int = signal.SIGKILL, which: int = 0) -> int:
        """Signal one process of a role; its pid."""
        pid = self.pids(role)[which]
        os.kill(pid, number)
        return pid

    # asking

    def metrics(self) -> dict[str, float]:
        """Metric (with its labels) to value."""
        text = self.http.get("/metrics").text
        found = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name.removeprefix("trimaran:")] = float(value)
        return found

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """One plain completion as JSON; the test fails on anything but 200."""
        answer = self.http.post("/v1/completions", json={"model": self.model, "prompt": prompt, **fields})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    @property
    def model(self) -> str:
        """The served model's name."""
        return str(self.http.get("/v1/models").json()["data"][0]["id"])

    def stream(self, prompt: Any, **fields: Any) -> "StreamReader":
        """A streamed completion on a raw connection of its own."""
        body = {"model": self.model, "prompt": prompt, "stream": True, "ignore_eos": True, **fields}
        return StreamReader(self.port, "/v1/completions", body)

    def assert_idle(self, limit_s: float = 10) -> None:
        """Nothing runs, nothing waits, every block is free."""

        def is_idle() -> bool:
            metrics = self.metrics()
            return (
                metrics["num_requests_running"]
                == metrics["num_requests_waiting"]
                == metrics["kv_cache_usage_perc"]
                == 0
            )

        self.until(is_idle, limit_s, "running = waiting = 0 and all blocks free")


class StreamReader:
    """A streaming request on a socket of its own, read when asked; it can vanish without a word."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.socket.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        self.raw = b""

    def read_until(self, needle: bytes, limit_s: float = 30) -> bytes:
        """Everything so far, once it holds `needle` or the server has closed."""
        deadline_s = time.monotonic() + limit_s
        while needle not in self.raw:
            self.socket.settimeout(max(0.05, deadline_s - time.monotonic()))
            data = self.socket.recv(65536)
            if not data:
                break
            self.raw += data
            assert time.monotonic() < deadline_s, f"{needle!r} did not come in {limit_s} s"
        return self.raw

    def read_all(self, limit_s: float = 60) -> bytes:
        """Until the server closes."""
        return self.read_until(b"\0never\0", limit_s)

    def events(self) -> list[Any]:
        """The JSON events read so far; `[DONE]` as text."""
        parts = re.findall(rb"data: (.*?)\n\n", self.raw, re.S)
        return ["[DONE]" if part == b"[DONE]" else json.loads(part) for part in parts]

    def vanish(self, *, reset: bool = False) -> None:
        """Close, or reset, without reading the rest."""
        if reset:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()
