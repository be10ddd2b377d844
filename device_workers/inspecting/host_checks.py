"""The doctor's checks of the host: compiler, headers, C library, WSL2, device nodes, memory, files. Torch-free.

Each check looks at an `Examined` and yields verdicts; a verdict that is not a pass ends with its cure.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...ipc.inspection import Level, Verdict
from ..platforms.host import Host
from ..platforms.versions import is_older

GLIBC_MINIMUM = "2.28"
"""PyTorch's Linux wheels are built for manylinux_2_28 (PEP 600: that glibc or a later one)."""
PYTHON_OLDEST, PYTHON_NEWEST = (3, 11), (3, 13)
LIBRARY_MINIMA = {"torch": "2.11", "triton": "3.6"}
SHARED_MEMORY_ONE, SHARED_MEMORY_SEVERAL = 64 << 20, 1 << 30
OPEN_FILES = 4096
FREE_DISK_BYTES = 2 << 30
_COMPILERS = ("cc", "gcc", "c++", "g++", "clang", "clang++", "nvcc", "hipcc", "icpx")
_PAIRS = (("cc", "c++"), ("gcc", "g++"), ("clang", "clang++"))
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_DRM_DRIVERS = {"0x1002": "amdgpu", "0x8086": "xe"}


def _compiler_version(path: str) -> str:
    for flag in ("-dumpfullversion", "--version"):
        try:
            done = subprocess.run([path, flag], capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip().splitlines()[-1 if "nvcc" in path else 0]
    return ""


def _free_bytes(path: str) -> int | None:
    """Of the file system that holds the path, or would."""
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _size_bytes(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return None


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, OSError, ValueError):
        return ""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """Everything that the checks read; a test puts other facts in their place."""

    host: Host
    cache_directory: str
    num_ranks: int = 1
    needs_triton: bool = False
    path: tuple[str, ...] = field(default_factory=lambda: tuple(os.get_exec_path()))
    python: tuple[int, int] = sys.version_info[:2]
    headers: str = field(default_factory=lambda: sysconfig.get_paths()["include"])
    libc: str = field(default_factory=_libc)
    open_files: tuple[int, int] = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE))
    size_bytes: Callable[[str], int | None] = _size_bytes
    free_bytes: Callable[[str], int | None] = _free_bytes
    compiler_version: Callable[[str], str] = _compiler_version

    def compilers(self) -> dict[str, list[str]]:
        """Every compiler on the path by name, in the order in which they would be found."""
        found: dict[str, list[str]] = {}
        for folder in self.path:
            for name in _COMPILERS:
                candidate = os.path.join(folder, name)
                if folder and os.access(candidate, os.X_OK) and os.path.isfile(candidate):
                    found.setdefault(name, []).append(candidate)
        return found


Check = Callable[[Examined], Iterator[Verdict]]


def _verdict(check: str, level: Level, text: str, cure: str = "") -> Verdict:
    assert (level is Level.PASS) == (cure == ""), f"{check}: a verdict that is no pass ends with its cure"
    return Verdict(check=check, level=level, text=text, cure=cure)


def check_python(examined: Examined) -> Iterator[Verdict]:
    have = ".".join(map(str, examined.python))
    if PYTHON_OLDEST <= examined.python <= PYTHON_NEWEST:
        yield _verdict("python", Level.PASS, f"Python {have}")
    else:
        span = f"{'.'.join(map(str, PYTHON_OLDEST))} to {'.'.join(map(str, PYTHON_NEWEST))}"
        yield _verdict(
            "python", Level.FAIL, f"Python {have}; supported are {span}", "make an environment with one of these"
        )


def check_libraries(examined: Examined) -> Iterator[Verdict]:
    for name, minimum in LIBRARY_MINIMA.items():
        have = examined.host.package_version(name)
        if have is None and name == "triton" and not examined.needs_triton:
            continue
        if have is None:
            level = Level.FAIL if name == "torch" else Level.WARN
            loss = "" if name == "torch" else ": kernels fall back to plain PyTorch"
            yield _verdict(name, level, f"{name} is not installed{loss}", f'pip install "{name}>={minimum}"')
        elif is_older(have, minimum):
            yield _verdict(
                name,
                Level.FAIL,
                f"{name} {have}; the oldest supported is {minimum}",
                f'pip install "{name}>={minimum}"',
            )
        else:
            yield _verdict(name, Level.PASS, f"{name} {have}")


def check_libc(examined: Examined) -> Iterator[Verdict]:
    name, _, version = examined.libc.partition(" ")
    if not version:
        yield (
            _verdict(
                "C library",
                Level.WARN,
                "not glibc, or it does not tell its version",
                "PyTorch's wheels need glibc: take an image or a system that has it",
            )
            if examined.host.system == "linux"
            else _verdict("C library", Level.PASS, "the system's own")
        )
    elif is_older(version, GLIBC_MINIMUM):
        yield _verdict(
            "C library",
            Level.FAIL,
            f"{name} {version}; PyTorch's wheels need {GLIBC_MINIMUM}",
            "update the system, or run in a container of a newer one",
        )
    else:
        yield _verdict("C library", Level.PASS, f"{name} {version}")


def check_compiler(examined: Examined) -> Iterator[Verdict]:
    """Kernels in C++ and Triton's launchers are compiled at the first start."""
    compilers = examined.compilers()
    cpp = next((compilers[name][0] for name in ("c++", "g++", "clang++") if name in compilers), None)
    c = next((compilers[name][0] for name in ("cc", "gcc", "clang") if name in compilers), None)
    loss = (
        "Triton cannot build the launchers of its kernels"
        if examined.needs_triton
        else "C++ kernels cannot be built and plain PyTorch serves, several times slower"
    )
    if (c if examined.needs_triton else cpp) is None:
        yield _verdict(
            "compiler",
            Level.WARN,
            f"no compiler on the path: {loss}",
            "install gcc and g++ (apt: gcc g++, dnf: gcc gcc-c++)",
        )
        return
    found = cpp or c or ""
    yield _verdict("compiler", Level.PASS, f"{found} {examined.compiler_version(found)}".strip())
    header = Path(examined.headers) / "Python.h"
    if header.is_file():
        yield _verdict("Python headers", Level.PASS, str(header))
    elif examined.needs_triton:
        yield _verdict(
            "Python headers",
            Level.WARN,
            f"{header} is missing: {loss}",
            "install the headers of this Python (apt: python3-dev, dnf: python3-devel)",
        )


def check_mixed_compilers(examined: Examined) -> Iterator[Verdict]:
    """Compilers of several installations on one path build objects that do not fit together."""
    compilers = examined.compilers()
    told = []
    for c, cpp in _PAIRS:
        if c not in compilers or cpp not in compilers:
            continue
        first, second = (examined.compiler_version(compilers[name][0]) for name in (c, cpp))
        if _major(first) != _major(second):
            told.append(f"{compilers[c][0]} is {first or 'unknown'} and {compilers[cpp][0]} is {second or 'unknown'}")
    toolkits = {examined.compiler_version(path) for path in map(os.path.realpath, compilers.get("nvcc", []))}
    if len(toolkits) > 1:
        told.append(f"{len(toolkits)} different nvcc: {', '.join(compilers['nvcc'])}")
    if told:
        yield _verdict(
            "mixed compilers",
            Level.WARN,
            "; ".join(told),
            "put one installation first on PATH, or leave the other's environment (conda deactivate)",
        )
    elif compilers:
        yield _verdict("mixed compilers", Level.PASS, "C and C++ come from one installation")


def _major(version: str) -> str:
    digits = next((word for word in version.replace("-", " ").split() if word[:1].isdigit()), "")
    return digits.split(".")[0]


def check_wsl(examined: Examined) -> Iterator[Verdict]:
    host = examined.host
    if not host.is_wsl:
        return
    if host.exists("/dev/dxg"):
        yield _verdict("WSL2", Level.PASS, "Linux inside Windows; the GPU is reached by /dev/dxg")
    else:
        yield _verdict(
            "WSL2",
            Level.WARN,
            "Linux inside Windows without /dev/dxg: no GPU can be reached",
            "install a Windows driver with WSL support, then: wsl --update && wsl --shutdown",
        )


def check_nodes(examined: Examined) -> Iterator[Verdict]:
    """Device nodes that are there must be usable by this user, and hardware on the bus must have its nodes."""
    host = examined.host
    cards = {card.vendor: card for card in host.cards()}
    amd, intel = "0x1002" in cards, "0x8086" in cards
    nodes = [name for name in ("/dev/kfd",) if host.exists(name)]
    nodes += [f"/dev/dri/{path.name}" for path in host.glob("/dev/dri/renderD*")] if amd or intel else []
    nodes += [name for name in ("/dev/nvidiactl", "/dev/nvidia-uvm") if host.exists(name)]
    nodes += [f"/dev/{path.name}" for path in host.glob("/dev/davinci[0-9]*")]
    if amd and not host.exists("/dev/kfd"):
        yield _verdict(
            "device nodes",
            Level.WARN,
            "an AMD GPU is on the bus and /dev/kfd is missing",
            "load the amdgpu driver, or start the container with --device /dev/kfd --device /dev/dri",
        )
    if "0x10de" in cards and not host.exists("/dev/nvidiactl") and not host.is_wsl:
        yield _verdict(
            "device nodes",
            Level.WARN,
            "an NVIDIA GPU is on the bus and /dev/nvidiactl is missing",
            "install NVIDIA's driver, or start the container with --gpus all",
        )
    closed = [name for name in nodes if not host.may_use(name)]
    if closed:
        yield _verdict(
            "device nodes",
            Level.FAIL,
            f"this user may not open {', '.join(closed)}",
            "add the user to the groups that own them (usermod -aG render,video USER), and log in again",
        )
    elif nodes:
        yield _verdict("device nodes", Level.PASS, ", ".join(nodes))


def check_shared_memory(examined: Examined) -> Iterator[Verdict]:
    """Our rings need none of it; collectives between devices and other libraries do."""
    size = examined.size_bytes("/dev/shm")
    needed = SHARED_MEMORY_SEVERAL if examined.num_ranks > 1 else SHARED_MEMORY_ONE
    if size is not None and size >= needed:
        yield _verdict("shared memory", Level.PASS, f"/dev/shm has {size >> 20} MiB")
        return
    have = "is missing" if size is None else f"has {size >> 20} MiB"
    yield _verdict(
        "shared memory",
        Level.FAIL if examined.num_ranks > 1 else Level.WARN,
        f"/dev/shm {have}, {needed >> 20} MiB are wanted for {examined.num_ranks} device(s)",
        f"start the container with --shm-size={needed >> 20}m, or: mount -o remount,size={needed >> 20}m /dev/shm",
    )


def check_open_files(examined: Examined) -> Iterator[Verdict]:
    soft, hard = examined.open_files
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= OPEN_FILES:
        yield _verdict("open files", Level.PASS, "no limit" if soft == unlimited else f"{soft} may be open at once")
        return
    reach = "" if hard == unlimited or hard >= OPEN_FILES else f" (the hard limit of {hard} must be raised first)"
    yield _verdict(
        "open files",
        Level.WARN,
        f"only {soft} may be open at once, and each stream needs one",
        f"ulimit -n {OPEN_FILES} before the start, or LimitNOFILE in the service's unit{reach}",
    )


def check_cache(examined: Examined) -> Iterator[Verdict]:
    """Where compiled kernels and converted models are kept."""
    folder = examined.cache_directory
    existing = Path(folder)
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield _verdict(
            "cache",
            Level.WARN,
            f"{folder} cannot be written: kernels are compiled at every start",
            "name a folder that can be written by --cache-dir",
        )
        return
    free = examined.free_bytes(folder)
    if free is not None and free < FREE_DISK_BYTES:
        yield _verdict(
            "cache",
            Level.WARN,
            f"{folder} has {free >> 20} MiB free, {FREE_DISK_BYTES >> 20} MiB are wanted",
            "free some space, or name another folder by --cache-dir",
        )
    else:
        yield _verdict("cache", Level.PASS, folder if free is None else f"{folder}, {free >> 30} GiB free")


CHECKS: Mapping[str, Check] = {
    "python": check_python,
    "libraries": check_libraries,
    "libc": check_libc,
    "compiler": check_compiler,
    "mixed compilers": check_mixed_compilers,
    "wsl": check_wsl,
    "nodes": check_nodes,
    "shared memory": check_shared_memory,
    "open files": check_open_files,
    "cache": check_cache,
}
"""In the order in which the doctor tells them."""
