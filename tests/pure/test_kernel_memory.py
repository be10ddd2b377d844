"""What is remembered of kernels between starts: failures until their key changes, crashes, and whose turn it was."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import pytest
from msgspec.structs import replace

from trimaran.ipc.facts import DeviceProfile, Feature, Problem
from trimaran.kernels import verification
from trimaran.kernels.implementation import DeclaredImplementation, KernelMetadata
from trimaran.kernels.registry import Registry
from trimaran.kernels.verification import VerdictCache, Verifier, verdict_key
from trimaran.tests.pure.kernel_shelf import CPU, PROBLEM, SERVICES, Shelf, load_plain


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def test_a_failure_is_known_at_the_next_start(shelf: Shelf) -> None:
    reason = {"bad": "RuntimeError: it does not compile"}
    assert [shelf.load(), shelf.load(), shelf.load()] == [reason] * 3
    assert shelf.num_loads == 1, "it was tried again"
    assert shelf.verifier().known_failures(shelf.bad, CPU) == ("RuntimeError: it does not compile",)


@pytest.mark.parametrize(
    ("profile", "problem"),
    [
        (replace(CPU, driver="2"), PROBLEM),
        (replace(CPU, runtime="another torch"), PROBLEM),
        (replace(CPU, name="another CPU"), PROBLEM),
        (CPU, replace(PROBLEM, head_dim=64)),
    ],
    ids=["driver", "runtime", "device", "problem"],
)
def test_it_is_tried_again_when_its_key_changes(shelf: Shelf, profile: DeviceProfile, problem: Problem) -> None:
    shelf.load()
    shelf.error = None
    assert shelf.load() and not shelf.load(profile, problem)
    assert shelf.num_loads == 2


def test_it_is_tried_again_when_our_code_changes(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.load()
    monkeypatch.setattr(verification, "code_hash", lambda: "another release")
    assert shelf.verifier().known_failures(shelf.bad, CPU) == ()
    shelf.load()
    assert shelf.num_loads == 2


@pytest.fixture
def vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Another package, with one kernel and a library that its code loads."""
    package = tmp_path / "vendor_of_this_test"
    package.mkdir()
    (package / "__init__.py").write_text("def load(profile, problem, services):\n    raise RuntimeError('no')\n")
    (package / "library.so").write_bytes(b"code")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    sys.modules.pop("vendor_of_this_test", None)
    verification.package_stamp.cache_clear()


@pytest.mark.parametrize("file", ["__init__.py", "library.so", "new.py"])
def test_the_key_knows_the_code_of_another_package(vendor: Path, file: str) -> None:
    from vendor_of_this_test import load  # type: ignore[import-not-found]

    offered = DeclaredImplementation(name="theirs", kernel="twist", loader=load)
    before = verdict_key(offered, CPU, PROBLEM)
    verification.package_stamp.cache_clear()
    assert verdict_key(offered, CPU, PROBLEM) == before
    (vendor / "__pycache__").mkdir(exist_ok=True)
    (vendor / "__pycache__" / "new.pyc").write_bytes(b"")
    verification.package_stamp.cache_clear()
    assert verdict_key(offered, CPU, PROBLEM) == before, "what Python leaves there is no change"
    with (vendor / file).open("a") as text:
        text.write("# 2\n")
    verification.package_stamp.cache_clear()
    assert verdict_key(offered, CPU, PROBLEM) != before


@pytest.mark.parametrize("error", [OSError("disk full"), MemoryError(), TimeoutExpired("cc", 1.0)], ids=repr)
def test_what_the_machine_is_to_blame_for_is_tried_again(shelf: Shelf, error: Exception) -> None:
    shelf.error = error
    assert shelf.load() and shelf.load()
    assert shelf.num_loads == 2


CRASH = """
import os, signal, sys
from pathlib import Path
from trimaran.tests.pure.kernel_shelf import CPU, PROBLEM, Shelf
shelf = Shelf(Path(sys.argv[1]))
verifier = shelf.verifier()
if verifier.known_failure(shelf.bad, CPU, PROBLEM):
    sys.exit(3)
verifier.begin(shelf.bad, CPU, PROBLEM)
if sys.argv[2] == "interrupt":
    verifier.interrupt()
os.kill(os.getpid(), signal.SIGKILL)
"""


def die(folder: Path, how: str) -> int:
    return subprocess.run([sys.executable, "-c", CRASH, str(folder), how], timeout=60, check=False).returncode


def test_two_deaths_are_enough(shelf: Shelf) -> None:
    assert die(shelf.folder, "crash") == -9
    assert shelf.verifier().known_failure(shelf.bad, CPU, PROBLEM) is None, "one may be the user's"
    assert die(shelf.folder, "crash") == -9
    assert die(shelf.folder, "crash") == 3
    known = "the process died 2 times while it was loaded or checked"
    assert shelf.load() == {"bad": known} and shelf.num_loads == 0
    assert shelf.verifier().known_failures(shelf.bad, CPU) == (known,)


def test_whoever_is_told_to_end_shows_nothing(shelf: Shelf) -> None:
    for _ in range(3):
        assert die(shelf.folder, "interrupt") == -9
    assert shelf.verdicts() == {}


def test_a_living_process_is_no_crash(shelf: Shelf) -> None:
    """Another server that loads the same kernel at this moment; and this one, twice."""
    for _ in range(3):
        shelf.verifier().begin(shelf.bad, CPU, PROBLEM)
    assert shelf.verifier().known_failure(shelf.bad, CPU, PROBLEM) is None
    (mark,) = shelf.verdicts().values()
    assert mark.count(f"{os.getpid()}@") == 1
    assert die(shelf.folder, "crash") == -9
    (mark,) = shelf.verdicts().values()
    assert len(mark.split()) == 3, "the mark of one process is lost"


def test_one_that_works_in_the_end_bears_no_mark(shelf: Shelf) -> None:
    die(shelf.folder, "crash")
    shelf.error = None
    verifier = shelf.verifier()
    assert Registry((shelf.bad, shelf.plain), _agreeing(verifier), verifier).load("twist", CPU, PROBLEM, SERVICES)
    assert list(shelf.verdicts().values()) == ["agrees"]


def _agreeing(verifier: Verifier) -> Any:
    """The verifier, with a comparison that always agrees."""

    def verify(*arguments: Any) -> str | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verification, "compare", lambda *_: None)
            return verifier(*arguments)

    return verify


class TestTwoProcesses:
    def test_what_the_other_found_is_kept(self, shelf: Shelf) -> None:
        """Both have read the file when neither had found anything."""
        one, other = shelf.verifier(), shelf.verifier()
        one.failed(shelf.bad, CPU, PROBLEM, "failed while serving: X")
        other.failed(shelf.bad, CPU, replace(PROBLEM, head_dim=64), "Y")
        assert sorted(shelf.verdicts().values()) == ["Y", "failed while serving: X"]
        other.begin(shelf.bad, CPU, PROBLEM)
        assert other.known_failure(shelf.bad, CPU, PROBLEM) == "failed while serving: X"

    def test_agreement_does_not_undo_a_failure(self, shelf: Shelf) -> None:
        """It agreed here on a small problem while it failed there under load."""
        here, there = shelf.verifier(), shelf.verifier()
        here.begin(shelf.bad, CPU, PROBLEM)
        shelf.error = None

        def meanwhile(*_: Any) -> None:
            there.failed(shelf.bad, CPU, PROBLEM, "failed while serving: X")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verification, "compare", meanwhile)
            assert here(shelf.bad, shelf.bad.load(CPU, PROBLEM, SERVICES), CPU, PROBLEM, SERVICES) is None
        assert list(shelf.verdicts().values()) == ["failed while serving: X"]

    def test_many_at_once_lose_nothing(self, shelf: Shelf) -> None:
        def write(number: int) -> None:
            cache = VerdictCache(shelf.folder, shelf.warnings.append)
            for part in range(5):
                cache.put(f"{number}-{part}", "agrees")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(8)))
        assert len(shelf.verdicts()) == 40 and not shelf.warnings

    def test_a_file_that_was_damaged_is_whole_again(self, shelf: Shelf) -> None:
        shelf.load()
        (shelf.folder / "kernel-verdicts.json").write_bytes(b'{"bad-')
        assert shelf.load() == {"bad": "RuntimeError: it does not compile"}
        assert len(shelf.verdicts()) == 1 and len(shelf.warnings) == 1
        assert not list(shelf.folder.glob(".kernel-verdicts.json-*"))


TOGETHER = """
import os, signal, sys
from pathlib import Path
from trimaran.tests.pure.kernel_shelf import CPU, Shelf
verifier = Shelf(Path(sys.argv[1])).verifier()
with verifier.together(CPU) as may:
    if not may:
        sys.exit(3)
    if sys.argv[2] == "interrupt":
        verifier.interrupt()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def die_together(folder: Path, how: str) -> int:
    return subprocess.run([sys.executable, "-c", TOGETHER, str(folder), how], timeout=60, check=False).returncode


def test_after_a_death_among_many_they_go_one_by_one(shelf: Shelf) -> None:
    """And none of them is blamed: the culprit is found by its own mark."""
    assert die_together(shelf.folder, "crash") == -9
    assert die_together(shelf.folder, "crash") == 3
    verifier = shelf.verifier()
    assert verifier.known_failures(shelf.bad, CPU) == () and not verifier.has_agreed(shelf.bad, CPU, PROBLEM)
    with verifier.together(replace(CPU, driver="2")) as may:
        assert may, "another driver may do better"
    shelf.error = None
    assert not shelf.load()


def test_work_on_many_that_ends_leaves_no_mark(shelf: Shelf) -> None:
    for how in ("return", "raise"):
        with suppress(KeyError), shelf.verifier().together(CPU) as may:
            assert may and len(shelf.verdicts()) == 1
            with shelf.verifier().together(CPU) as another:
                assert another, "a process that lives has not died"
            if how == "raise":
                raise KeyError
        assert shelf.verdicts() == {}
    assert die_together(shelf.folder, "interrupt") == -9
    assert shelf.verdicts() == {}


def test_only_what_is_compiled_and_new_is_prepared(shelf: Shelf) -> None:
    compiled = DeclaredImplementation(
        name="compiled",
        kernel="twist",
        loader=load_plain,
        metadata=KernelMetadata(features=frozenset({Feature.TRITON})),
    )
    device = replace(CPU, capability=replace(CPU.capability, features=frozenset({Feature.TRITON})))

    def prepared(*catalog: DeclaredImplementation) -> list[str]:
        registry = Registry((*catalog, shelf.plain), None, shelf.verifier())
        return [found.name for found in registry.to_prepare(("twist",), device, PROBLEM)]

    assert prepared(compiled) == ["compiled"]
    assert prepared(shelf.bad) == prepared(shelf.bad, compiled) == []
    shelf.verifier().failed(shelf.bad, device, PROBLEM, "it does not compile")
    assert prepared(shelf.bad, compiled) == ["compiled"], "the one that serves is known to be another"
    verifier = shelf.verifier()
    Registry((compiled, shelf.plain), _agreeing(verifier), verifier).load("twist", device, PROBLEM, SERVICES)
    assert prepared(compiled) == []
