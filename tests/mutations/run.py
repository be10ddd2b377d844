#!/usr/bin/env python3
"""Breaks the product on purpose, one break at a time, and demands that a test turns red for each.

    python tests/mutations/run.py            all of them
    python tests/mutations/run.py NAME ...   some
    python tests/mutations/run.py --shard 1/2   every second one, for two runs side by side

Each break is a text replacement in a copy of the tree, in `breaks.py`. A break whose text is no longer found is an
error: it must follow the code.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from breaks import BREAKS
from broken import Break

ROOT = Path(__file__).resolve().parents[2]


def copy_tree(to: Path) -> Path:
    """The tracked files, as a package that can be imported as `trimaran`."""
    tree = to / "trimaran"
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in names.stdout.splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def run_tests(tree: Path, tests: tuple[str, ...]) -> tuple[bool, str]:
    """Whether the tests passed, and the end of what they printed."""
    environment = {**os.environ, "PYTHONPATH": str(tree.parent), "OMP_WAIT_POLICY": "PASSIVE", "NO_SHRINK": "1"}
    command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest could not run {tests}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0, done.stdout[-1500:]


def apply(tree: Path, broken: Break) -> str:
    file = tree / broken.file
    text = file.read_text()
    if text.count(broken.old) != 1:
        raise SystemExit(f"{broken.name}: its text stands {text.count(broken.old)} times in {broken.file}, not once")
    file.write_text(text.replace(broken.old, broken.new))
    return text


def chosen_breaks(arguments: list[str]) -> list[Break]:
    """Those named; all without names. `--shard K/N` keeps every N-th of them, from the K-th."""
    part, parts = 1, 1
    if arguments[:1] == ["--shard"]:
        part, parts = map(int, arguments[1].split("/"))
        arguments = arguments[2:]
    unknown = set(arguments) - {broken.name for broken in BREAKS}
    if unknown:
        raise SystemExit(f"no such break: {sorted(unknown)}; there are {[broken.name for broken in BREAKS]}")
    return [broken for broken in BREAKS if not arguments or broken.name in arguments][part - 1 :: parts]


def main() -> int:
    chosen = chosen_breaks(sys.argv[1:])
    survived = []
    with tempfile.TemporaryDirectory(prefix="trimaran-mutations-") as folder:
        tree = copy_tree(Path(folder))
        for broken in chosen:
            began = time.monotonic()
            original = apply(tree, broken)
            passed, _ = run_tests(tree, broken.tests)
            (tree / broken.file).write_text(original)
            print(
                f"{'SURVIVED' if passed else 'caught':<9}{broken.name} ({time.monotonic() - began:.1f} s)", flush=True
            )
            if passed:
                survived.append(broken.name)
    print(f"{len(chosen) - len(survived)} passed, {len(survived)} failed")
    return 1 if survived else 0


if __name__ == "__main__":
    raise SystemExit(main())
