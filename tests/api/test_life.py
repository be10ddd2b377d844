"""Requests and processes coming and going. Rows C1, C3, C5, C6, C7, P1, P3, O4."""

import json
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from trimaran.ipc.control import CoreLost, CoreStarted, Drain, Drained, PhaseNotice, Stop
from trimaran.ipc.facts import Phase
from trimaran.tests.api.conftest import Served, eventually, limits_of, talking_to
from trimaran.tests.api.fake_core import FakeCore
from trimaran.tests.api.frontend_process import FrontendProcess

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1000}


@pytest.fixture
def own(served: Served, model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A frontend and core of the test's own, to be ended."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="tri") as directory:
        core = FakeCore(Path(directory), limits_of(served.model)).start()
        frontend = FrontendProcess(core.address, model_directory)
        try:
            with talking_to(core, frontend.wait_ready(), served.model) as own:
                yield own
        finally:
            frontend.stop()
            core.stop()


def open_stream(served: Served, body: dict[str, Any], *, stream: bool = True) -> socket.socket:
    """A request on a raw socket."""
    data = json.dumps({**body, "stream": stream}).encode()
    connection = socket.create_connection(("127.0.0.1", served.frontend.port))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        + b"Content-Length: %d\r\n\r\n" % len(data)
        + data
    )
    return connection


def drop(connection: socket.socket, *, reset: bool) -> None:
    """Close, or reset."""
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_loading_answers_503_with_phase(served: Served, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/nobody"
    frontend = FrontendProcess(address, None, index=7)
    try:
        phase = Phase(name="load weights", process="worker 0", began_s=0.0, detail="1.2 of 4 GB")
        frontend.link.send(PhaseNotice(phase, 3.5))
        url = frontend.url
        eventually(lambda: "load weights" in httpx.get(f"{url}/ready").text)
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/version").status_code == 200
        for method, path in (
            ("GET", "/ready"),
            ("GET", "/v1/models"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/completions"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
        ):
            response = httpx.request(method, f"{url}{path}", json=CHAT if method == "POST" else None)
            assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
            message = response.json()["error"]["message"]
            assert "load weights" in message and "1.2 of 4 GB" in message and " s since" in message
        assert httpx.get(f"{url}/v1/server_info").status_code == 503
        assert "http_requests_total" in httpx.get(f"{url}/metrics").text
    finally:
        frontend.stop()


def test_c1_clients_that_leave_are_aborted(served: Served) -> None:
    served.core.step_s = 0.005
    served.says("word " * 400, ends=False)
    for round in range(3):
        served.core.paused = round == 2  # queued requests of gone clients too
        connections = [open_stream(served, CHAT, stream=index % 2 == 0) for index in range(40)]
        eventually(lambda: len(served.core.live) == 40)
        for index, connection in enumerate(connections):
            drop(connection, reset=index % 4 >= 2)
        eventually(lambda: not served.core.live, 10)
        assert len(served.core.aborts) == 40 * (round + 1)
    served.core.paused = False
    assert sorted(served.core.terminals) == sorted(submit.request_id for submit in served.core.submits)
    eventually(lambda: "http_disconnects_total 120" in served.http.get("/metrics").text.replace(".0\n", "\n"))


def test_c7_failure_after_the_first_tokens(served: Served) -> None:
    served.core.step_s = 0.01
    served.says("word " * 400, ends=False)
    served.core.fail_after = 5
    lines: list[str] = []
    with served.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            lines += [line] if line else []
    assert "[DONE]" not in "".join(lines)
    errors = [line for line in lines if line.startswith('data: {"error"')]
    assert errors == lines[-1:]
    error = json.loads(lines[-1][6:])["error"]
    assert error["code"] == "step_failed" and "memory" in error["message"]
    plain = served.http.post("/v1/chat/completions", json=CHAT)
    assert plain.status_code == 500 and plain.json()["error"]["code"] == "step_failed"
    with pytest.raises(Exception, match="out of memory"):
        list(served.openai.chat.completions.create(model="test-model", messages=CHAT["messages"], stream=True))  # type: ignore[call-overload]


def in_background(work: Any) -> tuple[threading.Thread, list[Any]]:
    """Run in a thread; the list gets the result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


def read_stream(url: str) -> list[str]:
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**CHAT, "stream": True}, timeout=20) as response:
        return [line for line in response.iter_lines() if line]


def test_c3_core_lost_and_back(own: Served) -> None:
    own.says("word " * 400, ends=False)
    own.core.step_s = 0.02
    streams = [in_background(lambda: read_stream(own.frontend.url)) for _ in range(5)]
    plain = in_background(lambda: httpx.post(f"{own.frontend.url}/v1/chat/completions", json=CHAT, timeout=20))
    eventually(lambda: len(own.core.live) == 6)
    time.sleep(0.2)  # every stream has begun
    own.core.paused = own.core.silent = True
    began_s = time.monotonic()
    own.frontend.link.send(CoreLost(1, "killed by signal 9"))
    for thread, _ in [*streams, plain]:
        thread.join(3)
    assert time.monotonic() - began_s < 2
    for _, [lines] in streams:
        assert sum("error" in line for line in lines) == 1
        assert json.loads(lines[-1][6:])["error"]["code"] == "core_lost"
    assert plain[1][0].status_code == 503
    refused = own.http.post("/v1/chat/completions", json=CHAT)
    assert refused.status_code == 503 and "retry-after" in refused.headers
    own.core.live.clear()
    own.core.incarnation = 2
    own.core.paused = own.core.silent = False
    own.frontend.link.send(CoreStarted(2))
    own.frontend.wait_ready()
    own.core.step_s = 0.001
    assert own.http.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert own.core.submits[-1].core_incarnation == 2


def test_c5_a_silent_core_is_not_ready(own: Served) -> None:
    assert own.http.get("/ready").status_code == 200
    own.core.silent = True
    eventually(lambda: own.http.get("/ready").status_code == 503, 8)
    assert "silent" in own.http.get("/ready").text
    assert own.http.get("/health").status_code == 200
    own.core.silent = False
    eventually(lambda: own.http.get("/ready").status_code == 200)
    own.core.ready, own.core.reason = False, "a step runs for 31 s"
    eventually(lambda: "a step runs for 31 s" in own.http.get("/ready").text)


def test_c6_drain_lets_streams_end(own: Served) -> None:
    own.core.step_s = 0.01
    own.says("word " * 30)
    thread, results = in_background(lambda: read_stream(own.frontend.url))
    eventually(lambda: len(own.core.live) == 1)
    own.frontend.link.send(Drain(10.0))
    eventually(lambda: own.http.get("/ready").status_code == 503, 1)
    refused = own.http.post("/v1/chat/completions", json=CHAT)
    assert refused.status_code == 503 and "shutting down" in refused.text
    own.frontend.hear(Drained, 5)
    assert not own.core.live, "drained while a stream ran"
    thread.join(5)
    assert results[0][-1] == "data: [DONE]"
    own.frontend.link.send(Stop())
    assert own.frontend.process.wait(5) == 0


def test_c6_stop_ends_streams_with_an_error_event(own: Served) -> None:
    own.core.step_s = 0.02
    own.says("word " * 500, ends=False)
    streams = [in_background(lambda: read_stream(own.frontend.url)) for _ in range(5)]
    plain = in_background(lambda: httpx.post(f"{own.frontend.url}/v1/chat/completions", json=CHAT, timeout=20))
    eventually(lambda: len(own.core.live) == 6)
    time.sleep(0.2)
    own.frontend.link.send(Stop())
    assert own.frontend.process.wait(5) == 0
    for thread, _ in [*streams, plain]:
        thread.join(2)
    for _, [lines] in streams:
        assert json.loads(lines[-1][6:])["error"]["code"] == "shutdown"
    assert plain[1][0].status_code == 503
    eventually(lambda: not own.core.live)


def test_frontend_dies_with_its_parent(own: Served) -> None:
    """The death pipe's write end closes when the parent ends."""
    import os

    os.close(own.frontend._death_write)
    own.frontend._death_write = os.open("/dev/null", os.O_RDONLY)
    assert own.frontend.process.wait(5) != 0


def test_slow_reader_is_cut(own: Served) -> None:
    memory = psutil.Process(own.frontend.process.pid)
    own.core.step_s = 0.0
    text = own.model.tokenizer.encode("x", add_special_tokens=False)
    own.core.script = lambda submit, prompt, choice: text
    own.core.limits = limits_of(own.model)
    before = memory.memory_info().rss
    body = {**CHAT, "n": 64, "max_tokens": 2000}
    connections = []
    for _ in range(2):
        connection = open_stream(own, body)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connections.append(connection)
    eventually(lambda: len(own.core.aborts) == 2, 40)
    assert memory.memory_info().rss - before < 60 << 20
    for connection in connections:
        connection.close()
    eventually(lambda: "http_slow_readers_total 2" in own.http.get("/metrics").text)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def test_p1_health_while_256_streams_run(served: Served) -> None:
    served.core.step_s = 0.02
    served.says("word " * 600, ends=False)
    connections = [open_stream(served, CHAT) for _ in range(256)]
    stopping = threading.Event()

    def read_all() -> None:
        while not stopping.is_set():
            for connection in connections:
                connection.setblocking(False)
                try:
                    connection.recv(65536)
                except BlockingIOError:
                    pass
            time.sleep(0.005)

    reader = threading.Thread(target=read_all, daemon=True)
    reader.start()
    eventually(lambda: len(served.core.live) == 256, 10)
    took: list[float] = []
    for _ in range(60):
        began_s = time.monotonic()
        assert served.http.get("/health").status_code == 200
        took.append(time.monotonic() - began_s)
    assert percentile(took, 0.99) < 0.25, took
    stopping.set()
    reader.join()
    for connection in connections:
        connection.close()
    eventually(lambda: not served.core.live, 10)


def test_p3_a_long_prompt_does_not_freeze_others(served: Served) -> None:
    served.core.step_s = 0.01
    served.says("word " * 300, ends=False)
    gaps: list[float] = []
    text = " ".join(f"word{index}" for index in range(220_000))
    assert len(text) > 2_000_000

    def send_long() -> httpx.Response:
        return httpx.post(f"{served.frontend.url}/v1/completions", json={"prompt": text}, timeout=60)

    with served.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True, "max_tokens": 500}) as stream:
        lines = stream.iter_lines()
        next(lines)
        thread, results = in_background(send_long)
        last_s = time.monotonic()
        for _ in lines:
            now_s = time.monotonic()
            gaps.append(now_s - last_s)
            last_s = now_s
            if not thread.is_alive():
                break
    thread.join(30)
    assert results[0].status_code == 400 and results[0].json()["error"]["code"] == "context_length_exceeded"
    assert max(gaps) < 0.3 + percentile(gaps, 0.5), max(gaps)


def test_o4_metrics(own: Served) -> None:
    own.says("one two three")
    for _ in range(3):
        own.http.post("/v1/chat/completions", json=CHAT)
    own.http.post("/v1/chat/completions", content=b"{")
    time.sleep(0.4)
    assert own.core.reports
    text = own.http.get("/metrics").text
    route = 'trimaran:http_requests_total{method="POST",route="/v1/chat/completions"'
    assert f'{route},status="200"}} 3.0' in text
    assert f'{route},status="400"}} 1.0' in text or f'{route},status="415"}} 1.0' in text
    assert f"trimaran:generation_tokens_total {own.core.num_tokens}.0" in text
    assert 'trimaran:time_to_first_token_seconds_bucket{le="+Inf"} 6.0' in text
    assert all(float(line.split()[-1]) >= 0 for line in text.splitlines() if line and line[0] != "#")
    report = next(iter(own.core.reports.values()))[0]
    told = {(sample.labels["route"], sample.labels["status"]): sample.value for sample in report.samples}
    assert told["/v1/chat/completions", "200"] == 3  # pushed without being asked for
    own.http.get("/some/path/nobody/knows")
    assert "nobody" not in own.http.get("/metrics").text
    own.core.stop()
    again = own.http.get("/metrics")
    assert again.status_code == 200 and "trimaran:generation_tokens_total" in again.text


def test_request_ids_are_unique_over_frontends(served: Served, model_directory: Path) -> None:
    other = FrontendProcess(served.core.address, model_directory, index=9)
    try:
        other.wait_ready()
        for url in (served.frontend.url, other.url):
            for _ in range(3):
                assert httpx.post(f"{url}/v1/chat/completions", json=CHAT).status_code == 200
        ids = [submit.request_id for submit in served.core.submits]
        assert len(set(ids)) == 6 and all(0 < id < 2**63 for id in ids)
    finally:
        other.stop()


def test_port_opens_soon_and_modules_are_few(served: Served) -> None:
    began_s = time.monotonic()
    frontend = FrontendProcess(served.core.address, None, index=8)
    took_s = time.monotonic() - began_s
    frontend.stop()
    assert took_s < 2.0
    code = (
        "import sys, trimaran.frontend.http.process, trimaran.frontend.client.llm;"
        "print([name for name in ('torch', 'triton', 'transformers', 'pickle5') if name in sys.modules])"
    )
    import sys

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_two_frontends_share_a_port(own: Served, model_directory: Path) -> None:
    other = FrontendProcess(own.core.address, model_directory, index=1, port=own.frontend.port)
    try:
        eventually(lambda: {hello.index for hello in own.core.hellos} == {0, 1})

        def who_answers() -> set[int]:
            for _ in range(10):
                assert httpx.post(f"{other.url}/v1/chat/completions", json={**CHAT, "max_tokens": 2}).status_code in (
                    200,
                    503,  # the second one still reads its tokenizer
                )
            return {submit.request_id >> 52 for submit in own.core.submits}

        eventually(lambda: who_answers() == {0, 1}, 10)
    finally:
        other.stop()
    assert all(httpx.get(f"{own.frontend.url}/health").status_code == 200 for _ in range(10))
