"""How a start looks: phases with their times, as bars on a terminal and as plain lines elsewhere.

Owns what is printed. Lines go to stderr, so that stdout stays with whoever uses the engine as a library.
"""

import sys
import time
from typing import Any, Protocol

from ...ipc.facts import Phase
from .outlet import Outlet

QUIET_LIMIT_S = 10.0  # a start that says nothing for so long looks dead


class Progress(Protocol):
    """Told of phases and lines from the event loop. `tick` comes about once a second until `finish`, `flush` for ever;
    `close` is the end.
    """

    def phase(self, phase: Phase, elapsed_s: float) -> None: ...
    def line(self, text: str) -> None: ...
    def tick(self, elapsed_s: float) -> None: ...
    def finish(self) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def create_progress(*, quiet: bool = False) -> Progress:
    """What fits where stderr goes."""
    if quiet:
        return SilentProgress()
    return TerminalProgress() if sys.stderr.isatty() else PlainProgress()


def described(phase: Phase) -> str:
    detail = f" ({phase.detail})" if phase.detail else ""
    return f"{phase.process}: {phase.name}{detail}"


class SilentProgress:
    """Says nothing but what must be heard."""

    def phase(self, phase: Phase, elapsed_s: float) -> None:
        pass

    def line(self, text: str) -> None:
        pass

    def tick(self, elapsed_s: float) -> None:
        pass

    def finish(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class PlainProgress:
    """A line for each phase that ends or takes longer than a second, and one at least every ten seconds."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], Phase] = {}
        self._announced: set[tuple[str, str]] = set()
        self._said_s = time.monotonic()
        self._outlet = Outlet()

    def phase(self, phase: Phase, elapsed_s: float) -> None:
        key = (phase.process, phase.name)
        if phase.took_s is None:
            self._running[key] = phase
            return
        self._running.pop(key, None)
        self._announced.discard(key)
        self._say(elapsed_s, f"{described(phase)}: {phase.took_s:.2f} s")

    def line(self, text: str) -> None:
        self._said_s = time.monotonic()
        self._outlet.line(text)

    def tick(self, elapsed_s: float) -> None:
        for key, phase in self._running.items():
            if key not in self._announced:
                self._announced.add(key)
                self._say(elapsed_s, f"{described(phase)} ...")
        if time.monotonic() - self._said_s >= QUIET_LIMIT_S - 1.0:
            running = [described(phase) + _percent(phase) for phase in self._running.values()]
            self._say(elapsed_s, f"still: {', '.join(running) or 'starting'}")

    def finish(self) -> None:
        self._running.clear()
        self._announced.clear()

    def flush(self) -> None:
        self._outlet.flush()

    def close(self) -> None:
        self._outlet.close()

    def _say(self, elapsed_s: float, text: str) -> None:
        self.line(f"[{elapsed_s:6.1f} s] {text}")


class TerminalProgress:
    """Bars and spinners while phases run; a line with its time for each that ended."""

    def __init__(self) -> None:
        self._bars: Any = None
        self._tasks: dict[tuple[str, str], Any] = {}

    def _open(self) -> Any:
        if self._bars is None:
            from rich.console import Console  # 70 ms, which a start that is quick anyway need not wait for
            from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars

            columns = [
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TimeElapsedColumn(),
            ]
            self._bars = Bars(*columns, console=Console(stderr=True), transient=True)
            self._bars.start()
        return self._bars

    def phase(self, phase: Phase, elapsed_s: float) -> None:
        bars, key = self._open(), (phase.process, phase.name)
        if phase.took_s is not None:
            if key in self._tasks:
                bars.remove_task(self._tasks.pop(key))
            self.line(f"[{elapsed_s:6.1f} s] {described(phase)}: {phase.took_s:.2f} s")
            return
        if key not in self._tasks:
            self._tasks[key] = bars.add_task(described(phase), total=None)
        total = 1.0 if phase.fraction is not None else None
        bars.update(self._tasks[key], description=described(phase), completed=phase.fraction or 0.0, total=total)

    def line(self, text: str) -> None:
        if self._bars is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def tick(self, elapsed_s: float) -> None:
        pass

    def finish(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._tasks.clear()

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def _percent(phase: Phase) -> str:
    return f" {phase.fraction:.0%}" if phase.fraction is not None else ""
