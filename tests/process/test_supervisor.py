"""The supervisor with children that only speak the control link: starts, deaths, restarts, drains, and what is left."""

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from trimaran.frontend.launch.options import Options, read_options
from trimaran.frontend.launch.progress import PlainProgress
from trimaran.frontend.launch.supervisor import Aborted, GaveUp, Launch, Supervisor
from trimaran.ipc.conditions import Refusal
from trimaran.ipc.control import CoreLost, CoreStarted, ModelKnown, ToChild
from trimaran.ipc.facts import Phase

FAKE = Path(__file__).with_name("fake_child.py")
FAKES = Launch(*([sys.executable, str(FAKE), kind] for kind in ("frontend", "core", "worker")))


class Lines:
    """Progress that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.phases: list[Phase] = []

    def phase(self, phase: Phase, elapsed_s: float) -> None:
        self.phases.append(phase)

    def line(self, text: str) -> None:
        self.lines.append(text)

    def tick(self, elapsed_s: float) -> None:
        pass

    def finish(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class Harbour:
    """A folder for fake children, and what they logged there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.progress = Lines()
        self.watched: list[ToChild] = []
        (path / "run").mkdir()
        self.model = path / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        (self.model / "model.safetensors").write_bytes(b"")
        self.behave()

    def behave(self, **kinds: dict[str, Any]) -> None:
        (self.path / "behaviour.json").write_text(json.dumps(kinds))

    def options(self, *arguments: str) -> Options:
        fixed = [str(self.model), "--port", "0", "--run-dir", str(self.path / "run")]
        return read_options([*fixed, *arguments], {}).options

    def logs(self, kind: str) -> dict[int, list[dict[str, Any]]]:
        """Pid to what that child noted, in order of starting."""
        files = sorted(self.path.glob(f"{kind}-*.log"), key=lambda file: file.stat().st_ctime_ns)
        found = {}
        for file in files:
            text = file.read_text()
            found[int(file.stem.rsplit("-", 1)[1])] = [json.loads(line) for line in text.splitlines()]
        return found

    def heard(self, kind: str, what: str) -> list[Any]:
        return [note["content"] for log in self.logs(kind).values() for note in log if note["what"] == what]

    def alive(self, kind: str) -> list[int]:
        return [pid for pid in self.logs(kind) if _is_alive(pid)]

    async def afloat(self, supervisor: Supervisor) -> None:
        """Ready, and every child has begun."""
        await supervisor.wait_ready()
        counts = {
            "frontend": supervisor.options.frontends if supervisor.port is not None else 0,
            "core": 1,
            "worker": supervisor.options.tensor_parallel,
        }
        for kind, count in counts.items():
            await until(lambda kind=kind, count=count: len(self.heard(kind, "environment")) == count)

    @asynccontextmanager
    async def server(self, *arguments: str, **keywords: Any) -> AsyncIterator[tuple[Supervisor, "asyncio.Task[None]"]]:
        supervisor = Supervisor(
            self.options(*arguments), self.progress, launch=FAKES, watch=self.watched.append, **keywords
        )
        task = asyncio.ensure_future(supervisor.run())
        try:
            yield supervisor, task
        finally:
            supervisor.stop()
            await asyncio.wait([task], timeout=20)
            assert task.done(), "the supervisor did not end"
            if not task.cancelled():
                task.exception()
            assert not list((self.path / "run").iterdir()), "something is left in the run folder"
            left = [pid for kind in ("frontend", "core", "worker") for pid in self.alive(kind)]
            assert not left, f"children are left: {left}"


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        await asyncio.sleep(0.01)


@pytest.fixture
def harbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harbour:
    monkeypatch.setenv("FAKE_FOLDER", str(tmp_path))
    monkeypatch.setenv("TRIMARAN_API_KEY", "sesame")
    return Harbour(tmp_path)


async def test_a_start_gives_everyone_what_they_need(harbour: Harbour) -> None:
    arguments = ("--frontends", "2", "--tensor-parallel", "2", "--worker-threads", "3", "--served-model-name", "m")
    async with harbour.server(*arguments) as (supervisor, task):
        await harbour.afloat(supervisor)
        await until(lambda: len(harbour.heard("frontend", "CoreStarted")) == 2)
        folder = next((harbour.path / "run").iterdir())
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        frontends = [note["configuration"] for note in map(_begin, harbour.heard("frontend", "Begin"))]
        assert {one["index"] for one in frontends} == {0, 1} and {one["port"] for one in frontends} == {supervisor.port}
        assert {one["served_model_name"] for one in frontends} == {"m"}
        assert harbour.heard("frontend", "ModelKnown") == [["model_known", str(harbour.model), str(harbour.model)]] * 2
        workers = [note["configuration"] for note in map(_begin, harbour.heard("worker", "Begin"))]
        assert {one["rank"] for one in workers} == {0, 1} and {one["num_threads"] for one in workers} == {3}
        environments = harbour.heard("worker", "environment")
        assert {one["OMP_NUM_THREADS"] for one in environments} == {"3"}
        assert {one["TRIMARAN_API_KEY"] for one in environments} == {None}, "options do not leak into children"
        assert "a decision" in harbour.progress.lines
        assert any(line.startswith("Ready after") for line in harbour.progress.lines)
        assert any(f":{supervisor.port} after" in line for line in harbour.progress.lines)
        supervisor.terminate()
        await task
        assert len(harbour.heard("frontend", "Drain")) == 2
        for kind in ("frontend", "core", "worker"):
            assert len(harbour.heard(kind, "end")) == len(harbour.logs(kind)), f"a {kind} was not stopped in order"


def _begin(note: list[Any]) -> dict[str, Any]:
    assert note[0] == "begin"
    return {"configuration": note[1]}


async def test_a_worker_that_dies_takes_its_group_along_and_comes_back(harbour: Harbour) -> None:
    async with harbour.server("--tensor-parallel", "2") as (supervisor, _):
        await harbour.afloat(supervisor)
        await until(lambda: len(harbour.alive("worker")) == 2)
        first = harbour.alive("worker")
        (core,), (frontend,) = harbour.alive("core"), harbour.alive("frontend")
        os.kill(first[1], signal.SIGKILL)
        await until(lambda: harbour.heard("core", "WorkersLost"))
        (lost,) = harbour.heard("core", "WorkersLost")
        assert lost[1] == 1 and "was killed by SIGKILL" in lost[2]
        await until(lambda: len(harbour.alive("worker")) == 2 and not set(first) & set(harbour.alive("worker")))
        assert [note[1] for note in harbour.heard("core", "Attach")] == [2]
        await until(lambda: any("Ready again" in line for line in harbour.progress.lines))
        assert harbour.alive("core") == [core] and harbour.alive("frontend") == [frontend]
        assert any("restart 1 of 5" in line for line in harbour.progress.lines)


async def test_workers_outlive_a_core(harbour: Harbour) -> None:
    async with harbour.server() as (supervisor, _):
        await harbour.afloat(supervisor)
        (worker,) = harbour.alive("worker")
        (core,) = harbour.alive("core")
        os.kill(core, signal.SIGKILL)
        await until(lambda: harbour.heard("worker", "Attach"))
        await until(lambda: any("Ready again" in line for line in harbour.progress.lines))
        assert harbour.alive("worker") == [worker] and harbour.alive("core") != [core]
        assert [note[1] for note in harbour.heard("frontend", "CoreLost")] == [1]
        assert [note[1] for note in harbour.heard("frontend", "CoreStarted")] == [1, 2]
        kinds = [type(message) for message in harbour.watched]
        assert kinds.count(CoreStarted) == 2 and kinds.count(CoreLost) == 1 and kinds.count(ModelKnown) == 1


async def test_a_frontend_that_dies_is_named_to_the_core_and_comes_back(harbour: Harbour) -> None:
    async with harbour.server("--frontends", "2") as (supervisor, _):
        await harbour.afloat(supervisor)
        await until(lambda: len(harbour.alive("frontend")) == 2)
        victim = harbour.alive("frontend")[0]
        index = _begin(next(note["content"] for note in harbour.logs("frontend")[victim]))["configuration"]["index"]
        os.kill(victim, signal.SIGKILL)
        await until(lambda: harbour.heard("core", "FrontendLost") == [["frontend_lost", index, 1]])
        await until(lambda: len(harbour.alive("frontend")) == 2)
        (new,) = set(harbour.alive("frontend")) - {victim} - set(list(harbour.logs("frontend"))[:2])
        await until(lambda: {"ModelKnown", "CoreStarted"} <= {note["what"] for note in harbour.logs("frontend")[new]})
        assert harbour.logs("frontend")[new][0]["content"][1]["incarnation"] == 2
        assert len(harbour.logs("core")) == len(harbour.logs("worker")) == 1


async def test_everything_dying_at_once_comes_back(harbour: Harbour) -> None:
    async with harbour.server("--tensor-parallel", "2") as (supervisor, _):
        await harbour.afloat(supervisor)
        await until(lambda: len(harbour.alive("worker")) == 2)
        victims = [*harbour.alive("worker"), *harbour.alive("core"), *harbour.alive("frontend")]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: any("Ready again" in line for line in harbour.progress.lines))
        await until(lambda: len(harbour.alive("worker")) == 2 and len(harbour.alive("frontend")) == 1)
        assert not set(victims) & {*harbour.alive("worker"), *harbour.alive("core"), *harbour.alive("frontend")}


async def test_a_hung_group_is_killed_and_restarted(harbour: Harbour) -> None:
    harbour.behave(core={"stall": True})
    async with harbour.server():
        await until(lambda: harbour.heard("core", "WorkersLost"))
        assert "was killed: no progress for 9 s" in harbour.heard("core", "WorkersLost")[0][2]
        await until(lambda: any("Ready again" in line for line in harbour.progress.lines))


@pytest.mark.parametrize("kind", ["frontend", "core", "worker"])
async def test_after_the_limit_the_cause_is_raised(harbour: Harbour, kind: str) -> None:
    harbour.behave(**{kind: {"fault": "the device is on fire"}})
    async with harbour.server("--max-restarts", "2") as (supervisor, task):
        with pytest.raises(GaveUp, match=rf"{kind}.*exit code 3: the device is on fire.*restarted 2 times"):
            await task
        with pytest.raises(GaveUp):
            await harbour.afloat(supervisor)
    assert len(harbour.logs(kind)) == 3
    assert any(line.endswith("| a line of its own") for line in harbour.progress.lines)


async def test_a_crash_is_told_by_its_last_line(harbour: Harbour) -> None:
    harbour.behave(worker={"crash": True})
    async with harbour.server("--max-restarts", "0") as (_, task):
        with pytest.raises(GaveUp, match="exit code 1: RuntimeError: out of luck"):
            await task


async def test_a_refusal_ends_the_start_at_once(harbour: Harbour) -> None:
    harbour.behave(worker={"refuse": "This model needs 3 devices. Use --tensor-parallel 3."})
    async with harbour.server() as (_, task):
        with pytest.raises(Refusal, match="Use --tensor-parallel 3"):
            await task
    assert len(harbour.logs("worker")) == 1


@pytest.mark.user_pain("D11")
async def test_a_start_has_a_deadline(harbour: Harbour) -> None:
    harbour.behave(core={"never_ready": True})
    async with harbour.server("--start-timeout", "1") as (_, task):
        with pytest.raises(
            GaveUp, match=r"Not ready after \d+ s \(--start-timeout\)\. The last phase was worker: load"
        ):
            await asyncio.wait_for(task, 10)


@pytest.mark.user_pain("D11")
async def test_frontends_hear_phase_and_elapsed_while_the_engine_loads(harbour: Harbour) -> None:
    harbour.behave(core={"never_ready": True})
    async with harbour.server() as _:
        await until(
            lambda: len([note for note in harbour.heard("frontend", "PhaseNotice") if note[1]["name"] == "load"]) > 1
        )
        elapsed = [note[2] for note in harbour.heard("frontend", "PhaseNotice")]
        assert elapsed == sorted(elapsed) and elapsed[-1] > 0


@pytest.mark.user_pain("D11")
def test_plain_progress_says_something_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("trimaran.frontend.launch.progress.time.monotonic", lambda: now[0])
    progress = PlainProgress()
    progress.phase(Phase(name="load", process="worker 0", began_s=0.0, fraction=0.25), 0.0)
    said: list[float] = []
    for second in range(1, 41):
        now[0] = float(second)
        progress.tick(now[0])
        if "still: worker 0: load 25%" in capsys.readouterr().err:
            said.append(now[0])
    assert len(said) >= 4 and all(b - a <= 10 for a, b in zip([0.0, *said], [*said, 40.0], strict=True))
    progress.phase(Phase(name="load", process="worker 0", began_s=0.0, took_s=41.0), 41.0)
    assert "worker 0: load: 41.00 s" in capsys.readouterr().err


@pytest.mark.user_pain("C6")
async def test_a_drain_has_a_limit(harbour: Harbour) -> None:
    harbour.behave(frontend={"never_drained": True})
    async with harbour.server("--drain-timeout", "0.5") as (supervisor, task):
        await harbour.afloat(supervisor)
        began_s = time.monotonic()
        supervisor.terminate()
        await task
        assert 0.5 <= time.monotonic() - began_s < 3
        assert len(harbour.heard("frontend", "Stop")) == 1
    assert any("Drain limit of 0.5 s reached" in line for line in harbour.progress.lines)


@pytest.mark.user_pain("C6")
async def test_a_second_signal_ends_the_drain(harbour: Harbour) -> None:
    harbour.behave(frontend={"never_drained": True}, worker={"deaf": True})
    async with harbour.server("--drain-timeout", "60") as (supervisor, task):
        await harbour.afloat(supervisor)
        supervisor.terminate()
        await until(lambda: harbour.heard("frontend", "Drain"))
        began_s = time.monotonic()
        supervisor.terminate()
        with pytest.raises(Aborted):
            await task
        assert time.monotonic() - began_s < 5
        assert len(harbour.heard("frontend", "end")) == 1, "the frontend may still send clean error events"
    assert any("worker 0 did not end within 2 s and is killed" in line for line in harbour.progress.lines)


async def test_without_frontends_no_port_is_taken(harbour: Harbour) -> None:
    async with harbour.server(num_frontends=0) as (supervisor, task):
        await harbour.afloat(supervisor)
        assert supervisor.port is None and not harbour.logs("frontend")
        assert supervisor.core_address.startswith("ipc://")
        supervisor.terminate()
        await task


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
async def test_it_runs_in_a_thread_of_a_library(
    harbour: Harbour, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Children are bound to the thread that spawned them, so restarts must happen in that thread too."""
    ready: list[tuple[asyncio.AbstractEventLoop, Supervisor]] = []

    async def live() -> None:
        supervisor = Supervisor(harbour.options(), harbour.progress, num_frontends=0, launch=FAKES)
        ready.append((asyncio.get_running_loop(), supervisor))
        await supervisor.run()

    def thread() -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(live())

    work = asyncio.get_running_loop().run_in_executor(None, thread)
    await until(lambda: any("Ready" in line for line in harbour.progress.lines))
    os.kill(harbour.alive("core")[0], signal.SIGKILL)
    await until(lambda: any("Ready again" in line for line in harbour.progress.lines))
    loop, supervisor = ready[0]
    loop.call_soon_threadsafe(supervisor.terminate)
    await asyncio.wait_for(work, 10)
    assert not harbour.alive("core") and not harbour.alive("worker")


# A whole process


def serve(harbour: Harbour, *arguments: str) -> subprocess.Popen[str]:
    code = (
        "import sys; from pathlib import Path; from trimaran.frontend.launch import supervisor, commands\n"
        "kinds = ('frontend', 'core', 'worker')\n"
        f"fakes = supervisor.Launch(*([sys.executable, {str(FAKE)!r}, kind] for kind in kinds))\n"
        "supervisor.real_processes = lambda: fakes\n"
        "sys.exit(commands.serve(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, str(harbour.model), "--run-dir", str(harbour.path / "run"), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRIMARAN_")}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def line_with(process: subprocess.Popen[str], text: str) -> str:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            return line
    raise AssertionError(f"{text!r} was not printed: {seen}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.user_pain("C6")
def test_sigterm_ends_it_with_exit_code_0_and_nothing_left(harbour: Harbour) -> None:
    process = serve(harbour, "--port", "0")
    line_with(process, "Ready after")
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=15)
    assert process.returncode == 0, rest
    assert not list((harbour.path / "run").iterdir())


def test_the_cause_is_the_last_line_and_the_exit_code_says_so(harbour: Harbour) -> None:
    harbour.behave(core={"fault": "no luck"})
    process = serve(harbour, "--port", "0", "--max-restarts", "1")
    _, output = process.communicate(timeout=30)
    assert process.returncode == 1
    assert output.splitlines()[-1].startswith("trimaran serve: core ended with exit code 3: no luck.")
    assert not list((harbour.path / "run").iterdir())


@pytest.mark.user_pain("C4")
@pytest.mark.parametrize("wait_for", ["Listening", "Ready"])
def test_killing_the_supervisor_kills_its_children_and_a_restart_succeeds(harbour: Harbour, wait_for: str) -> None:
    port = str(free_port())
    process = serve(harbour, "--port", port)
    line_with(process, wait_for)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while any(harbour.alive(kind) for kind in ("frontend", "core", "worker")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stale = list((harbour.path / "run").iterdir())
    assert len(stale) == 1
    again = serve(harbour, "--port", port)
    line_with(again, "Ready after")
    assert not stale[0].exists(), "the folder of the killed server is cleaned by the next"
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=15)
    assert again.returncode == 0


def test_a_second_server_on_the_port_is_refused_by_name(harbour: Harbour) -> None:
    port = str(free_port())
    first = serve(harbour, "--port", port)
    line_with(first, "Ready after")
    second = serve(harbour, "--port", port)
    _, output = second.communicate(timeout=15)
    assert second.returncode == 2
    assert f"Port {port} of 127.0.0.1 is taken by another Trimaran server (process {first.pid})" in output
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=15)
    assert first.returncode == 0


def test_a_foreign_listener_is_named(harbour: Harbour) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        process = serve(harbour, "--port", str(other.getsockname()[1]))
        _, output = process.communicate(timeout=15)
    assert process.returncode == 2
    assert f"(process {os.getpid()})" in output and "--port" in output


@pytest.mark.user_pain("C6")
def test_a_signal_that_arrives_twice_is_one_and_a_later_one_ends_the_drain(harbour: Harbour) -> None:
    harbour.behave(frontend={"never_drained": True})
    process = serve(harbour, "--port", "0", "--drain-timeout", "60")
    line_with(process, "Ready after")
    for number in (signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
    line_with(process, "Draining")
    time.sleep(0.7)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, output = process.communicate(timeout=15)
    assert process.returncode == 1
    assert output.splitlines()[-1].startswith("trimaran serve: a second signal ended the server")


def test_a_hangup_that_nohup_ignores_does_not_end_it(harbour: Harbour) -> None:
    for ignored in (True, False):
        handler = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        process = serve(harbour, "--port", "0")
        signal.signal(signal.SIGHUP, handler)
        line_with(process, "Ready after")
        process.send_signal(signal.SIGHUP)
        if ignored:
            time.sleep(0.3)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=15)
        assert process.returncode == 0


def test_the_log_level_holds_back_what_matters_less(harbour: Harbour) -> None:
    supervisor = Supervisor(harbour.options("--log-level", "warning"), harbour.progress, launch=FAKES)
    child: Any = type("Named", (), {"name": "core"})()
    for line in (
        "INFO core: so",
        "2026-01-01 00:00:00,000 WARNING http: hm",
        "ERROR core: oh",
        "plain text",
        "DEBUG x",
    ):
        supervisor.printed(child, line)
    printed = [line.removeprefix("core | ") for line in harbour.progress.lines]
    assert printed == ["2026-01-01 00:00:00,000 WARNING http: hm", "ERROR core: oh", "plain text"]


@pytest.mark.model
@pytest.mark.user_pain("C4")
def test_killing_the_supervisor_ends_a_conversion(harbour: Harbour, demo_file: Path) -> None:
    harbour.model = demo_file
    process = serve(harbour, "--port", "0", "--cache-dir", str(harbour.path / "cache"))
    line_with(process, "model (")
    tools = [child.pid for child in psutil.Process(process.pid).children() if "from_gguf" in " ".join(child.cmdline())]
    assert len(tools) == 1
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while _is_alive(tools[0]):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.user_pain("O2")
@pytest.mark.timeout(600)
def test_eight_servers_at_the_same_instant_twenty_times(harbour: Harbour) -> None:
    for _ in range(20):
        processes = [serve(harbour, "--port", "0") for _ in range(8)]
        for process in processes:
            line_with(process, "Ready after")
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.communicate(timeout=30)
            assert process.returncode == 0


@pytest.mark.user_pain("O2")
def test_servers_started_at_once_do_not_fight(harbour: Harbour) -> None:
    processes = [serve(harbour, "--port", "0") for _ in range(3)]
    for process in processes:
        line_with(process, "Ready after")
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        process.communicate(timeout=15)
        assert process.returncode == 0


def test_the_port_is_open_within_a_second_and_the_supervisor_starts_fast(harbour: Harbour) -> None:
    harbour.behave(core={"never_ready": True})
    best = min(_seconds_until_listening(harbour) for _ in range(3))
    assert best < 1.0


def _seconds_until_listening(harbour: Harbour) -> float:
    began_s = time.monotonic()
    process = serve(harbour, "--port", "0")
    line_with(process, "Listening")
    took_s = time.monotonic() - began_s
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=15)
    return took_s
