"""Children of a measurement: started as process groups, ended as such, their lines kept in a log."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_TAIL_BYTES = 1500
_KILLED_WAIT_S = 5.0


class PartFailed(Exception):
    """A part of a group did not come to its end; the text says how, with the end of the log."""


def tail(log: Path) -> str:
    """The last lines."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def output_of(command: Sequence[str], limit_s: float) -> tuple[str, str]:
    """What a child prints on its two streams, however it ends. Raises PartFailed when it takes too long."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            return process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise PartFailed(f"the load was not done after {limit_s:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class Child:
    """One process and all it starts. `began_s` is of the monotonic clock."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path | None) -> None:
        self.log = log
        with log.open("ab") as lines:
            self.began_s = time.monotonic()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=lines,
                env=dict(environment),
                cwd=folder,
                start_new_session=True,
            )

    def check_lives(self) -> None:
        code = self.process.poll()
        if code is not None:
            raise PartFailed(f"the process ended with {code}\n{tail(self.log)}")

    def wait(self, limit_s: float) -> None:
        """Until it ends well. Raises PartFailed."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise PartFailed(f"not done after {limit_s:.0f} s\n{tail(self.log)}") from None
        if code:
            raise PartFailed(f"the process ended with {code}\n{tail(self.log)}")

    def end(self, patience_s: float = 20.0) -> None:
        """Ask the first process, then the group; kill what is left of it."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
        self._signal_group(signal.SIGKILL)
        self.process.wait()
        deadline_s = time.monotonic() + _KILLED_WAIT_S
        while self._signal_group(0) and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def _signal_group(self, number: int) -> bool:
        """Whether somebody was there."""
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True
