"""docs/adding-hardware.md: its commands are run, and what it lists is all there is."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trimaran.device_workers.platforms.contract import Clause

from ..tiny_models import save, save_tokenizer, variants
from .site import EXAMPLE, ROOT, SUITE, Site, make_site

PAGE = (ROOT / "docs" / "adding-hardware.md").read_text()
COMMANDS = re.findall(r"^ *\$ (.*)$", PAGE, re.M)
ELSEWHERE = {
    'pip install "trimaran[test]"': "an installation from an index",
    "pip install --editable tools/example_platform": "tests stand the package on the path: site.make_site",
    f"pytest --pyargs {SUITE} --platform example": "test_suite.test_the_example_platform",
    "trimaran serve MODEL --platform example": "test_example_platform.test_served_by_name",
}
RUN_HERE = [command for command in COMMANDS if command not in ELSEWHERE]
SPELLED = {
    "trimaran": ["-m", "trimaran.frontend.launch.commands"],
    "pytest": ["-m", "pytest", "-p", "no:cacheprovider"],
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_site(tmp_path_factory.mktemp("site"), with_example=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(variants()["llama"], folder)
    save_tokenizer(folder)
    return folder


def test_the_page_names_what_runs_elsewhere() -> None:
    assert set(ELSEWHERE) <= set(COMMANDS)
    assert len(RUN_HERE) == 6


@pytest.mark.parametrize("command", RUN_HERE)
def test_a_command_of_the_page(site: Site, model: Path, tmp_path: Path, command: str) -> None:
    words = shlex.split(command.replace("MODEL", str(model)).replace("tools/example_platform", str(EXAMPLE)))
    done = subprocess.run(
        [sys.executable, "-P", *SPELLED[words[0]], *words[1:]],
        cwd=tmp_path,
        env=site.environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    worst = 1 if "doctor" in words else 0  # its warnings: this machine may lack something that the page is not about
    assert done.returncode <= worst, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search("Example One|example", done.stdout), "it is about the example platform"


def test_its_entry_points_are_the_example_s() -> None:
    block = re.search(r"```toml\n(.*?)```", PAGE, re.S)
    assert block is not None
    lines = [line.strip() for line in block.group(1).splitlines()]
    assert "\n".join(lines).strip() in (EXAMPLE / "pyproject.toml").read_text()


def test_every_decline_is_explained() -> None:
    table = PAGE.partition("| declined | then |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^ *\| `(\w+)` \|", table, re.M)) == set(Clause)


def test_the_files_that_it_names_exist() -> None:
    assert (ROOT / "tools" / "example_platform" / "trimaran_example" / "kernels.py").is_file()
    for name in ("contract.py", "torch_accelerator.py", "xpu.py"):
        assert name in PAGE and (ROOT / "device_workers" / "platforms" / name).is_file()
