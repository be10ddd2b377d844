"""The entry point of the images, run here outside a container: shared memory, then the doctor, then serve."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from trimaran.tests.server import free_port
from trimaran.tests.tiny_models import save, save_tokenizer, variants

ENTRYPOINT = Path(__file__).parents[2] / "containers" / "entrypoint.sh"
STAND_IN = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$1" in doctor) echo "doctor's table"; exit "$DOCTOR_STATUS" ;; esac
"""


class Run:
    """One run with a stand-in for the command, which notes how it is called."""

    def __init__(self, tmp_path: Path, *arguments: str, doctor: int = 0, **environment: str) -> None:
        calls = tmp_path / "calls"
        calls.write_text("")
        command = tmp_path / "bin" / "trimaran"
        command.parent.mkdir(exist_ok=True)
        command.write_text(STAND_IN)
        command.chmod(0o755)
        path = f"{command.parent}:{os.environ['PATH']}"
        done = subprocess.run(
            [str(ENTRYPOINT), *arguments],
            env={"PATH": path, "CALLS": str(calls), "DOCTOR_STATUS": str(doctor), **environment},
            capture_output=True,
            text=True,
            timeout=30,
        )
        self.code, self.error, self.output = done.returncode, done.stderr, done.stdout
        self.calls = calls.read_text().splitlines()


def test_doctor_first_then_serve(tmp_path: Path) -> None:
    run = Run(tmp_path, "MODEL", "--port", "8001", SHARED_MEMORY_DIRECTORY=str(tmp_path))
    assert run.code == 0
    assert run.calls == ["doctor MODEL --port 8001", "serve MODEL --port 8001"]
    assert "doctor's table" in run.error and run.output == ""


@pytest.mark.parametrize(("status", "serves"), [(0, True), (1, True), (2, False)])
def test_what_the_doctor_says_counts(tmp_path: Path, status: int, serves: bool) -> None:
    run = Run(tmp_path, "MODEL", doctor=status, SHARED_MEMORY_DIRECTORY=str(tmp_path))
    assert any(call.startswith("serve") for call in run.calls) is serves
    assert run.code == (0 if serves else 2)
    if not serves:
        assert "SKIP_DOCTOR=1" in run.error


def test_the_doctor_can_be_skipped(tmp_path: Path) -> None:
    run = Run(tmp_path, "serve", "MODEL", doctor=2, SKIP_DOCTOR="1", SHARED_MEMORY_DIRECTORY=str(tmp_path))
    assert run.calls == ["serve MODEL"]


def test_other_commands_pass_through(tmp_path: Path) -> None:
    assert Run(tmp_path, "explain", "MODEL").calls == ["explain MODEL"]


def test_small_shared_memory_is_refused_with_the_cure(tmp_path: Path) -> None:
    """Injected: /proc is a mounted directory of no size."""
    run = Run(tmp_path, "MODEL", SHARED_MEMORY_DIRECTORY="/proc")
    assert run.code == 2 and run.calls == []
    assert "/proc has 0 MiB, 64 MiB are needed" in run.error and "--shm-size=64m" in run.error


def test_small_shared_memory_for_real(tmp_path: Path) -> None:
    """In a mount namespace of its own with 8 MiB, where the machine permits one."""
    shell = f"mount -t tmpfs -o size=8m none /dev/shm && exec {ENTRYPOINT} MODEL"
    done = subprocess.run(["unshare", "-Urm", "sh", "-c", shell], capture_output=True, text=True, timeout=30)
    if "unshare" in done.stderr or "mount" in done.stderr.split("entrypoint")[0]:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.returncode == 2
    assert "/dev/shm has 8 MiB" in done.stderr and "--shm-size" in done.stderr


@pytest.mark.timeout(100)
def test_the_real_commands_outside_a_container(tmp_path: Path) -> None:
    """Doctor's table, then a server that becomes ready, and ends as it is told to."""
    command = tmp_path / "bin" / "trimaran"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m trimaran.frontend.launch.commands "$@"\n')
    command.chmod(0o755)
    tiny = tmp_path / "model"
    save(variants()["qwen3"], tiny)
    save_tokenizer(tiny)
    port = free_port()
    words = [str(tiny), "--platform", "null", "--port", str(port), "--run-dir", str(tmp_path)]
    path = f"{command.parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SHARED_MEMORY_DIRECTORY": str(tmp_path)}
    started = subprocess.Popen([str(ENTRYPOINT), *words], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert started.stderr is not None
        said = []
        for line in started.stderr:
            said.append(line)
            if all(any(word in line for line in said) for word in ("Ready after", "Listening on")):  # in either order
                break
        text = "".join(said)
        assert "verdict" in text and text.index("this machine can serve") < text.index("Listening on")
        assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    finally:
        started.terminate()
        started.communicate(timeout=60)
    assert started.returncode == 0


def test_several_devices_need_more(tmp_path: Path) -> None:
    for words in (("--tensor-parallel", "2"), ("--tensor-parallel=2",)):
        run = Run(tmp_path, "MODEL", *words, SHARED_MEMORY_DIRECTORY="/proc")
        assert "1024 MiB are needed" in run.error
    alone = Run(tmp_path, "MODEL", "--tensor-parallel", "1", SHARED_MEMORY_DIRECTORY="/proc")
    assert "64 MiB are needed" in alone.error
