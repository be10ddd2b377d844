#!/usr/bin/env python3
"""Runs pytest twice, side by side: tests that start processes, and with low priority all others, which compute.

The first mostly wait and watch the clock on one core, the second take whatever time is left over; together they need
little more than half of what they need one after the other on two cores. Arguments are pytest's, for both. Prints what
the first say as it comes, then what the others said, then one line with the sums.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
PROCESSES = ("api", "faults", "process")
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|deselected|xfailed|xpassed|error|errors|warning|warnings)\b")
_NOTHING_TO_RUN = 5  # pytest's exit code when no test is left of those selected


def main(arguments: list[str]) -> int:
    began = time.monotonic()
    folders = sorted(path.name for path in TESTS.iterdir() if any(path.glob("test_*.py")))
    others = [name for name in folders if name not in PROCESSES]
    with tempfile.TemporaryFile() as aside:
        computing = _started(others, arguments, stdout=aside, stderr=subprocess.STDOUT)
        try:
            os.setpriority(os.PRIO_PROCESS, computing.pid, 19)
            watching = _started(PROCESSES, arguments, stdout=subprocess.PIPE)
            last = _shown(watching)
            codes = [watching.wait(), computing.wait()]
        finally:
            computing.kill()  # of no effect once it has ended
            computing.wait()
        aside.seek(0)
        said = aside.read().decode(errors="replace")
    print(said, end="", flush=True)
    counts: Counter[str] = Counter()
    for line in (last, (said.splitlines() or [""])[-1]):
        counts.update({what: int(number) for number, what in _COUNT.findall(line)})
    summary = ", ".join(f"{number} {what}" for what, number in counts.items())
    print(f"=== {summary or 'nothing was run'} in {time.monotonic() - began:.2f}s ===")
    wrong = [code for code in codes if code not in (0, _NOTHING_TO_RUN)]
    return wrong[0] if wrong else min(codes)


def _started(folders: list[str] | tuple[str, ...], arguments: list[str], **streams: object) -> subprocess.Popen[bytes]:
    places = [str(TESTS / name) for name in folders]
    return subprocess.Popen([sys.executable, "-m", "pytest", *places, *arguments], **streams)  # type: ignore[call-overload, no-any-return]


def _shown(run: subprocess.Popen[bytes]) -> str:
    """Print what it says, in pieces as they come. Returns the last line."""
    assert run.stdout is not None
    last = b""
    while piece := os.read(run.stdout.fileno(), 1 << 16):
        sys.stdout.buffer.write(piece)
        sys.stdout.flush()
        last = (last + piece)[-(1 << 12) :]
    run.stdout.close()
    return (last.decode(errors="replace").splitlines() or [""])[-1]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
