"""Builds the C++ kernels with the system compiler, once per source, compiler, flags and CPU. Imports no torch.

The link step leaves `-ffast-math` out: with it, denormal numbers would be off for the whole process.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++20",
    "-ffast-math",
    "-fno-finite-math-only",
    "-fPIC",
    "-fopenmp",
    "-w",
)
LINK_FLAGS = ("-shared", "-fopenmp")
BUILD_TIMEOUT_S = 120.0
_DIGEST_BYTES = 32
_TEMPORARY_PREFIX = "trimaran-cpp-"


class BuildFailed(RuntimeError):
    """The compiler is missing or refused; the text says what it said."""


def find_compiler() -> str | None:
    """Path of the C++ compiler, or None."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def library_path(cache_dir: Path, compiler: str) -> Path:
    """Where the library for this source, compiler and CPU belongs."""
    return cache_dir / "cpp" / f"kernels-{_fingerprint(compiler)}.so"


def _fingerprint(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=BUILD_TIMEOUT_S, check=False).stdout
    parts = (SOURCE.read_bytes(), version, " ".join(COMPILE_FLAGS + LINK_FLAGS).encode(), cpu_description().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def cpu_description() -> str:
    """Model and instruction sets of this CPU: what `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    found = {key: line for line in reversed(lines) for key in wanted if line.startswith(key)}
    return "\n".join([platform.machine(), *(found[key] for key in sorted(found))])


def ensure_library(cache_dir: Path | None, warn: Callable[[str], None]) -> Path:
    """Path of a built library: from the cache, else built into it. Where the cache cannot be written, it is built in a
    temporary directory for this process, with a warning. Raises BuildFailed.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed(f"no C++ compiler (looked for {', '.join(COMPILERS)})")
    if cache_dir is not None:
        target = library_path(cache_dir, compiler)
        if is_whole(target):
            return target
        if target.exists():
            warn(f"the cached C++ kernels {target} are damaged: built again")
        try:
            return build(compiler, target)
        except OSError as error:
            warn(f"the kernel cache {target.parent} cannot be written ({error}): kernels are built for this start only")
    return build(compiler, Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX)) / "kernels.so")


def discard_temporary(path: Path) -> None:
    """Once it is loaded, a library that no cache keeps needs no name; the process keeps its content."""
    if path.parent.name.startswith(_TEMPORARY_PREFIX):
        shutil.rmtree(path.parent, ignore_errors=True)


def is_whole(path: Path) -> bool:
    """Whether the file ends with the digest of what comes before. A cut-off library would crash the process, not
    fail.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-_DIGEST_BYTES:] == hashlib.sha256(content[:-_DIGEST_BYTES]).digest()


def rebuild_library(path: Path) -> Path:
    """Build again over a file that does not load. Raises BuildFailed, OSError."""
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed(f"no C++ compiler (looked for {', '.join(COMPILERS)})")
    return build(compiler, path)


def build(compiler: str, target: Path) -> Path:
    """Compile and link beside the target, then move it into place: two starts at once do not see half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as directory:
        compiled, linked = Path(directory) / "kernels.o", Path(directory) / "kernels.so"
        _run(compiler, *COMPILE_FLAGS, "-c", str(SOURCE), "-o", str(compiled))
        _run(compiler, *LINK_FLAGS, str(compiled), "-o", str(linked))
        linked.write_bytes(_sealed(linked.read_bytes()))
        os.replace(linked, target)
    return target


def _sealed(library: bytes) -> bytes:
    """With its digest at the end, where loaders do not look."""
    return library + hashlib.sha256(library).digest()


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"{command[0]} took longer than {BUILD_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        complaint = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-300:])
        raise BuildFailed(f"{command[0]} failed: {complaint}")
