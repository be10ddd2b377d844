"""The contract suite over the platforms that are here: all that they do not decline holds, and declines are told."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trimaran.device_workers.contract_suite.version import SUITE_VERSION
from trimaran.device_workers.platforms.contract import Clause

from .clauses import COMPUTING, HEALTH, LIFE_CYCLE, OWN_MEMORY, PINNED, RECORDING, TOGETHER
from .report import Report
from .site import ROOT, SUITE, Site, make_site

FILES = ("pyproject.toml", "README.md", "LICENSE", "__init__.py", "py.typed")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_site(tmp_path_factory.mktemp("site"), with_example=True)


def judged(site: Site, name: str, *arguments: str) -> Report:
    done = site.run_suite(name, *arguments)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert f"Trimaran contract suite {SUITE_VERSION}, platform {name}\n" in done.stdout
    report = Report(done.stdout)
    assert not report.broken
    return report


@pytest.mark.timeout(200)
def test_the_processor(site: Site) -> None:
    report = judged(site, "cpu")
    assert set(report.kept) == LIFE_CYCLE | COMPUTING | RECORDING | TOGETHER | HEALTH
    assert set(report.declined) == {
        Clause.STREAM_PRIORITIES,
        Clause.CONCURRENT_STREAMS,
        Clause.ASYNC_COPIES,
        Clause.PINNED_MEMORY,
        Clause.MEMORY_HOLDERS,
    }
    assert "every operation is done when its call returns" in report.declined[Clause.STREAM_PRIORITIES]
    assert "(not judged: streams.priorities_act)" in report.declined[Clause.STREAM_PRIORITIES]
    assert len(report.not_judged) == 1, "only running out by and by harms other programs here"


def test_the_null_platform_keeps_its_life_cycle(site: Site) -> None:
    report = judged(site, "null")
    assert set(report.kept) == LIFE_CYCLE
    assert set(report.declined) == set(Clause)
    declined = re.findall(r"[\w.]+", report.declined[Clause.COMPUTE].partition("not judged: ")[2])
    assert set(declined) >= COMPUTING | RECORDING | TOGETHER | HEALTH, "a clause is passed over without a word"


def test_the_example_platform(site: Site) -> None:
    report = judged(site, "example")
    assert set(report.kept) == LIFE_CYCLE | COMPUTING | OWN_MEMORY
    assert report.declined.keys() == {
        Clause.GRAPH_CAPTURE,
        Clause.STREAM_PRIORITIES,
        Clause.CONCURRENT_STREAMS,
        Clause.ASYNC_COPIES,
        Clause.PINNED_MEMORY,
        Clause.MEMORY_HOLDERS,
        Clause.COLLECTIVES,
        Clause.HEALTH,
    }
    assert "[example_rms_norm]" in site.run_suite("example", "--collect-only", "-q").stdout, "the vendor's kernel"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["cpu", "example"])
def test_more_problems(site: Site, name: str) -> None:
    judged(site, name, "--thorough")


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arguments", [(), ("--thorough",)], ids=["short", "thorough"])
def test_cuda(site: Site, arguments: tuple[str, ...]) -> None:
    report = judged(site, "cuda", *arguments)
    assert set(report.kept) >= LIFE_CYCLE | COMPUTING | PINNED | OWN_MEMORY | {"graph_capture.replay"}


def test_what_it_is_asked_wrongly(site: Site) -> None:
    unknown = site.run_suite("abacus", "--collect-only")
    assert unknown.returncode == 4
    assert "there is no platform abacus: --platform (" in unknown.stderr
    assert "takes one of cuda, rocm, xpu, ascend, metal, example, cpu, null" in unknown.stderr


def test_a_platform_that_is_refused_passes_nothing_over_in_silence(site: Site) -> None:
    """Here no Apple device is: the suite fails, with the reason."""
    done = site.run_suite("metal")
    report = Report(done.stdout)
    assert done.returncode == 1
    assert report.broken["detection.usable"].startswith("it was refused, so nothing can be judged here: ")
    assert set(report.broken) == {"detection.usable"}
    assert set(report.kept) <= {"detection.stateless", "detection.devices"}
    assert len(report.not_judged) > 20


def test_it_ships_in_the_wheel(tmp_path: Path) -> None:
    """Unpacked as an installer would, with nothing of the clone on the path: its own entry point brings the option."""
    tree, installed = tmp_path / "tree", tmp_path / "installed"
    tree.mkdir()  # the build leaves a folder behind
    for name in ("frontend", "engine_core", "device_workers", "kernels", "ipc", *FILES):
        (tree / name).symlink_to(ROOT / name)
    command = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", command, str(tmp_path)], cwd=tree, capture_output=True, check=True)
    with zipfile.ZipFile(next(tmp_path.glob("trimaran-*.whl"))) as wheel:
        wheel.extractall(installed)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", SUITE, "--platform", "null"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(Report(done.stdout).kept) == LIFE_CYCLE


def test_other_test_runs_see_nothing_of_it(site: Site, tmp_path: Path) -> None:
    """The plug-in is installed, and a project of its own has an option of the same name."""
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--platform', default='none')\n"
    )
    (tmp_path / "test_own.py").write_text(
        "def test_own(pytestconfig):\n    assert pytestconfig.option.platform == 'x'\n"
    )
    done = site.run_pytest(str(tmp_path), "--platform", "x", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Trimaran" not in done.stdout


def test_an_option_that_is_taken(site: Site, tmp_path: Path) -> None:
    """A project's conftest has a --platform: the suite's is then called by its longer name."""
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--platform')\n")
    done = site.run_pytest("--pyargs", SUITE, "--contract-platform", "null", "--platform", "x", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(Report(done.stdout).kept) == LIFE_CYCLE
    unnamed = site.run_pytest("--pyargs", SUITE, "--platform", "null", folder=tmp_path)
    assert unnamed.returncode == 4
    assert "no platform was named: --platform (--contract-platform, where it is taken)" in unnamed.stderr


def test_the_folder_of_a_clone_may_have_any_name(site: Site) -> None:
    """By its path, as in an editable installation of a folder that is not called trimaran."""
    clone = site.folder / "my-clone"
    clone.symlink_to(ROOT, target_is_directory=True)
    file = clone / "device_workers" / "contract_suite" / "test_life_cycle.py"
    done = site.run_pytest(str(file), "--platform", "null")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(Report(done.stdout).kept) == LIFE_CYCLE
