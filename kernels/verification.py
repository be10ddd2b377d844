"""Runs a loaded implementation once on a small generated problem and compares it with the reference before it serves.

Verdicts are cached by device, driver and the code of `kernels`. Torch-free to import; `verify` imports torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from subprocess import TimeoutExpired

import msgspec

from ..ipc.facts import DeviceProfile, Problem
from .implementation import Implementation, Kernel, Services
from .registry import failure_text

AGREES = "agrees"
_TRYING = "trying"
MAX_CRASHES = 2
"""One may be the user's: whoever kills a start in its first seconds has shown nothing against a kernel."""


class VerdictCache:
    """Verdicts by key in one small JSON file. A file that cannot be read or written costs one warning, never a
    start.
    """

    def __init__(self, cache_dir: Path | None, warn: Callable[[str], None]) -> None:
        self._path = None if cache_dir is None else cache_dir / "kernel-verdicts.json"
        self._warn = warn
        self._warned = False
        self._verdicts = self._read()
        self.num_hits = 0

    def get(self, key: str) -> str | None:
        verdict = self._verdicts.get(key)
        self.num_hits += verdict is not None
        return verdict

    def put(self, key: str, verdict: str) -> None:
        self._verdicts = {**self._read(), **self._verdicts, key: verdict}
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            write_atomically(self._path, json.dumps(self._verdicts, indent=1).encode())
        except OSError as error:
            self._complain(
                f"kernel verdicts cannot be kept in {self._path} ({error}): kernels are checked at each start"
            )

    def drop(self, key: str) -> None:
        """Forget what is known of the key."""
        self._verdicts = {name: verdict for name, verdict in {**self._read(), **self._verdicts}.items() if name != key}
        self._write()

    def _read(self) -> dict[str, str]:
        if self._path is None:
            return {}
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            self._complain(f"kernel verdicts in {self._path} cannot be read ({error}): kernels are checked again")
            return {}

    def _complain(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(text)


def write_atomically(path: Path, content: bytes) -> None:
    """Readers see the old file or the whole new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


@cache
def code_hash() -> str:
    """Changes with any source file of `kernels`."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.cpp"))):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def verdict_key(name: str, profile: DeviceProfile, problem: Problem) -> str:
    parts = (name, profile.platform, profile.name, profile.driver, profile.runtime, code_hash(), repr(problem))
    return f"{name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"


class Verifier:
    """The `verify` and the `memory` of a Registry.

    Called: None when the kernel agrees with the last link of its chain, else the reason. A process that dies while an
    implementation is loaded or tried leaves a mark; after MAX_CRASHES of them that implementation is not tried again.
    """

    def __init__(self, references: Mapping[str, Implementation], verdicts: VerdictCache) -> None:
        self._references = references
        self._verdicts = verdicts

    def __call__(
        self,
        implementation: Implementation,
        kernel: Kernel,
        profile: DeviceProfile,
        problem: Problem,
        services: Services,
    ) -> str | None:
        reference = self._references[implementation.kernel]
        if reference.name == implementation.name:
            return None
        key = verdict_key(implementation.name, profile, problem)
        verdict = self._verdicts.get(key)
        if verdict is None or verdict.startswith(_TRYING):
            expected = reference.load(profile, problem, services)
            verdict = compare(implementation.kernel, kernel, expected, problem, services.device) or AGREES
            self._verdicts.put(key, verdict)
        return None if verdict == AGREES else verdict

    def known_failure(self, implementation: Implementation, profile: DeviceProfile, problem: Problem) -> str | None:
        verdict = self._verdicts.get(verdict_key(implementation.name, profile, problem))
        if verdict is None or verdict == AGREES:
            return None
        if not verdict.startswith(_TRYING):
            return verdict
        crashes = [mark for mark in verdict.removeprefix(_TRYING).split() if not _lives(mark)]
        if len(crashes) < MAX_CRASHES:
            return None
        return f"the process died {len(crashes)} times while it was loaded or checked"

    def begin(self, implementation: Implementation, profile: DeviceProfile, problem: Problem) -> None:
        if self._is_reference(implementation):
            return
        key = verdict_key(implementation.name, profile, problem)
        verdict = self._verdicts.get(key)
        if verdict is None or verdict.startswith(_TRYING):
            before = (verdict or _TRYING).rstrip()
            self._verdicts.put(key, f"{before} {_mark(os.getpid())}")

    def failed(
        self, implementation: Implementation, profile: DeviceProfile, problem: Problem, error: Exception | str
    ) -> None:
        """Kept until the key changes, unless the machine was at fault and may be better the next time."""
        if self._is_reference(implementation):
            return
        key = verdict_key(implementation.name, profile, problem)
        if isinstance(error, Exception) and _is_passing(error):
            self._verdicts.drop(key)
        else:
            self._verdicts.put(key, error if isinstance(error, str) else failure_text(error))

    def _is_reference(self, implementation: Implementation) -> bool:
        return self._references[implementation.kernel].name == implementation.name


def _is_passing(error: Exception) -> bool:
    """Full disks and memory, and compilers that a busy machine slowed down."""
    return isinstance(error, (OSError, MemoryError, TimeoutExpired)) or type(error).__name__ == "OutOfMemoryError"


def _mark(pid: int) -> str:
    """A process, and when it started: pids come again."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{pid}@"
    return f"{pid}@{stat.rsplit(')', 1)[-1].split()[19]}"


def _lives(mark: str) -> bool:
    return _mark(int(mark.split("@")[0])) == mark and not mark.endswith("@")


def compare(name: str, kernel: Kernel, reference: Kernel, problem: Problem, device: str = "cpu") -> str | None:
    """Run both on the kernel's trials, on the device. None when they agree."""
    from .trials import disagreement, make_trials

    for ours in make_trials(name, problem, device):
        expected = ours.copy()
        run_trial(name, kernel, ours.arguments)
        run_trial(name, reference, expected.arguments)
        reason = disagreement(name, ours, expected)
        if reason is not None:
            return reason
    return None


def run_trial(name: str, kernel: Kernel, arguments: tuple[object, ...]) -> None:
    """Call the kernel with the trial's arguments; a `linear` packs its weight first."""
    if name != "linear":
        kernel(*arguments)
        return
    out, x, weight, bias = arguments
    kernel(out, x, kernel.pack(weight, bias))  # type: ignore[attr-defined]
