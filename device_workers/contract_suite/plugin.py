"""The suite's own part of pytest: the platform's option, the live device, messages by clause, and what was declined."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Generator, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ...ipc.conditions import TrimaranError
from ..platforms.contract import Clause, Found, Platform, Refused
from ..platforms.detection import platforms
from .command_line import PACKAGE
from .judgement import Violation, told
from .version import SUITE_VERSION

_PREFIX = "contract_suite_"
_FOLDER = Path(__file__).resolve().parent
_PLATFORM = pytest.StashKey[Platform]()
_OUTCOME = pytest.StashKey["Found | Refused"]()
_PASSED_OVER = pytest.StashKey[dict[str, str]]()
_OUTCOMES = pytest.StashKey[dict[str, set[str]]]()
_DECLINED_BY = pytest.StashKey[dict[str, list[str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("Trimaran's contract suite")
    _add(group, "platform", metavar="NAME", help="the platform to judge, as `trimaran serve --platform` takes it")
    _add(group, "clause", metavar="NAME", action="append", default=[], help="judge this clause only; repeatable")
    _add(group, "thorough", action="store_true", help="many more generated problems for every kernel")


def _add(group: pytest.OptionGroup, name: str, **attributes: Any) -> None:
    """Where another plug-in or conftest has an option of this name, ours is called --contract-NAME."""
    try:
        group.addoption(f"--{name}", dest=_PREFIX + name, **attributes)
    except (ValueError, ArgumentError):
        group.addoption(f"--contract-{name}", dest=_PREFIX + name, **attributes)


def _option(config: pytest.Config, name: str) -> Any:
    return config.getoption(_PREFIX + name)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "clause(name, needs): what a test of the suite judges, and what that needs")
    asked = _option(config, "platform")
    offered = {platform.name: platform for platform in platforms()}
    if asked not in offered:
        known = ", ".join(offered)
        said = "no platform was named" if asked is None else f"there is no platform {asked}"
        raise pytest.UsageError(f"{said}: --platform (--contract-platform, where it is taken) takes one of {known}")
    config.stash[_PLATFORM] = offered[asked]
    config.stash[_OUTCOME] = _detected(offered[asked])
    config.stash[_PASSED_OVER] = {}
    config.stash[_OUTCOMES] = {}
    config.stash[_DECLINED_BY] = {}


def _detected(platform: Platform) -> Found | Refused:
    try:
        return platform.detect()
    except Exception as error:  # a clause judges this; here it must not end the run
        return Refused(reason=f"its detection raised {told(error)}")


def pytest_report_header(config: pytest.Config) -> list[str]:
    platform, outcome = config.stash[_PLATFORM], config.stash[_OUTCOME]
    head = f"Trimaran contract suite {SUITE_VERSION}, platform {platform.name}"
    if isinstance(outcome, Refused):
        return [f"{head}: refused: {outcome.reason}"]
    return [head, *(f"  {device}" for device in outcome.devices)]


class SuiteModule(pytest.Module):
    """A file of the suite, imported by its name in the package: an editable clone's folder may be called anything."""

    def _getobj(self) -> Any:
        return import_module(f"{PACKAGE}.{self.path.stem}")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if module_path.resolve().parent != _FOLDER:
        return None
    module: pytest.Module = SuiteModule.from_parent(parent, path=module_path)
    return module


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Kernels are judged one implementation a test, where the platform has any."""
    if "implementation" in metafunc.fixturenames:
        from .kernel_problems import implementations

        offered = implementations(metafunc.config.stash[_PLATFORM], metafunc.config.stash[_OUTCOME])
        metafunc.parametrize("implementation", offered, ids=[entry.name for entry in offered])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = set(_option(config, "clause"))
    ours = {item: _clause_of(item)[0] for item in items if _is_ours(item)}
    unknown = sorted(wanted - set(ours.values()))
    if unknown:
        known = ", ".join(dict.fromkeys(ours.values()))
        raise pytest.UsageError(f"there is no clause {', '.join(unknown)}: --clause takes one of {known}")
    left_out = [item for item, name in ours.items() if wanted and name not in wanted]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Ends a test whose needs the platform declines, before anything of it runs."""
    if not _is_ours(item):
        return
    platform, outcome = item.config.stash[_PLATFORM], item.config.stash[_OUTCOME]
    name, needs = _clause_of(item)
    if isinstance(outcome, Refused) and not name.startswith("detection."):
        pytest.skip(f"the platform was refused: {outcome.reason}")
    for need in needs:
        if need in platform.declines:
            item.config.stash[_DECLINED_BY].setdefault(need, []).append(name)
            pytest.skip(f"declined: {need}: {platform.declines[need]}")


# -- what a test is given


@pytest.fixture
def platform(request: pytest.FixtureRequest) -> Platform:
    return request.config.stash[_PLATFORM]


@pytest.fixture
def outcome(request: pytest.FixtureRequest) -> Found | Refused:
    return request.config.stash[_OUTCOME]


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contract-suite")


@pytest.fixture(scope="session")
def _live(request: pytest.FixtureRequest, cache_dir: Path) -> Iterator[Any]:
    """One live device for all clauses: what one clause breaks, the next one may notice."""
    from .subject import Subject, Usable

    found = request.config.stash[_OUTCOME]
    assert isinstance(found, Found)
    usable = Usable(platform=request.config.stash[_PLATFORM], found=found)
    backend = usable.open(cache_dir)
    yield Subject(usable, backend, cache_dir)
    backend.close()


@pytest.fixture
def subject(_live: Any) -> Iterator[Any]:
    import torch

    with torch.inference_mode():
        yield _live


@pytest.fixture
def is_thorough(request: pytest.FixtureRequest) -> bool:
    return bool(_option(request.config, "thorough"))


# -- what is told


def _clause_of(item: pytest.Item) -> tuple[str, tuple[Clause, ...]]:
    marker = item.get_closest_marker("clause")
    assert marker is not None, f"{item.nodeid} judges no clause"
    name, needs = marker.args
    return name, needs


def _is_ours(item: pytest.Item) -> bool:
    return isinstance(item.getparent(SuiteModule), SuiteModule)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure begins with the clause's name; one of ours is its text alone, another one keeps its traceback."""
    report = yield
    if not _is_ours(item):
        return report
    name, _ = _clause_of(item)
    if call.when == "call" or not report.passed:
        item.config.stash[_OUTCOMES].setdefault(name, set()).add(report.outcome)
    if call.excinfo is None:
        return report
    if report.failed:
        error = call.excinfo.value
        text = str(error) if isinstance(error, Violation) else told(error)
        trace = "" if isinstance(error, (Violation, TrimaranError)) else f"\n{report.longreprtext}"
        report.longrepr = f"{name}: {text}{trace}"
    elif report.skipped and report.when in ("setup", "call"):
        item.config.stash[_PASSED_OVER][item.nodeid] = f"{name}: {call.excinfo.value}"
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    platform = config.stash[_PLATFORM]
    outcomes = config.stash[_OUTCOMES]
    _section(terminalreporter, "kept", [name for name, seen in outcomes.items() if _is_kept(seen)])
    reports = (*terminalreporter.getreports("failed"), *terminalreporter.getreports("error"))
    _section(terminalreporter, "broken clauses", [str(report.longrepr).splitlines()[0] for report in reports])
    by = config.stash[_DECLINED_BY]
    declined = [
        f"{name}: {reason}" + (f" (not judged: {', '.join(dict.fromkeys(by[name]))})" if name in by else "")
        for name, reason in platform.declines.items()
    ]
    _section(terminalreporter, "declined: a decline is not a pass", declined)
    others = [text for text in config.stash[_PASSED_OVER].values() if ": declined: " not in text]
    _section(terminalreporter, "not judged", list(dict.fromkeys(others)))


def _is_kept(seen: set[str]) -> bool:
    """Judged at least once, and never broken."""
    return "passed" in seen and "failed" not in seen


def _section(reporter: Any, title: str, lines: list[str]) -> None:
    if lines:
        reporter.section(title)
        for line in lines:
            reporter.line(line)
