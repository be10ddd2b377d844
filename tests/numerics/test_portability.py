"""The record of what compiles where is current, complete and green; and the tool that makes it sees every fault."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimaran.kernels.catalog import CATALOG
from trimaran.kernels.registry import Registry
from trimaran.tools import compile_matrix as matrix

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not HAS_TRITON, reason="Triton is not installed: pip install 'trimaran[test]' on Linux"
)
EVERY_RUN = ("sm_90", "gfx942", "gfx1100")
NAMES = [implementation.name for implementation in matrix.implementations()]


def check_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", matrix.__file__, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)


@needs_triton
def test_the_record_is_current_complete_and_green() -> None:
    """By fingerprints of code, arguments and compiler: a kernel that changed must be compiled again.

    Run `python tools/compile_matrix.py` and commit what it writes.
    """
    done = check_command("--check")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_no_cell_is_empty() -> None:
    cells = matrix.read_record()["cells"]
    assert list(cells) == NAMES
    for name, by_architecture in cells.items():
        assert list(by_architecture) == list(matrix.TARGETS), name
        for architecture, cell in by_architecture.items():
            assert cell.get("refused") or any("registers" in entry for entry in cell["launches"].values()), architecture
    assert matrix.faults(cells) == []


def test_the_page_is_made_from_the_record() -> None:
    assert matrix.PAGE.read_text() == matrix.page(matrix.read_record())


def test_bulk_copies_are_bulk_copies() -> None:
    """A compiler may turn a descriptor's load into ordinary ones: then the strategy would be one in name only."""
    cells = matrix.read_record()["cells"]
    for name, architecture, title, entry in matrix.entries(cells):
        is_bulk = name == "triton_paged_attention_bulk" and title.rsplit(" / ", 1)[-1].startswith("tile")
        assert (entry.get("bulk_copies", 0) > 0) == is_bulk, f"{name} on {architecture}: {title}"


@pytest.mark.parametrize("architecture", matrix.TARGETS)
def test_where_one_is_not_offered_another_is(architecture: str) -> None:
    """A cell without numbers, and a problem within a cell, says what the implementation itself says; the registry then
    has another.
    """
    registry, profile = Registry(CATALOG), matrix.TARGETS[architecture].profile()
    cells = matrix.read_record()["cells"]
    num_refused = 0
    for implementation in matrix.implementations():
        cell = cells[implementation.name][architecture]
        for setting, problem in matrix.SETTINGS[implementation.kernel].items():
            recorded = cell.get("refused") or cell["launches"].get(setting, {}).get("refused")
            assert implementation.misfit(profile, problem) == recorded
            if recorded is not None:
                num_refused += 1
                resolution = registry.resolve(implementation.kernel, profile, problem)
                assert resolution.chosen != implementation.name
    assert num_refused or architecture in ("sm_90", "sm_100")


@needs_triton
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", EVERY_RUN)
def test_one_configuration_per_kernel(architecture: str) -> None:
    """From the record where its fingerprint is the same, else compiled now."""
    cells = matrix.expected_cells(NAMES, [architecture])
    for by_architecture in cells.values():
        launches = by_architecture[architecture].get("launches", {})
        kept = next(({title: entry} for title, entry in launches.items() if "fingerprint" in entry), {})
        by_architecture[architecture]["launches"] = kept
    matrix.fill(cells, matrix.known_numbers(matrix.read_record()), print)
    assert matrix.faults(cells) == []


@needs_triton
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_whole_matrix() -> None:
    """Compiled afresh where the record is not current; writes nothing."""
    cells = matrix.expected_cells(NAMES, matrix.TARGETS)
    matrix.fill(cells, matrix.known_numbers(matrix.read_record()), print)
    assert matrix.faults(cells) == []


GREEN: dict[str, Any] = {"registers": 90, "spilled": 0, "shared": 40_000, "seconds": 1.0}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"spilled": 8}, "spills 8"),
        ({"shared": 65_537}, "takes 65537 bytes of shared memory, a block has 65536"),
        ({"error": "error: could not allocate output register"}, "could not allocate"),
    ],
)
def test_what_makes_a_cell_red(changes: dict[str, Any], says: str | None) -> None:
    found = matrix.fault("gfx942", GREEN | changes)
    assert found == says or (says is not None and found is not None and says in found)
    assert matrix.fault("gfx942", {"fingerprint": "x"}) == "not compiled"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise SystemExit(7)", "ended its process with status 7"),
        ("import os; os.abort()", "ended its process with status -6"),
        (
            "print('x.py:3: error: lost', file=sys.stderr, flush=True); print(json.dumps(green), flush=True)",
            "error: lost",
        ),
    ],
)
def test_a_compiler_that_dies_or_only_complains_is_seen(code: str, says: str, tmp_path: Path) -> None:
    program = f"import json, sys\ngreen = {json.dumps(GREEN)}\nsys.stdin.readline()\n{code}\n"
    script = tmp_path / "compiler.py"
    script.write_text(program)
    child = matrix.Child(tmp_path, [sys.executable, str(script)])
    result = child.compile({"name": "any"})
    assert says in result["error"]
    child.close()
    following = matrix.Child(tmp_path, [sys.executable, "-c", "import sys; sys.stdin.readline(); print('{}')"])
    assert following.compile({"name": "any"}) == {}
    following.close()


@needs_triton
def test_fingerprints_follow_code_arguments_and_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def prints(name: str, architecture: str, setting: str) -> set[str]:
        target = matrix.TARGETS[architecture]
        return {launched.fingerprint(target) for launched in matrix.launches(name, target, setting)}

    before = prints("triton_rms_norm", "sm_90", "bfloat16")
    assert prints("triton_rms_norm", "sm_90", "bfloat16") == before
    assert not prints("triton_rms_norm", "sm_90", "float16") & before
    assert not prints("triton_rms_norm", "gfx942", "bfloat16") & before
    code_of: Callable[[str], str] = matrix.code_of
    monkeypatch.setattr(matrix, "code_of", lambda module: code_of(module) + "changed")
    assert not prints("triton_rms_norm", "sm_90", "bfloat16") & before
