"""Runs a loaded implementation once on a small generated problem and compares it with the reference before it serves.

Verdicts are cached by device, driver and the code of `kernels`. Torch-free to import; `verify` imports torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
    """Verdicts by key in one small JSON file, which several processes share: what another one wrote is kept. A file
    that cannot be read or written costs one warning, never a start.
    """

    def __init__(self, cache_dir: Path | None, warn: Callable[[str], None]) -> None:
        self._path = None if cache_dir is None else cache_dir / "kernel-verdicts.json"
        self._warn = warn
        self._warned = False
        self._verdicts = self._read()
        self.num_hits = 0

    def get(self, key: str) -> str | None:
        """As this process knows it: what others found out counts from the next start on."""
        verdict = self._verdicts.get(key)
        self.num_hits += verdict is not None
        return verdict

    def put(self, key: str, verdict: str) -> None:
        self.change(key, lambda known: verdict)

    def drop(self, key: str) -> None:
        """Forget what is known of the key."""
        self.change(key, lambda known: None)

    def starting_with(self, prefix: str) -> list[str]:
        """Verdicts of all keys that begin so."""
        return [verdict for key, verdict in self._verdicts.items() if key.startswith(prefix)]

    def change(self, key: str, change: Callable[[str | None], str | None]) -> None:
        """From what is known now, by whatever process, to what is known from now on; None is nothing."""
        if self._path is None:
            self._take(key, change)
            return
        try:
            with locked(self._path):
                self._verdicts = self._read()
                self._take(key, change)
                write_atomically(self._path, json.dumps(self._verdicts, indent=1).encode())
        except OSError as error:
            self._take(key, change)
            self._complain(
                f"kernel verdicts cannot be kept in {self._path} ({error}): kernels are checked at each start"
            )

    def _take(self, key: str, change: Callable[[str | None], str | None]) -> None:
        verdict = change(self._verdicts.get(key))
        if verdict is None:
            self._verdicts.pop(key, None)
        else:
            self._verdicts[key] = verdict

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


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time changes the file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


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


@cache
def package_stamp(package: str) -> str:
    """Changes with any file of another top-level package: by names, sizes and times, because it may be large."""
    module = sys.modules[package]
    places = [Path(place) for place in getattr(module, "__path__", ())]
    files = [file for place in places for file in sorted(place.rglob("*")) if "__pycache__" not in file.parts]
    if not places and module.__file__ is not None:
        files = [Path(module.__file__)]
    stats = [(str(file), file.stat()) for file in files if file.is_file()]
    return repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def code_stamp(implementation: Implementation) -> str:
    """Changes with our code, and with that of the package which an implementation comes from."""
    loader = getattr(implementation, "loader", type(implementation))
    package = getattr(loader, "__module__", "").split(".")[0]
    if package not in sys.modules or package == __name__.split(".")[0]:
        return code_hash()
    return code_hash() + package_stamp(package)


def verdict_prefix(implementation: Implementation, profile: DeviceProfile) -> str:
    """Of the keys of all its verdicts on this device, with this driver and this code."""
    parts = (profile.platform, profile.name, profile.driver, profile.runtime, code_stamp(implementation))
    return f"{implementation.name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}-"


def verdict_key(implementation: Implementation, profile: DeviceProfile, problem: Problem) -> str:
    return verdict_prefix(implementation, profile) + hashlib.sha256(repr(problem).encode()).hexdigest()[:16]


def together_key(profile: DeviceProfile) -> str:
    """Of work on many implementations at once, on this device, with this driver and this code."""
    parts = (profile.platform, profile.name, profile.driver, profile.runtime, code_hash())
    return f"together-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


class Verifier:
    """The `verify` and the `memory` of a Registry.

    Called: None when the kernel agrees with the last link of its chain, else the reason. A process that dies while an
    implementation is loaded or tried leaves a mark; after MAX_CRASHES of them that implementation is not tried again.
    """

    def __init__(self, references: Mapping[str, Implementation], verdicts: VerdictCache) -> None:
        self._references = references
        self._verdicts = verdicts
        self._tried: str | None = None
        self._together: str | None = None

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
        key = verdict_key(implementation, profile, problem)
        verdict = self._verdicts.get(key)
        if verdict is None or verdict.startswith(_TRYING):
            expected = reference.load(profile, problem, services)
            found = compare(implementation.kernel, kernel, expected, problem, services.device) or AGREES
            self._verdicts.change(key, lambda known: known if known is not None and _is_failure(known) else found)
            verdict = found
        return None if verdict == AGREES else verdict

    def known_failure(self, implementation: Implementation, profile: DeviceProfile, problem: Problem) -> str | None:
        verdict = self._verdicts.get(verdict_key(implementation, profile, problem))
        return None if verdict is None else _failure(verdict)

    def known_failures(self, implementation: Implementation, profile: DeviceProfile) -> tuple[str, ...]:
        verdicts = self._verdicts.starting_with(verdict_prefix(implementation, profile))
        return tuple(sorted({reason for verdict in verdicts if (reason := _failure(verdict)) is not None}))

    def begin(self, implementation: Implementation, profile: DeviceProfile, problem: Problem) -> None:
        if self._is_reference(implementation):
            return
        self._tried = verdict_key(implementation, profile, problem)
        self._mark(self._tried)

    def interrupt(self) -> None:
        for key in (self._tried, self._together):
            if key is not None:
                self._unmark(key)

    def has_agreed(self, implementation: Implementation, profile: DeviceProfile, problem: Problem) -> bool:
        verdict = self._verdicts.get(verdict_key(implementation, profile, problem))
        return verdict == AGREES or self._is_reference(implementation)

    @contextmanager
    def together(self, profile: DeviceProfile) -> Iterator[bool]:
        """A mark of its own: a death that leaves it is nobody's, and one by one the culprit is found by its own."""
        key = together_key(profile)
        marks = (self._verdicts.get(key) or "").removeprefix(_TRYING).split()
        if not all(map(_lives, marks)):
            yield False
            return
        self._together = key
        self._mark(key)
        try:
            yield True
        finally:
            self._together = None
            self._unmark(key)

    def _mark(self, key: str) -> None:
        """This process tries what the key names: should it die, that stays."""
        mark = _mark(os.getpid())

        def marked(known: str | None) -> str | None:
            if known is not None and (not known.startswith(_TRYING) or mark in known):
                return known
            return f"{known or _TRYING} {mark}"

        self._verdicts.change(key, marked)

    def _unmark(self, key: str) -> None:
        mark = _mark(os.getpid())

        def unmarked(known: str | None) -> str | None:
            if known is None or not known.startswith(_TRYING):
                return known
            left = known.replace(f" {mark}", "")
            return None if left == _TRYING else left

        self._verdicts.change(key, unmarked)

    def failed(
        self, implementation: Implementation, profile: DeviceProfile, problem: Problem, error: Exception | str
    ) -> None:
        """Kept until the key changes, unless the machine was at fault and may be better the next time."""
        if self._is_reference(implementation):
            return
        key = verdict_key(implementation, profile, problem)
        if isinstance(error, Exception) and _is_passing(error):
            self._verdicts.drop(key)
        else:
            self._verdicts.put(key, error if isinstance(error, str) else failure_text(error))

    def _is_reference(self, implementation: Implementation) -> bool:
        return self._references[implementation.kernel].name == implementation.name


def _is_failure(verdict: str) -> bool:
    return verdict != AGREES and not verdict.startswith(_TRYING)


def _failure(verdict: str) -> str | None:
    """In words; None for a verdict that lets it be tried."""
    if verdict == AGREES:
        return None
    if not verdict.startswith(_TRYING):
        return verdict
    crashes = [mark for mark in verdict.removeprefix(_TRYING).split() if not _lives(mark)]
    if len(crashes) < MAX_CRASHES:
        return None
    return f"the process died {len(crashes)} times while it was loaded or checked"


def _is_passing(error: Exception) -> bool:
    """Full disks and memory, and compilers that a busy machine slowed down."""
    return isinstance(error, (OSError, MemoryError, TimeoutExpired)) or "out of memory" in str(error).lower()


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
    from .trials import disagreement, make_trials, meddling

    least_first_chunk = getattr(kernel, "least_first_chunk", 0)
    for ours in make_trials(name, problem, device, least_first_chunk=least_first_chunk):
        expected = ours.copy()
        run_trial(name, kernel, ours.arguments)
        run_trial(name, reference, expected.arguments)
        reason = disagreement(name, ours, expected) or meddling(name, ours, expected)
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
