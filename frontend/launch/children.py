"""Child processes of the supervisor: how they are started, heard and ended.

The one place that writes a child's environment. Owns one process with its control link and its output; does not know
what the process is for.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ...ipc.control import FromChild, ToChild
from ...ipc.process import ControlLink, child_arguments, create_control_link

PREFIX = "TRIMARAN_"
LOOK_LIMIT_S = 60.0
"""A child's look at the devices takes a second or two, and it waits for a busy one for a third of this."""
_NUM_LAST_LINES = 20
_MAX_LINE_BYTES = 64 * 1024
_LINK_END_WAIT_S = 0.5  # for messages that a dead child had still sent


def child_environment(
    inherited: Mapping[str, str],
    *,
    num_threads: int,
    cache: Path,
    offline: bool = True,
    devices: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of a child with `num_threads` threads for computing. Options travel on the control link.

    `devices` holds visibility variables for a worker. Only the process that fetches from a hub is not `offline`, and
    there the user's own wish stays.
    """
    environment = {name: value for name, value in inherited.items() if not name.startswith(PREFIX)}
    environment.update(
        # Threads that wait by spinning take the cores from all other processes of the machine.
        OMP_WAIT_POLICY="PASSIVE",
        GOMP_SPINCOUNT="0",
        OMP_NUM_THREADS=str(num_threads),
        OPENBLAS_NUM_THREADS=str(num_threads),
        MKL_NUM_THREADS=str(num_threads),
        TOKENIZERS_PARALLELISM="true",
        TRITON_CACHE_DIR=str(cache / "triton"),
        TORCHINDUCTOR_CACHE_DIR=str(cache / "inductor"),
        PYTHONUNBUFFERED="1",
    )
    environment.update(devices or {})
    if offline:
        environment.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    return environment


class Listener(Protocol):
    """Who hears a child. All are called on the event loop; `ended` last, once."""

    def heard(self, child: "Child", message: FromChild) -> None: ...
    def printed(self, child: "Child", line: str) -> None: ...
    def ended(self, child: "Child") -> None: ...


class Child:
    """One running process. Its exit is noticed by a pidfd, its last messages and lines are heard before `ended`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        death_pipe: int,
        listener: Listener,
    ) -> None:
        """Spawn, from the thread whose end shall be the child's: PR_SET_PDEATHSIG is bound to it."""
        self.name = name
        self.fault: str | None = None
        self.last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self.exit_code: int | None = None
        self.num_silent_ticks: int | None = None  # the supervisor's count since the last Pulse; None before the first
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self.link: ControlLink[FromChild]
        self.link, theirs = create_control_link()
        output, their_output = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, *child_arguments(theirs.fileno(), death_pipe)],
                stdin=subprocess.DEVNULL,
                stdout=their_output,
                stderr=their_output,
                env=dict(environment),
                pass_fds=(theirs.fileno(), death_pipe),
            )
        finally:
            theirs.close()
            os.close(their_output)
        self.pid = self._process.pid
        self._lines = Lines(output, self._printed)
        self._link_ended = False
        self.link.open(lambda message, _: listener.heard(self, message), self._link_end)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._exited)

    def send(self, message: ToChild, descriptors: Sequence[int] = ()) -> None:
        """Send on the control link; a child that is dying does not hear it."""
        self.link.send(message, descriptors)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal the process, if it has not ended."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    @property
    def has_ended(self) -> bool:
        return self.exit_code is not None

    def cause(self) -> str:
        """Why it ended, in words: what it said itself, else its exit and its last line."""
        how = _exit_in_words(self.exit_code)
        if self.fault is not None:
            return f"{self.name} {how}: {self.fault}"
        last = next((line for line in reversed(self.last_lines) if line.strip()), "")
        return f"{self.name} {how}" + (f": {last.strip()}" if last else "")

    def _printed(self, line: str) -> None:
        self.last_lines.append(line)
        self._listener.printed(self, line)

    def _link_end(self) -> None:
        self._link_ended = True
        self.link.close()
        if self.exit_code is not None:
            self._end()

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.exit_code = self._process.wait()
        os.close(self._pidfd)
        if self._link_ended:
            self._end()
        else:  # messages may still lie in the link
            self._timer = self._loop.call_later(_LINK_END_WAIT_S, self._link_end)

    def _end(self) -> None:
        if self._lines.is_closed:
            return
        self._lines.close()
        self._listener.ended(self)


class Lines:
    """Lines that arrive on a pipe; the rest is given at `close`."""

    def __init__(self, descriptor: int, told: Callable[[str], None]) -> None:
        self._descriptor = descriptor
        self._told = told
        self._rest = b""
        self.is_closed = False
        os.set_blocking(descriptor, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._readable)

    def close(self) -> None:
        """Tell what is left, and close the pipe."""
        if self.is_closed:
            return
        self._readable()
        self._finish()

    def _finish(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        if self._rest:
            self._told(self._rest.decode(errors="replace"))

    def _readable(self) -> None:
        try:
            while data := os.read(self._descriptor, 65536):
                *lines, self._rest = (self._rest + data).split(b"\n")
                if len(self._rest) > _MAX_LINE_BYTES:
                    lines, self._rest = [*lines, self._rest], b""
                for line in lines:
                    self._told(line.decode(errors="replace"))
        except BlockingIOError:
            return
        self._loop.remove_reader(self._descriptor)  # the other end is closed; `close` gives the descriptor back


async def run_tool(
    command: Sequence[str], *, environment: Mapping[str, str], death_pipe: int, told: Callable[[str], None]
) -> int:
    """Run a process that speaks in lines until it ends; ended with this task, and with this process.

    Its command gets `--death-pipe` and `--parent` as every child's does.
    """
    loop = asyncio.get_running_loop()
    process, output = _start_tool(command, environment, death_pipe)
    lines = Lines(output, told)
    ended = asyncio.Event()
    pidfd = os.pidfd_open(process.pid)
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        process.kill()
        code = process.wait()
        lines.close()
    return code


def _start_tool(
    command: Sequence[str], environment: Mapping[str, str], death_pipe: int
) -> tuple[subprocess.Popen[bytes], int]:
    output, their_output = os.pipe()
    try:
        process = subprocess.Popen(
            [*command, "--death-pipe", str(death_pipe), "--parent", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=their_output,
            stderr=their_output,
            env=dict(environment),
            pass_fds=(death_pipe,),
        )
    finally:
        os.close(their_output)
    return process, output


def module_command(module: str) -> list[str]:
    """Runs a module of ours. -P keeps the working directory, whose folders may bear any name, off the path."""
    return [sys.executable, "-P", "-m", f"trimaran.{module}"]


def _exit_in_words(code: int | None) -> str:
    if code is None:
        return "runs"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
