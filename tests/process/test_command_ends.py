"""How the commands that look at the machine end: signals, pipes, broken drivers, mistakes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trimaran.frontend.launch import children
from trimaran.frontend.launch.inspections import Inspection, InspectionFailed
from trimaran.frontend.launch.options import Options
from trimaran.ipc.conditions import part_cure
from trimaran.ipc.configuration import MAX_RANKS, Task
from trimaran.ipc.ring import create_ring
from trimaran.tests.golden.cases import SHAPES

COMMAND = [sys.executable, "-P", "-m", "trimaran.frontend.launch.commands"]
MODEL = str(SHAPES / "qwen3-0.6b")


def inherited(**added: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if not name.startswith("TRIMARAN_")}, **added}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=60, env=inherited(**environment), check=False
    )


@pytest.fixture
def broken(tmp_path: Path) -> dict[str, str]:
    """An environment in which a device worker dies by a signal before it says anything."""
    return _hook(tmp_path, "import os; os.kill(os.getpid(), 11)")


@pytest.fixture
def hung(tmp_path: Path) -> dict[str, str]:
    """An environment in which a device worker never says anything."""
    return _hook(tmp_path, "import time; time.sleep(1000)")


def _hook(folder: Path, action: str) -> dict[str, str]:
    lines = "import sys\nif any('device_workers' in word for word in sys.orig_argv):\n    "
    (folder / "sitecustomize.py").write_text(f"{lines}{action}\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.mark.parametrize(
    ("number", "of_interrupts"),
    [
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_IGN),  # as a script starts jobs in the background
    ],
    ids=["SIGINT", "SIGTERM", "SIGTERM in the background"],
)
@pytest.mark.parametrize("command", [("probe",), ("explain", MODEL)], ids=["probe", "explain"])
def test_an_end_that_was_asked_for(
    command: tuple[str, ...], number: signal.Signals, of_interrupts: Any, hung: dict[str, str], tmp_path: Path
) -> None:
    """No traceback, the shell's exit code, no process and no folder left."""
    before = set(_workers())
    own = signal.signal(signal.SIGINT, of_interrupts)  # what is ignored here is ignored there
    try:
        process = subprocess.Popen(
            [*COMMAND, *command, "--run-dir", str(tmp_path)], stderr=subprocess.PIPE, text=True, env=inherited(**hung)
        )
    finally:
        signal.signal(signal.SIGINT, own)
    deadline = time.monotonic() + 20
    while not set(_workers()) - before and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, text = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert text.strip() == f"trimaran {command[0]}: ended before it was done"
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path.name.startswith("tri")]


def _workers() -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"trimaran.device_workers.process" in (folder / "cmdline").read_bytes():
                found.append(folder.name)
        except OSError:
            continue
    return found


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as pipe:
        done = subprocess.run([*COMMAND, "probe"], stdout=pipe, stderr=subprocess.PIPE, text=True, env=inherited())
    assert done.returncode == 128 + signal.SIGPIPE and done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_output_that_is_full_or_closed() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, "probe"], stdout=full, stderr=subprocess.PIPE, text=True, env=inherited())
    assert done.returncode == 1 and "the output cannot be written (No space left on device)" in done.stderr
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, "probe"], capture_output=True, env=inherited())
    assert done.returncode == 0 and done.stderr == b""


def test_names_that_are_no_text() -> None:
    done = subprocess.run([*COMMAND, "explain", b"./m\xffdel"], capture_output=True, text=True, env=inherited())
    assert done.returncode == 2 and "Rename the file" in done.stderr and "Traceback" not in done.stderr
    done = run("explain", "./mödel", PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and "m\\xf6del" in done.stderr


def test_json_of_the_same_facts_is_the_same() -> None:
    texts = {run("probe", "--json", PYTHONHASHSEED=str(seed)).stdout for seed in range(4)}
    assert len(texts) == 1 and json.loads(texts.pop())


def test_a_worker_that_breaks_off(broken: dict[str, str]) -> None:
    began = time.monotonic()
    done = run("probe", **broken)
    assert done.returncode == 1 and "was killed by SIGSEGV" in done.stderr and "--platform" in done.stderr
    done = run("explain", MODEL, **broken)
    assert done.returncode == 1 and "worker 0 was killed by SIGSEGV" in done.stderr
    assert "trimaran doctor" in done.stderr and "restarted" not in done.stderr
    done = run("doctor", MODEL, "--json", **broken)
    verdicts = json.loads(done.stdout)["verdicts"]
    assert done.returncode == 2 and all(found["cure"] and found["cure"] != found["text"] for found in verdicts)
    assert time.monotonic() - began < 20


@pytest.mark.user_pain("D11")
def test_a_worker_that_hangs_has_a_deadline(hung: dict[str, str]) -> None:
    for command in (("probe",), ("explain", MODEL, "--device-config", "hopper:H200")):
        began = time.monotonic()
        done = run(*command, "--start-timeout", "2", **hung)
        assert done.returncode == 1 and time.monotonic() - began < 15
        assert "a driver that hangs does that" in done.stderr
    assert children.LOOK_LIMIT_S <= 60


async def test_a_task_that_tells_has_longer(monkeypatch: pytest.MonkeyPatch, hung: dict[str, str]) -> None:
    """The first word must come soon; what compiles and measures may then be silent for the start's time."""
    monkeypatch.setattr("trimaran.frontend.launch.inspections.LOOK_LIMIT_S", 0.5)
    for name, value in hung.items():
        monkeypatch.setenv(name, value)
    inspection = Inspection(Options(start_timeout=50.0), Task.DOCTOR, lambda message: None)
    with pytest.raises(InspectionFailed, match=r"said nothing for 0\.5 s and was ended.*--platform"):
        await inspection.run()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("probe", "model"), "takes no model"),
        (("probe", "--platform", "nonsense"), "there is no platform nonsense; --platform takes cuda"),
        (("kernels", "list", "nonsense"), "no kernel or implementation nonsense"),
        (("kernels", "matrix", "--cache-dir", "/tmp/x", "rms_norm"), "names of kernels go before the options"),
        (("kernels", "check", "--platform", "null"), "the null platform runs no kernels"),
        (("diagnose", "--output", "--json"), "--output needs a value"),
        (("diagnose", "--output", "/tmp"), "/tmp is a folder"),
        (("explain", MODEL, "--device-config", "hopper:H200", "--platform", "rocm"), "leave one of them out"),
        (("explain", MODEL, "--tensor-parallel", "64"), "a whole number from 1 to 32"),
    ],
)
def test_mistakes_are_refused(arguments: tuple[str, ...], expected: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_names_of_kernels_choose_rows_wherever_json_stands() -> None:
    for task in ("list", "matrix"):
        seen = json.loads(run("kernels", task, "--json", "rms_norm").stdout)
        assert seen and {found["kernel"] for found in seen} == {"rms_norm"}


def test_the_matrix_says_what_explain_says_and_fits_a_terminal() -> None:
    seen = json.loads(run("kernels", "matrix", "--json", "rms_norm").stdout)
    by_device = {found["device"]: found["implementation"] for found in seen}
    assert by_device["x86_64_avx512"] == "cpp_rms_norm" and by_device["hopper"] == "triton_rms_norm"
    lines = run("kernels", "matrix").stdout.splitlines()
    assert max(map(len, lines)) < 132 and any("hopper" in line for line in lines)


def test_every_group_that_may_be_asked_for_has_rings() -> None:
    os.close(create_ring(num_slots=2, slot_bytes=4096, num_readers=MAX_RANKS, generation=1))


@pytest.mark.parametrize(
    ("refusal", "cure"),
    [
        ("the weights need 2 GiB, 1 GiB are available; take a smaller model, or --tensor-parallel 2", "take a sma"),
        ("./x: there is no such file or folder. Check the path, or give a hub name such as owner/model.", "Check the"),
        ("config.json cannot be read (char 2): download the model again", "download the model again"),
        ("worker 0 was killed by SIGSEGV", "see `trimaran explain`"),
        ("there is no platform foo; --platform takes cuda, rocm, cpu", "--platform takes"),
        ("no platform can be used:\n  cuda: refused: no driver\nRepair one of them, or take another", "Repair one"),
        ("PyTorch is not installed: pip install torch", "pip install"),
    ],
)
def test_the_doctor_finds_the_cure_in_a_refusal(refusal: str, cure: str) -> None:
    text, found = part_cure(refusal, "see `trimaran explain`")
    assert found.startswith(cure) and text and found not in text
