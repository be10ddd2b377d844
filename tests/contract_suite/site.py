"""A folder that stands for an installation: packages found by their entry points, without installing anything."""

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "tools" / "example_platform"
SUITE = "trimaran.device_workers.contract_suite"
_WITHOUT = [f"-pno:{name}" for name in ("cacheprovider", "schemathesis", "hypothesispytest")]
EntryPoints = dict[str, dict[str, str]]


def entry_points_of(project: Path) -> EntryPoints:
    """As its pyproject.toml lists them."""
    found: EntryPoints = tomllib.loads((project / "pyproject.toml").read_text())["project"]["entry-points"]
    return found


@dataclass(frozen=True)
class Site:
    """A folder for PYTHONPATH; `paths` are further ones that hold the code."""

    folder: Path
    paths: tuple[Path, ...] = ()

    @property
    def python_path(self) -> str:
        """The folder of this package first, whatever it is called."""
        package = self.folder / "package"
        package.mkdir(exist_ok=True)
        link = package / "trimaran"
        if not link.is_symlink():
            link.symlink_to(ROOT, target_is_directory=True)
        own = [str(path) for path in (package, self.folder, *self.paths)]
        return os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])

    @property
    def environment(self) -> dict[str, str]:
        quiet = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
        return {**os.environ, **quiet, "PYTHONPATH": self.python_path}

    def declare(self, name: str, entry_points: EntryPoints) -> None:
        """What an installer leaves of a package: its metadata."""
        metadata = self.folder / f"{name.replace('-', '_')}-0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        sections = [
            "\n".join([f"[{group}]", *(f"{entry} = {value}" for entry, value in entries.items())])
            for group, entries in entry_points.items()
        ]
        (metadata / "entry_points.txt").write_text("\n\n".join(sections) + "\n")

    def run_suite(self, platform: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command of the documentation, as a user types it."""
        return self.run_pytest("--pyargs", SUITE, "--platform", platform, *arguments)

    def run_pytest(
        self, *arguments: str, folder: Path | None = None, limit_s: float = 500
    ) -> subprocess.CompletedProcess[str]:
        """In a folder that is nobody's project, without the plug-ins that this project's own tests use."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "pytest", *_WITHOUT, *arguments],
            cwd=folder or self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )


def make_site(folder: Path, *, with_example: bool = False) -> Site:
    """With Trimaran's own entry points, and the example platform's when asked for."""
    site = Site(folder, (EXAMPLE,) if with_example else ())
    folder.mkdir(parents=True, exist_ok=True)
    site.declare("trimaran-here", {"pytest11": entry_points_of(ROOT)["pytest11"]})
    if with_example:
        site.declare("trimaran-example", entry_points_of(EXAMPLE))
    return site
