"""The invariants of the design, seen in running processes: what they load, how they talk, what they leave."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trimaran.tests.server import Server

HEAVY = ("torch", "triton", "transformers")


@pytest.mark.parametrize(
    "module",
    [
        "trimaran",
        "trimaran.frontend.launch.commands",
        "trimaran.frontend.launch.supervisor",
        "trimaran.frontend.http.process",
        "trimaran.frontend.http.app",
        "trimaran.frontend.client.llm",
        "trimaran.frontend.bench.serve",
        "trimaran.engine_core.core",
        "trimaran.engine_core.process",
        "trimaran.kernels.registry",
        "trimaran.kernels.catalog",
        "trimaran.device_workers.process",
        "trimaran.device_workers.boot",
        "trimaran.ipc.control",
    ],
)
def test_imports_no_tensor_library(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def mapped_libraries(pid: int) -> set[str]:
    return {line.split("/")[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/" in line}


@pytest.fixture(scope="module")
def server(demo_folder: Path):  # type: ignore[no-untyped-def]
    with Server(demo_folder, "--frontends", "2") as running:
        running.complete("hello", max_tokens=4)
        yield running


def test_only_workers_map_torch(server: Server) -> None:
    """On the null platform not even the worker does."""
    for role in ("frontend", "core", "worker"):
        for pid in server.pids(role):
            assert not [name for name in mapped_libraries(pid) if "torch" in name], role
    assert not [name for name in mapped_libraries(server.process.pid) if "torch" in name]


def test_one_process_per_part(server: Server) -> None:
    assert [len(server.pids(role)) for role in ("frontend", "core", "worker")] == [2, 1, 1]


@pytest.mark.user_pain("X1")
def test_only_the_http_port_listens(server: Server) -> None:
    tree = [server.process.pid, *(pid for role in ("frontend", "core", "worker") for pid in server.pids(role))]
    for pid in tree:
        for connection in psutil.Process(pid).net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr == ("127.0.0.1", server.port)


@pytest.mark.user_pain("X1")
def test_random_bytes_on_every_socket_are_dropped(server: Server) -> None:
    """Foreign bytes reach the core's sockets; the engine lives on and says so once in its log."""
    import zmq

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    paths = [path for path in server.run_parent.rglob("*") if path.is_socket()]
    assert paths, "the run directory holds no sockets"
    for path in paths:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 1000)
        dealer.connect(f"ipc://{path}")
        for size in (0, 1, 7, 100, 5000):
            dealer.send_multipart([os.urandom(size), os.urandom(size)])
            dealer.send(os.urandom(size))
        dealer.close()
    for path in paths:
        import socket

        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(path))
            raw.sendall(os.urandom(4096))
    context.term()
    assert server.complete("hello", max_tokens=4)["usage"]["completion_tokens"] == 4
    assert server.status("/ready") == 200


def test_run_directory_is_private(server: Server) -> None:
    folders = [path for path in server.run_parent.iterdir() if path.is_dir()]
    assert folders
    for folder in folders:
        assert folder.stat().st_mode & 0o777 == 0o700


def test_small_and_quick(server: Server) -> None:
    """The torch-free processes stay small: they run anywhere."""
    for role, limit_mib in (("core", 150), ("frontend", 300)):
        for pid in server.pids(role):
            assert psutil.Process(pid).memory_info().rss < limit_mib << 20, role
