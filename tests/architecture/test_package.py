"""The package holds every sub-package of the tree: in pyproject.toml and in a wheel that is really built."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("frontend", "engine_core", "device_workers", "kernels", "ipc")
DATA_SUFFIXES = {".cpp", ".h", ".yaml", ".jinja", ".typed"}


def packages_in_tree() -> set[str]:
    folders = {
        file.parent for name in PRODUCT for file in (ROOT / name).rglob("*.py") if file.parent.name != "__pycache__"
    }
    return {"trimaran"} | {".".join(("trimaran", *folder.relative_to(ROOT).parts)) for folder in folders}


def files_in_tree() -> set[str]:
    wanted = {
        file.relative_to(ROOT).as_posix()
        for name in PRODUCT
        for file in (ROOT / name).rglob("*")
        if file.suffix in DATA_SUFFIXES | {".py"}
    }
    return {f"trimaran/{name}" for name in wanted} | {"trimaran/__init__.py", "trimaran/py.typed"}


def test_every_sub_package_is_listed_and_has_an_init_file() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(packages_in_tree())
    for package in listed:
        folder = ROOT.joinpath(*package.split(".")[1:])
        assert (folder / "__init__.py").is_file(), f"{folder} has no __init__.py"


def test_kernels_init_holds_a_docstring_and_nothing_else() -> None:
    import ast

    body = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)


def test_the_wheel_holds_every_module_and_data_file(tmp_path: Path) -> None:
    tree = tmp_path / "tree"  # the build leaves a `build` folder behind: in a copy, not in the clone
    tree.mkdir()
    for name in [*PRODUCT, "pyproject.toml", "README.md", "LICENSE", "__init__.py", "py.typed"]:
        (tree / name).symlink_to(ROOT / name)
    command = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", command, str(tmp_path)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("trimaran-*.whl"))) as wheel:
        names = wheel.namelist()
        entry_points = wheel.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert {name for name in names if ".dist-info/" not in name} == files_in_tree()
    assert "trimaran = trimaran.frontend.launch.commands:main" in entry_points
