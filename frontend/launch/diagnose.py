"""`trimaran diagnose`: measures a device and writes a file that `--device-config` takes."""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ...ipc.conditions import Refusal
from ...ipc.configuration import Task
from ...ipc.control import FromChild
from ...ipc.facts import Phase
from ...ipc.inspection import Inspected, Measured, TestSkipped
from .ending import guarded, say
from .inspections import Inspection, inspection_options
from .options import OptionError, Options
from .tables import Table, print_tables

HELP = """usage: trimaran diagnose [--test NAME ...] [--output FILE] [OPTIONS OF serve, without a model]

Measures the device: memory bandwidth, matrix rate per dtype, launch latency, graph capture and replay, whether stream
priorities act, copies between host and device, concurrent thread blocks, the best launch choices of each kernel.
Writes FILE (default: ARCHITECTURE.measured.yaml here), which --device-config takes.
Tests: memory, bandwidth, matrix, launch, graph, priorities, copies, blocks, kernels. --device N picks the device.
"""


def diagnose(arguments: Sequence[str]) -> int:
    """0 when a file was written, 2 for a refusal."""
    if "--help" in arguments or "-h" in arguments:
        print(HELP)
        return 0

    def body() -> int:
        tests, output, rest = _own(arguments)
        options = inspection_options(rest)
        _check_output(output)
        told, text = asyncio.run(_measure(options, tests))
        path = output or Path(f"{_architecture(text)}.measured.yaml")
        _write(path, text)
        print_tables([table(told)])
        print(f"Written to {path}. Serve with it: trimaran serve MODEL --device-config {path}")
        return 0

    return guarded("diagnose", body)


def _own(arguments: Sequence[str]) -> tuple[tuple[str, ...], Path | None, list[str]]:
    """Our own flags, taken out of the others."""
    tests: list[str] = []
    output: Path | None = None
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in ("--test", "--output"):
            rest.append(word)
            continue
        given = value if equals else next(words, None)
        if not given or (not equals and given.startswith("--")):
            raise OptionError(f"{name} needs a value: {'a test' if name == '--test' else 'a file'}.")
        if name == "--test":
            tests += given.split(",")
        else:
            output = Path(given)
    return tuple(tests), output, rest


def _check_output(output: Path | None) -> None:
    """Minutes of measuring must not end at a folder that is not there."""
    if output is not None and output.is_dir():
        raise Refusal(f"{output} is a folder: name a file by --output")
    folder = (output or Path("x")).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise Refusal(f"{folder} is no folder that can be written: name another file by --output")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Refusal(f"{path} cannot be written ({error.strerror}): name another file by --output") from None


def _architecture(text: str) -> str:
    line = next(line for line in text.splitlines() if line.startswith("architecture:"))
    return line.split(":", 1)[1].strip().strip("'\"")


async def _measure(options: Options, tests: tuple[str, ...]) -> tuple[list[FromChild], str]:
    told: list[FromChild] = []
    bar = _bar()
    try:
        await Inspection(options, Task.DIAGNOSE, told.append, tests=tests, on_phase=bar.phase, on_line=bar.line).run()
    finally:
        bar.close()
    ended = next(message for message in told if isinstance(message, Inspected))
    return told, ended.text


class _PlainBar:
    """One line per test."""

    def phase(self, phase: Phase) -> None:
        say(f"{int((phase.fraction or 0) * 100):3d} %  {phase.name}")

    def line(self, text: str) -> None:
        say(text)

    def close(self) -> None:
        return None


class _RichBar:
    """A bar on a terminal."""

    def __init__(self) -> None:
        import rich.console
        import rich.progress

        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TimeElapsedColumn(),
            console=rich.console.Console(stderr=True),
        )
        self._task = self._progress.add_task("starting", total=1.0)
        self._progress.start()

    def phase(self, phase: Phase) -> None:
        self._progress.update(self._task, description=phase.name, completed=phase.fraction or 0.0)

    def line(self, text: str) -> None:
        self._progress.console.print(text, markup=False)

    def close(self) -> None:
        self._progress.stop()


def _bar() -> _PlainBar | _RichBar:
    return _RichBar() if sys.stderr is not None and sys.stderr.isatty() else _PlainBar()


def table(told: Sequence[FromChild]) -> Table:
    """What was measured beside what was known, and what was not measured and why."""
    made = Table("Measured", ("test", "value", "measured", "known before"))
    for message in told:
        match message:
            case Measured():
                before = "" if message.before is None else f"{message.before} ({message.provenance or 'unknown'})"
                made.row(message.test, message.field, f"{message.value} {message.unit}".strip(), before)
            case TestSkipped():
                made.row(message.test, "", "not measured", message.reason)
            case _:
                pass
    return made
