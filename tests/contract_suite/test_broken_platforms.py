"""The suite over platforms broken on purpose: it fails each time, and says which clause is not kept and how."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .clauses import COMPUTING, HEALTH, LIFE_CYCLE, OWN_MEMORY, PINNED, RECORDING, SIDE_BY_SIDE
from .report import Report
from .site import SUITE, Site, make_site

HOME = "trimaran.tests.contract_suite"
NAMES = (
    "careless",
    "unordered",
    "early",
    "deaf",
    "silent",
    "stale",
    "brittle",
    "leaking",
    "forgetful",
    "rough",
    "poisoned",
    "truncating",
    "hasty",
    "half_fenced",
    "hot",
    "wrong_math",
    "moody",
    "mute",
    "curt",
    "wrong_sum",
)
"""As in `broken_platforms`, which a process that has the example device imports."""
IN_EVERY_RUN = {
    *(
        "careless",
        "unordered",
        "leaking",
        "poisoned",
        "wrong_math",
        "wrong_sum",
    ),
}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    broken = {name: f"{HOME}.broken_platforms:make_{name}" for name in NAMES}
    site = make_site(tmp_path_factory.mktemp("site"), with_example=True)
    sound = {"queued": f"{HOME}.queued_platform:QueuedPlatform"}
    site.declare("trimaran-broken", {"trimaran.platforms": broken | sound})
    return site


@pytest.fixture(scope="session")
def expected(site: Site) -> dict[str, tuple[str, str]]:
    """Clause and words by platform."""
    code = f"import json; from {HOME}.broken_platforms import BROKEN; print(json.dumps(BROKEN))"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=site.environment, capture_output=True, text=True, timeout=60, check=True)
    known: dict[str, tuple[str, str]] = json.loads(done.stdout)
    assert tuple(known) == NAMES
    return known


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_sound_one_passes(site: Site) -> None:
    """What the broken ones are made of: a failure below is the break's."""
    done = site.run_suite("queued")
    assert done.returncode == 0, done.stdout[-5000:]
    report = Report(done.stdout)
    assert set(report.declined) == {"stream_priorities", "memory_holders", "collectives"}
    some = RECORDING - {"graph_capture.any_size"}
    assert set(report.kept) == LIFE_CYCLE | COMPUTING | HEALTH | PINNED | OWN_MEMORY | SIDE_BY_SIDE | some


@pytest.mark.long
def test_the_sound_one_keeps_what_the_others_break(site: Site, expected: dict[str, tuple[str, str]]) -> None:
    """But for collectives, which it has none of; the processor's run judges those."""
    clauses = {clause for clause, _ in expected.values()}
    done = site.run_suite("queued", *(f"--clause={clause}" for clause in sorted(clauses)))
    assert done.returncode == 0, done.stdout[-5000:]
    assert set(Report(done.stdout).kept) == clauses - {"collectives.two_ranks"}


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.long) for name in NAMES]
)
def test_a_broken_one_fails_by_name(site: Site, expected: dict[str, tuple[str, str]], name: str) -> None:
    clause, words = expected[name]
    done = site.run_suite(name, "--clause", clause)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-2000:]
    report = Report(done.stdout)
    assert clause in report.broken, report.output[-3000:]
    assert words in report.broken[clause]
    assert re.search(rf"^{re.escape(clause)}: .*{re.escape(words)}", done.stdout, re.M), (
        "the failure itself names it too"
    )


@pytest.mark.long
def test_a_wrong_kernel_is_named_and_never_served(tmp_path: Path) -> None:
    """On a sound device: the suite fails on the kernel, and a start demotes it, with the reason."""
    site = make_site(tmp_path / "site", with_example=True)
    site.declare(
        "trimaran-hasty",
        {
            "trimaran.platforms": {"queued": f"{HOME}.queued_platform:QueuedPlatform"},
            "trimaran.kernels": {"hasty": f"{HOME}.broken_platforms:WRONG_KERNELS"},
        },
    )
    done = site.run_suite(
        "queued", "--clause", "kernels.agree", "--clause", "kernels.demotion", "--clause", "model.tokens"
    )
    report = Report(done.stdout)
    assert report.broken["kernels.agree"].startswith("hasty_rms_norm on float32, ")
    assert set(report.broken) == {"kernels.agree"}
    assert {"kernels.demotion", "model.tokens"} <= set(report.kept), "its tokens are right, by way of the next kernel"
    code = (
        "import json, sys; from pathlib import Path\n"
        f"from {SUITE}.tiny_model import start\n"
        "resolutions = start('queued', Path(sys.argv[1]))._kernels.resolutions\n"
        "print(json.dumps({entry.kernel: [entry.chosen, entry.demoted] for entry in resolutions}))"
    )
    command = [sys.executable, "-P", "-c", code, str(tmp_path)]
    started = subprocess.run(command, env=site.environment, capture_output=True, text=True, timeout=60, check=True)
    chosen, demoted = json.loads(started.stdout)["rms_norm"]
    assert chosen == "plain_rms_norm"
    assert demoted["hasty_rms_norm"].startswith("rms_norm disagrees with its reference")


def test_a_kernel_that_nobody_can_use_is_told(tmp_path: Path) -> None:
    """A start warns and goes on; its vendor, who runs the suite, must know."""
    site = make_site(tmp_path / "site", with_example=True)
    site.declare("trimaran-absent", {"trimaran.kernels": {"absent": "no_such_package:KERNELS"}})
    report = Report(site.run_suite("example", "--clause", "kernels.offered").stdout)
    assert "kernels of the package trimaran-absent" in report.broken["kernels.offered"]
    assert "No module named 'no_such_package'" in report.broken["kernels.offered"]
