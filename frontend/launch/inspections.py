"""A worker process that looks at this machine for a command, and what it says."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ...ipc.actor import Actor
from ...ipc.conditions import Refusal, TrimaranError
from ...ipc.configuration import InspectionConfiguration, Task
from ...ipc.control import Begin, FromChild, PhaseReport, Refused
from ...ipc.facts import Phase
from ...ipc.inspection import Inspected
from .children import LOOK_LIMIT_S, Child, child_environment, module_command
from .configurations import Birth, worker_configuration
from .device_visibility import worker_visibility
from .options import OptionError, Options, Source, inherited_environment, read_options

_ONLY_LOOK = (Task.PROBE, Task.KERNELS_LIST, Task.KERNELS_MATRIX)


class InspectionFailed(TrimaranError):
    """The process that looked at the machine ended without finishing; the text is its cause."""


def split_json(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether --json stands anywhere, and the other words."""
    return "--json" in arguments, [word for word in arguments if word != "--json"]


def inspection_options(words: Sequence[str], hint: str = "leave it out") -> Options:
    """Options of a command that looks at the machine and has no use for a model. Raises OptionError."""
    reading = read_options(words, inherited_environment())
    if reading.sources["model"] is Source.FLAG:
        raise OptionError(f"{reading.options.model}: this command takes no model; {hint}.")
    return reading.options


class Inspection(Actor):
    """One run. `tell` hears each message, `on_phase` its progress; both on the loop of `run`."""

    def __init__(
        self,
        options: Options,
        task: Task,
        tell: Callable[[FromChild], None],
        *,
        tests: tuple[str, ...] = (),
        on_phase: Callable[[Phase], None] = lambda phase: None,
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__()
        self._options = options
        self._task = task
        self._tell = tell
        self._tests = tests
        self._on_phase = on_phase
        self._on_line = on_line
        self._failure: TrimaranError | None = None
        self._is_done = False
        self._ended = asyncio.Event()
        self._silence_limit_s = min(LOOK_LIMIT_S, options.start_timeout)
        if task is Task.KERNELS_CHECK:  # tells of its first kernel once that is compiled
            self._silence_limit_s = options.start_timeout
        self._deadline: asyncio.TimerHandle | None = None
        self._last_phase = ""

    async def run(self) -> None:
        """Returns when all is told. Raises Refusal or InspectionFailed."""
        await super().run()
        if self._failure is not None:
            raise self._failure

    async def open(self) -> None:
        options = self._options
        self._death_pipe = os.pipe()
        num_threads = len(os.sched_getaffinity(0)) if options.worker_threads == "auto" else options.worker_threads
        birth = Birth(
            run_directory=options.run_parent(),
            core_frontends="",
            core_workers="",
            num_frontends=0,
            served_model_name="",
            port=0,
        )
        inherited = inherited_environment()
        visibility = worker_visibility(options, 0, inherited)
        worker = worker_configuration(
            options,
            birth,
            model=Path(),
            rank=0,
            generation=1,
            num_threads=num_threads,
            visibility=visibility.holding,
        )
        environment = child_environment(
            inherited, num_threads=num_threads, cache=options.cache_folder(), devices=visibility.written
        )
        self._child = Child(
            "inspection",
            module_command("device_workers.process"),
            environment=environment,
            death_pipe=self._death_pipe[0],
            listener=self,
        )
        self._child.send(Begin(InspectionConfiguration(task=self._task, worker=worker, tests=self._tests)))
        self._wait_for_more()

    def _wait_for_more(self) -> None:
        """A driver may hang in its first call: silence has an end."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = asyncio.get_running_loop().call_later(self._silence_limit_s, self._give_up)

    def _give_up(self) -> None:
        during = f" during {self._last_phase}" if self._last_phase else ""
        self._failure = self._failure or InspectionFailed(
            f"the process that looks at the machine said nothing for {self._silence_limit_s:g} s{during} and was "
            "ended; a driver that hangs does that: restart it, or name another platform by --platform"
        )
        self.stop()

    async def close(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._child.kill()
        await self._ended.wait()
        for descriptor in self._death_pipe:
            os.close(descriptor)

    def heard(self, child: Child, message: FromChild) -> None:
        if self._task not in _ONLY_LOOK:  # what comes now compiles and measures, which takes its time
            self._silence_limit_s = self._options.start_timeout
        self._wait_for_more()
        match message:
            case PhaseReport():
                self._last_phase = message.phase.name
                self._on_phase(message.phase)
            case Refused():
                self._failure = Refusal(message.text)
                self.stop()
            case Inspected():
                self._is_done = True
                self._tell(message)
                self.stop()
            case _:
                self._tell(message)

    def printed(self, child: Child, line: str) -> None:
        self._on_line(line)

    def ended(self, child: Child) -> None:
        if not self._is_done and self._failure is None:
            self._failure = InspectionFailed(
                f"the process that looks at the machine broke off ({child.cause()}); "
                "a broken driver or library does that: name another platform by --platform"
            )
        self._ended.set()
        self.stop()
