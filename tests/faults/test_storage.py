"""Disks and shared memory that are full, small, read-only or damaged; machines without a network."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from trimaran.tests.faults.crowd import all_gone, descendants, nothing_left
from trimaran.tests.server import Server

SERVE = [sys.executable, "-P", "-m", "trimaran.frontend.launch.commands"]

ASK = """
import sys, urllib.request
body = b'{"prompt": "x", "max_tokens": 3}'
ask = urllib.request.Request(sys.argv[1] + "/v1/completions", body, {"content-type": "application/json"})
print(urllib.request.urlopen(ask).read())
"""


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system of its own at `folder`; the test is skipped where none may be mounted."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def in_namespace(flag: str, first: str) -> list[str]:
    """The command that serves inside a namespace of its own, after the shell command `first`."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", flag, "true"], capture_output=True).returncode:
        pytest.skip("no namespace can be made here")
    return ["unshare", flag, "sh", "-c", f'{first} && exec "$0" "$@"', *SERVE]


@pytest.mark.user_pain("M9")
@pytest.mark.model
def test_a_full_disk_is_a_refusal(demo_file: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "cache", "size=8m") as cache:
        with Server(demo_file, "--cache-dir", str(cache), wait=False) as server:
            assert server.ended(30) == 2
            assert "--cache-dir" in server.lines[-1] and "Traceback" not in server.output
            assert not list(server.run_parent.iterdir())
        left = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
        assert left < 64 * 1024, "a half converted model fills the disk"


def test_no_room_for_the_run_directory(demo_folder: Path, tmp_path: Path) -> None:
    full = mounted(tmp_path / "run", "size=16k,nr_inodes=1")
    with full as run, Server(demo_folder, run_parent=run, wait=False) as server:
        assert server.ended(10) == 2
        assert "--run-dir" in server.lines[-1] and "Traceback" not in server.output


@pytest.mark.long
@pytest.mark.user_pain("M9")
@pytest.mark.model
def test_a_read_only_cache_costs_one_warning_each(demo_folder: Path, tmp_path: Path) -> None:
    """Kernels, verdicts and measurements cannot be kept; the server runs, with the right output."""
    before = set(os.listdir(tempfile.gettempdir()))
    with mounted(tmp_path / "cache", "ro") as cache:
        arguments = ("--cache-dir", str(cache), "--max-model-len", "256")
        with nothing_left(Server(demo_folder, *arguments, script=None)) as server:
            told = server.complete("The capital of France is", max_tokens=1, temperature=0)
            assert told["choices"][0]["text"] == " Paris"
            warnings = [line for line in server.lines if "WARNING" in line]
            assert warnings and len(warnings) == len({line.split("WARNING")[1] for line in warnings})
            assert all("Read-only" in line for line in warnings)
    left = {name for name in set(os.listdir(tempfile.gettempdir())) - before if name.startswith("trimaran-cpp-")}
    assert not left, "the kernels of this start were left behind"


@pytest.mark.long
@pytest.mark.user_pain("M9")
@pytest.mark.model
def test_two_starts_share_an_empty_cache_and_a_third_finds_it_damaged(demo_file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(demo_file, "--cache-dir", str(cache), wait=False)) for _ in range(2)]
        for server in servers:
            server.wait_ready(40)
        answers = [server.complete("same", max_tokens=5, temperature=0)["choices"][0]["text"] for server in servers]
        assert answers[0] == answers[1]
    [converted] = (path for path in (cache / "converted").iterdir() if path.is_dir())
    weights = converted / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size // 2)
    with Server(demo_file, "--cache-dir", str(cache)) as server:
        assert server.complete("same", max_tokens=5, temperature=0)["choices"][0]["text"] == answers[0]
    assert weights.stat().st_size == size
    with Server(demo_file, "--cache-dir", str(cache)) as server:
        assert not server.printed("converting"), "an identical start did not find the cache"


@pytest.mark.long
@pytest.mark.user_pain("M9")
@pytest.mark.model
@pytest.mark.timeout(180)
def test_truncated_kernels_and_records(demo_folder: Path, tmp_path: Path) -> None:
    """Every file of the cache is cut in half; two servers then start on it at once."""
    cache = tmp_path / "cache"
    arguments = ("--cache-dir", str(cache), "--max-model-len", "256")

    def first_token(server: Server) -> str:
        return str(server.complete("The capital of France is", max_tokens=1, temperature=0)["choices"][0]["text"])

    with Server(demo_folder, *arguments, script=None) as server:
        assert first_token(server) == " Paris"
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert len(files) >= 3
    for path in files:
        os.truncate(path, path.stat().st_size // 2)
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(demo_folder, *arguments, script=None, wait=False)) for _ in range(2)]
        for server in servers:
            server.wait_ready(60)
            assert first_token(server) == " Paris"


@pytest.mark.user_pain("O1")
def test_sixty_four_megabytes_of_shared_memory(demo_folder: Path) -> None:
    command = in_namespace("-m", "mount -t tmpfs -o size=64m tmpfs /dev/shm")
    with nothing_left(Server(demo_folder, "--tensor-parallel", "2", command=command)) as server:
        answer = server.complete([3] * 6000, max_tokens=20)
        assert answer["usage"]["completion_tokens"] == 20


@pytest.mark.user_pain("D10")
def test_a_machine_without_a_network(demo_folder: Path) -> None:
    """Its only interface is its loopback; nothing waits for a name or a route, and nothing asks for one."""
    command = in_namespace("-n", "ip link set lo up")
    with Server(demo_folder, command=command, wait=False) as server:
        server.until(lambda: server.printed("^Ready") and server.printed("^Listening"), 15, "ready")
        asked = ["nsenter", "-n", "-t", str(server.process.pid), sys.executable, "-c", ASK, server.url]
        server.until(lambda: b"length" in subprocess.run(asked, capture_output=True).stdout, 10, "an answer")
        for counter in ("InEchos", "OutNoRoutes"):
            told = Path(f"/proc/{server.process.pid}/net/snmp").read_text().splitlines()
            found = [dict(zip(a.split(), b.split(), strict=True)) for a, b in zip(told[::2], told[1::2], strict=True)]
            assert all(int(row.get(counter, 0)) == 0 for row in found), f"{counter}: something looked for a way out"


@pytest.mark.user_pain("D11")
def test_a_start_that_takes_too_long_ends_with_its_last_phase(demo_folder: Path) -> None:
    with Server(demo_folder, "--start-timeout", "2", script="load_ms=30000", wait=False) as server:
        server.until(lambda: server.printed("weights"), 10, "weights are loaded")
        children = descendants(server)
        assert server.ended(10) == 1
        assert "weights" in server.lines[-1] and "--start-timeout" in server.lines[-1]
        assert all_gone(children) and not list(server.run_parent.iterdir())


@pytest.mark.long
@pytest.mark.user_pain("D11")
def test_a_long_start_says_something_every_ten_seconds(demo_folder: Path) -> None:
    with Server(demo_folder, script="load_ms=32000", wait=False) as server:
        began_s, said_s, num_lines, gaps = time.monotonic(), time.monotonic(), 0, []
        while not server.printed("^Ready"):
            if len(server.lines) > num_lines:
                now_s, num_lines = time.monotonic(), len(server.lines)
                gaps.append(now_s - said_s)
                said_s = now_s
            time.sleep(0.05)
        assert time.monotonic() - began_s > 30
        assert max(gaps) < 10.5
        assert server.printed(r"weights .*\d+%")
