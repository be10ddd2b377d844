"""The parts around the supervisor: port, run directory, rings, a child's environment, bringing a model."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trimaran.frontend.launch.children import child_environment, module_command
from trimaran.frontend.launch.model_fetch import FetchFailed, Fetching, Model, bring
from trimaran.frontend.launch.model_source import GgufFile, LocalFolder
from trimaran.frontend.launch.port import HeldPort
from trimaran.frontend.launch.restarts import LONGEST_PAUSE_S, Restarts
from trimaran.frontend.launch.rings import Rings
from trimaran.frontend.launch.run_directory import RunDirectory
from trimaran.frontend.text.model_text import ModelText
from trimaran.ipc.conditions import Refusal
from trimaran.ipc.ring import RingReader, RingWriter

from ..gguf_files import byte_level_tokenizer, random_weights, write_gguf

# The port


def test_a_held_port_is_free_for_frontends_and_for_nobody_else() -> None:
    held = HeldPort("127.0.0.1", 0)
    try:
        for _ in range(2):  # frontends bind it with SO_REUSEPORT, one after the other
            with socket.socket() as frontend:
                frontend.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                frontend.bind(("127.0.0.1", held.port))
                frontend.listen()
                with pytest.raises(Refusal, match="another Trimaran server"):
                    HeldPort("127.0.0.1", held.port)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", held.port))
    finally:
        held.close()
    HeldPort("127.0.0.1", held.port).close()


def test_connections_of_an_earlier_server_are_no_reason_to_refuse() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the server's side closes first, and keeps the TIME_WAIT
        client.close()
    HeldPort("127.0.0.1", port).close()


def test_port_zero_takes_a_free_port() -> None:
    first, second = HeldPort("127.0.0.1", 0), HeldPort("127.0.0.1", 0)
    assert first.port != second.port and first.port > 0
    first.close()
    second.close()


def test_two_addresses_may_share_a_port_number() -> None:
    first = HeldPort("127.0.0.1", 0)
    HeldPort("127.0.0.2", first.port).close()
    first.close()


# The run directory


def test_a_run_directory_is_private_and_goes(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert os.stat(run.path).st_mode & 0o777 == 0o700
    assert run.address("core-workers") == f"ipc://{run.path}/core-workers"
    (run.path / "socket").touch()
    other = RunDirectory(tmp_path)
    assert run.path.exists(), "a living server's folder stays"
    run.remove()
    other.remove()
    assert not list(tmp_path.iterdir())


def test_only_folders_of_dead_servers_are_removed(tmp_path: Path) -> None:
    code = (
        "import os; from pathlib import Path; from trimaran.frontend.launch.run_directory import RunDirectory\n"
        f"print(RunDirectory(Path({str(tmp_path)!r})).path, flush=True); os._exit(1)"
    )
    stale = Path(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout.strip())
    foreign = tmp_path / "trimaran-of-someone-else"
    foreign.mkdir()
    assert stale.is_dir()
    run = RunDirectory(tmp_path)
    assert not stale.exists() and foreign.exists()
    run.remove()


# Rings


def test_rings_reach_core_and_workers_in_the_order_that_attach_says() -> None:
    rings = Rings(num_ranks=2, generation=7)
    core = rings.for_core()
    plans = RingWriter(core[0], core[1:3])
    slot = plans.slot()
    assert slot is not None
    slot[:2] = b"hi"
    plans.publish(2, 1)
    slot.release()
    for rank in range(2):
        plan, doorbell, result, result_doorbell = rings.for_worker(rank)
        message = RingReader(plan, rank, doorbell).wait(1.0)
        assert message is not None and bytes(message[1]) == b"hi"
        RingWriter(result, [result_doorbell]).publish(rank, 0)
    assert [RingReader(fd, 0, core[5]).wait(1.0) is not None for fd in core[3:5]] == [True, True]
    rings.close()


# Restarts


def test_pauses_double_up_to_a_bound_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("trimaran.frontend.launch.restarts.time.monotonic", lambda: now[0])
    restarts = Restarts(9)
    pauses = [restarts.died() for _ in range(9)]
    assert pauses[:4] == [0.25, 0.5, 1.0, 2.0] and pauses[-1] == LONGEST_PAUSE_S
    assert restarts.died() is None
    restarts.started()
    now[0] += 61.0
    assert restarts.died() == 0.25, "a part that lived long is not held to its past"


# A child's environment


def test_the_environment_of_a_child(tmp_path: Path) -> None:
    inherited = {"PATH": "/bin", "TRIMARAN_API_KEY": "sesame", "OMP_NUM_THREADS": "64", "HF_TOKEN": "t"}
    environment = child_environment(inherited, num_threads=3, cache=tmp_path)
    assert environment["OMP_NUM_THREADS"] == "3" and environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["GOMP_SPINCOUNT"] == "0" and environment["PATH"] == "/bin"
    assert environment["HF_HUB_OFFLINE"] == "1" and "TRIMARAN_API_KEY" not in environment
    assert "HF_HUB_OFFLINE" not in child_environment(inherited, num_threads=1, cache=tmp_path, offline=False)


# Bringing a model


class Told:
    def __init__(self, tmp_path: Path, tokenizer: Path | None = None, cache: Path | None = None) -> None:
        self.progress: list[tuple[float, str]] = []
        self.warnings: list[str] = []
        (tmp_path / "run").mkdir(exist_ok=True)
        self.pipe = os.pipe()
        self.fetching = Fetching(
            cache=cache or tmp_path / "cache",
            run_directory=tmp_path / "run",
            tokenizer=tokenizer,
            with_weights=True,
            environment=os.environ,
            death_pipe=self.pipe[0],
            progress=lambda fraction, what: self.progress.append((fraction, what)),
            warning=self.warnings.append,
        )

    async def bring(self, source: GgufFile | LocalFolder) -> Model:
        try:
            return await bring(source, self.fetching)
        finally:
            for descriptor in self.pipe:
                os.close(descriptor)


async def test_a_gguf_model_is_brought_with_progress(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama"))
    told = Told(tmp_path)
    model = await told.bring(GgufFile(path, "m"))
    assert model.folder.parent == tmp_path / "cache" / "converted"
    assert model.root == str(model.folder) and model.text_folder == model.folder
    assert told.progress[-1][0] == 1.0 and not told.warnings


async def test_a_refusal_of_the_converter_is_a_refusal(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "mamba", random_weights("llama"))
    with pytest.raises(Refusal, match="'mamba' is not supported"):
        await Told(tmp_path).bring(GgufFile(path, "m"))


async def test_a_converter_that_breaks_is_told_by_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trimaran.frontend.launch.model_fetch.module_command",
        lambda module: [sys.executable, "-c", "raise SystemExit('out of luck')"],
    )
    with pytest.raises(FetchFailed, match="exit code 1: out of luck"):
        await Told(tmp_path).bring(GgufFile(tmp_path / "m.gguf", "m"))


async def test_a_cancelled_fetch_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    monkeypatch.setattr(
        "trimaran.frontend.launch.model_fetch.module_command", lambda module: [sys.executable, "-c", code]
    )
    task = asyncio.ensure_future(Told(tmp_path).bring(GgufFile(tmp_path / "m.gguf", "m")))
    while not (pid_file.exists() and pid_file.read_text()):  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not Path(f"/proc/{pid_file.read_text()}").exists()


async def test_sampling_that_a_file_has_no_place_for(tmp_path: Path) -> None:
    """Frontends read it beside what the file does say; the converted model itself is as it was."""
    path = write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama"))
    model = await Told(tmp_path).bring(GgufFile(path, "m", {"temperature": 0.25, "eos_token_id": 99}))
    told = json.loads((model.text_folder / "generation_config.json").read_text())
    own = json.loads((model.folder / "generation_config.json").read_text())
    assert told == {**own, "temperature": 0.25} and "temperature" not in own
    assert ModelText.load(model.text_folder).defaults.temperature == 0.25
    assert not list(model.text_folder.glob("*.safetensors"))


@pytest.mark.user_pain("M9")
async def test_a_cache_that_cannot_be_written_costs_one_warning(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama"))
    (tmp_path / "file").touch()
    told = Told(tmp_path, cache=tmp_path / "file")
    model = await told.bring(GgufFile(path, "m"))
    assert model.folder.parent == tmp_path / "run" / "converted"
    assert len(told.warnings) == 1 and "cannot be written" in told.warnings[0]


@pytest.mark.user_pain("L1")
async def test_a_given_tokenizer_stands_in_for_one_that_is_not_supported(tmp_path: Path) -> None:
    good = write_gguf(tmp_path / "good.gguf", "llama", random_weights("llama"))
    tokenizer = (await Told(tmp_path).bring(GgufFile(good, "m"))).folder
    path = write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama"), tokenizer=byte_level_tokenizer("klingon"))
    model = await Told(tmp_path, tokenizer=tokenizer).bring(GgufFile(path, "m"))
    assert not (model.folder / "tokenizer.json").exists()
    assert (model.text_folder / "tokenizer.json").read_text() == (tokenizer / "tokenizer.json").read_text()
    assert json.loads((model.text_folder / "generation_config.json").read_text())["eos_token_id"] == 2
    shutil.rmtree(tmp_path / "run")
    only_file = await Told(tmp_path, tokenizer=tokenizer / "tokenizer.json").bring(LocalFolder(model.folder, "m"))
    assert (only_file.text_folder / "tokenizer.json").exists() and only_file.folder == model.folder
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(Refusal, match=r"holds no tokenizer.json"):
        await Told(tmp_path, tokenizer=tmp_path / "cache").bring(LocalFolder(model.folder, "m"))


@pytest.mark.user_pain("D10")
def test_a_local_model_leads_to_no_connection(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama"))
    code = (
        "import runpy, sys\n"
        "def watch(event, arguments):\n"
        "    if event in ('socket.connect', 'socket.getaddrinfo', 'socket.sendto'): print('OUTBOUND', arguments)\n"
        "sys.addaudithook(watch)\n"
        f"sys.argv = ['x', {str(path)!r}, {str(tmp_path / 'cache')!r}]\n"
        "try: runpy.run_module('trimaran.device_workers.weights.from_gguf', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "from trimaran.frontend.launch.model_source import find_model\n"
        f"find_model({str(path)!r})\n"
        "print([name for name in ('huggingface_hub', 'requests', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "OUTBOUND" not in done.stdout, done.stdout + done.stderr
    assert "torch" not in done.stdout.splitlines()[-1]


def test_children_do_not_search_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise RuntimeError('imported from the working directory')")
    command = [*module_command("frontend.launch.commands"), "version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
