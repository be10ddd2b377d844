"""The supervisor: starts frontends, core and workers, restarts what dies, and ends them all in order.

It is an asyncio object without signal handlers of its own: `trimaran serve` installs those, and the offline API runs it
with no frontends in a thread that outlives the engine. Whatever kills this process kills its children.

The unit of restart is the worker group, because one dead rank wedges the others' collectives. Each (re)start of core or
workers begins a generation with rings of its own; what outlives the other part is given the new rings and goes on.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from msgspec import Struct

from ...ipc.actor import Actor
from ...ipc.conditions import Refusal, TrimaranError
from ...ipc.configuration import HANG_FACTOR, Configuration
from ...ipc.control import (
    Attach,
    Begin,
    CoreLost,
    CoreStarted,
    Drain,
    DrainAsked,
    Drained,
    Explained,
    Fault,
    FromChild,
    FrontendLost,
    GroupFault,
    Listening,
    LogLevelAsked,
    ModelKnown,
    PhaseNotice,
    PhaseReport,
    Pulse,
    Ready,
    Refused,
    Stop,
    ToChild,
    WorkersLost,
)
from ...ipc.facts import Phase
from ...ipc.server_info import ServerInfo
from .children import LOOK_LIMIT_S, Child, child_environment, module_command
from .configurations import Birth, core_configuration, frontend_configuration, worker_configuration
from .device_visibility import worker_visibility
from .keys import Keys, check_certificate, open_door, read_keys
from .model_fetch import Fetching, Model, bring
from .model_source import HubModel, find_model
from .options import AUTO, Options, inherited_environment
from .port import HeldPort
from .progress import Progress
from .restarts import Restarts
from .rings import Rings
from .run_directory import RunDirectory

_STOP_GRACE_S = 5.0
_ABORT_GRACE_S = 2.0
_TICK_S = 1.0
_LEVELS = {"DEBUG": 0, "INFO": 1, "WARNING": 2, "ERROR": 3, "CRITICAL": 4}


class GaveUp(TrimaranError):
    """The engine could not be brought, or kept, up. The text is the cause."""


class Aborted(TrimaranError):
    """A second signal cut the drain short."""


class Launch(Struct, frozen=True):
    """The commands of the three kinds of children."""

    frontend: list[str]
    core: list[str]
    worker: list[str]


def real_processes() -> Launch:
    return Launch(
        frontend=module_command("frontend.http.process"),
        core=module_command("engine_core.process"),
        worker=module_command("device_workers.process"),
    )


class FrontendPlace:
    """One of the frontends, whichever process holds the place at the time."""

    def __init__(self, index: int, restarts: Restarts) -> None:
        self.index = index
        self.restarts = restarts
        self.incarnation = 0
        self.child: Child | None = None
        self.port: int | None = None
        self.is_drained = False


class Supervisor(Actor):
    """One engine and its frontends. `run` lives until `terminate` has drained it, or raises why it ended.

    `watch` hears what a frontend would (ModelKnown, CoreStarted, CoreLost, PhaseNotice): the offline API's ear.
    With `on_explained` nothing is served: the boot goes as far as it can without a device and weights, what was
    settled is told, and `run` returns.
    """

    def __init__(
        self,
        options: Options,
        progress: Progress,
        *,
        num_frontends: int | None = None,
        launch: Launch | None = None,
        watch: Callable[[ToChild], None] | None = None,
        on_explained: Callable[[ServerInfo], None] | None = None,
    ) -> None:
        super().__init__()
        self.options = options
        self.model: Model | None = None
        self.generation = 0
        self._log_level: str = options.log_level
        self._decided: frozenset[str] = frozenset()
        self.core_incarnation = 0
        self._progress = progress
        self._num_frontends = options.frontends if num_frontends is None else num_frontends
        self._launch = launch or real_processes()
        self._watch = watch
        self._on_explained = on_explained
        self._inherited = inherited_environment()
        self._began_s = time.monotonic()
        self._unready_since_s: float | None = self._began_s
        self._phase = Phase(name="starting", process="supervisor", began_s=self._began_s)
        self._run_directory: RunDirectory | None = None
        self._port: HeldPort | None = None
        self._death_pipe: tuple[int, int] | None = None
        self._frontends: list[FrontendPlace] = []
        self._core: Child | None = None
        self._workers: dict[int, Child] = {}
        self._processes: set[Child] = set()
        max_restarts = options.max_restarts if on_explained is None else 0  # nobody waits for an engine
        self._core_restarts = Restarts(max_restarts)
        self._worker_restarts = Restarts(max_restarts)
        self._pause_s = 0.0
        self._group_fault = ""
        self._own_phases: list[Phase] = []
        self._has_listened = False
        self._changed = asyncio.Event()
        self._engine_down = asyncio.Event()
        self._settled = asyncio.Event()
        self._failure: Exception | None = None
        self._is_draining = False
        self._is_closing = False
        self._is_aborted = False

    # life

    async def run(self) -> None:
        """Start, live, end. Raises Refusal, GaveUp or Aborted; returns after an end that was asked for."""
        try:
            await super().run()
        except BaseExceptionGroup as group:
            self._failure = self._failure or _first(group)
        finally:
            self._settled.set()
        if self._failure is not None:
            raise self._failure

    async def wait_ready(self) -> None:
        """Return once the engine is ready for the first time. Raises what kept it from being so."""
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure
        if self._is_closing or self._is_draining:
            raise GaveUp("the engine was stopped before it was ready")

    def terminate(self) -> None:
        """Drain and end; a second call ends at once."""
        if self._is_draining:
            self._is_aborted = True
            self._failure = self._failure or Aborted("a second signal ended the server before its streams were done")
            self.stop()
        elif self._group is None:
            self.stop()
        else:
            self._is_draining = True
            self.start_task(self._drain(), "drain")

    @property
    def _needs_weights(self) -> bool:
        return self.options.load_format != "dummy" and self._on_explained is None

    def stop(self) -> None:
        self._settled.set()
        super().stop()

    @property
    def core_address(self) -> str:
        """Where the core takes frontends' connections."""
        assert self._run_directory is not None, "the supervisor is not running"
        return self._run_directory.address("core-frontends")

    @property
    def port(self) -> int | None:
        """The HTTP port that is held; None without frontends."""
        return self._port.port if self._port is not None else None

    async def open(self) -> None:
        """Take port and folder, start the frontends, begin with the rest."""
        asyncio.get_running_loop().set_exception_handler(self._callback_raised)
        options = self.options
        self._source = find_model(
            options.model,
            revision=options.revision,
            weights_needed=self._needs_weights,
            demo_embedding=options.demo_embedding,
        )
        keys = Keys()
        if self._num_frontends:
            keys = read_keys(options)
            check_certificate(options)
            self._port = HeldPort(options.host, options.port)
            if (told := open_door(options, keys)) is not None:
                self._progress.line(told)
        self._run_directory = RunDirectory(options.run_parent())
        self._death_pipe = os.pipe()
        self._birth = Birth(
            run_directory=self._run_directory.path,
            core_frontends=self._run_directory.address("core-frontends"),
            core_workers=self._run_directory.address("core-workers"),
            num_frontends=self._num_frontends,
            served_model_name=options.served_model_name or self._source.name,
            port=self.port or 0,
            keys=keys,
            explain=self._on_explained is not None,
        )
        for index in range(self._num_frontends):
            place = FrontendPlace(index, Restarts(options.max_restarts))
            self._frontends.append(place)
            self._start_frontend(place)
        self.start_task(self._keep_engine(), "keep engine")
        self.start_task(self._tick(), "tick")

    async def close(self) -> None:
        """End every child in order, then give port and folder back."""
        self._is_closing = True
        self._progress.finish()
        grace_s = _ABORT_GRACE_S if self._is_aborted else _STOP_GRACE_S
        if self._on_explained is not None:
            grace_s = 0.0  # nothing was begun that could be ended in order
        await self._end([place.child for place in self._frontends if place.child is not None], grace_s)
        await self._end([child for child in (self._core, *self._workers.values()) if child is not None], grace_s)
        await self._end(list(self._processes), 0.0)
        if self._death_pipe is not None:
            for descriptor in self._death_pipe:
                os.close(descriptor)
        if self._run_directory is not None:
            self._run_directory.remove()
        if self._port is not None:
            self._port.close()

    async def _end(self, children: list[Child], grace_s: float) -> None:
        """Ask to stop, wait, kill what is left, wait for its end."""
        for child in children:
            child.send(Stop())
        if not await self._wait_for(lambda: not self._processes & set(children), grace_s):
            for child in self._processes & set(children):
                if grace_s:
                    self._progress.line(f"{child.name} did not end within {grace_s:g} s and is killed.")
                child.kill()
            await self._wait_for(lambda: not self._processes & set(children), None)

    async def _wait_for(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until `condition` holds; it is looked at whenever a child says something or ends."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not condition():
            self._changed.clear()
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except TimeoutError:
                return condition()
        return True

    async def _drain(self) -> None:
        timeout_s = self.options.drain_timeout
        if self._frontends:
            self._progress.line(f"Draining: live requests have {timeout_s:g} s to end. A second signal ends at once.")
        self._tell_frontends(Drain(timeout_s))
        done = await self._wait_for(
            lambda: all(place.is_drained or place.child is None for place in self._frontends), timeout_s
        )
        if not done:
            self._progress.line(f"Drain limit of {timeout_s:g} s reached: streams that are still open are ended.")
        self.stop()

    def _callback_raised(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback of ours raised: what this object believes of its children can no longer be trusted."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        self._fail(GaveUp(f"The supervisor failed: {error!r}" if error else f"The supervisor: {context['message']}"))

    def _fail(self, failure: Exception) -> None:
        self._failure = self._failure or failure
        self.stop()

    # the engine

    async def _keep_engine(self) -> None:
        """Bring the model, then begin a generation, and another whenever a part of the engine has died."""
        assert self._run_directory is not None and self._death_pipe is not None
        own = Phase(
            name="starting", process="supervisor", began_s=self._began_s, took_s=time.monotonic() - self._began_s
        )
        self._own_phases.append(own)
        self.model = await self._timed("model", self._bring_model)
        self._tell_frontends(self._model_known())
        while True:
            self._begin_generation()
            await self._engine_down.wait()
            await asyncio.sleep(self._pause_s)
            await self._wait_for(lambda: self._processes <= self._current(), None)  # the dead let go of their devices
            self._engine_down.clear()
            self._pause_s = 0.0

    def _current(self) -> set[Child]:
        children = [self._core, *self._workers.values(), *(place.child for place in self._frontends)]
        return {child for child in children if child is not None}

    async def _bring_model(self) -> Model:
        assert self._run_directory is not None and self._death_pipe is not None
        cache = self.options.cache_folder()
        return await bring(
            self._source,
            Fetching(
                cache=cache,
                run_directory=self._run_directory.path,
                tokenizer=self.options.tokenizer,
                with_weights=self._needs_weights,
                environment=child_environment(
                    self._inherited, num_threads=1, cache=cache, offline=not isinstance(self._source, HubModel)
                ),
                death_pipe=self._death_pipe[0],
                progress=lambda fraction, what: self._model_progress(fraction, what),
                warning=lambda text: self._progress.line(f"warning: {text}"),
            ),
        )

    def _begin_generation(self) -> None:
        self.generation += 1
        rings = Rings(num_ranks=self.options.tensor_parallel, generation=self.generation)
        try:
            if self._core is None:
                self._start_core(rings)
            else:
                self._core.send(Attach(self.generation), rings.for_core())
            for rank in range(self.options.tensor_parallel):
                if rank in self._workers:
                    self._workers[rank].send(Attach(self.generation), rings.for_worker(rank))
                else:
                    self._start_worker(rank, rings)
        finally:
            rings.close()

    def _start_core(self, rings: Rings) -> None:
        self.core_incarnation += 1
        self._core_restarts.started()
        configuration = core_configuration(
            self.options,
            self._birth,
            incarnation=self.core_incarnation,
            generation=self.generation,
            phases=tuple(self._own_phases),
        )
        self._core = self._spawn("core", self._launch.core, configuration, 1, rings.for_core())
        self._tell_frontends(CoreStarted(self.core_incarnation))

    def _start_worker(self, rank: int, rings: Rings) -> None:
        assert self.model is not None
        self._worker_restarts.started()
        num_threads = self._num_worker_threads()
        visibility = worker_visibility(self.options, rank, self._inherited)
        configuration = worker_configuration(
            self.options,
            self._birth,
            model=self.model.folder,
            rank=rank,
            generation=self.generation,
            num_threads=num_threads,
            visibility=visibility.holding,
        )
        self._workers[rank] = self._spawn(
            f"worker {rank}",
            self._launch.worker,
            configuration,
            num_threads,
            rings.for_worker(rank),
            devices=visibility.written,
        )

    def _num_worker_threads(self) -> int:
        asked = self.options.worker_threads
        if asked != AUTO:
            return asked
        return max(1, len(os.sched_getaffinity(0)) // self.options.tensor_parallel)

    def _start_frontend(self, place: FrontendPlace) -> None:
        place.incarnation += 1
        place.restarts.started()
        configuration = frontend_configuration(
            self.options, self._birth, index=place.index, incarnation=place.incarnation
        )
        place.child = self._spawn(f"frontend {place.index}", self._launch.frontend, configuration, 1, [])
        if self.model is not None:
            place.child.send(self._model_known())
        if self._core is not None:
            place.child.send(CoreStarted(self.core_incarnation))
        place.child.send(self._phase_notice())
        if self._is_draining:
            place.child.send(Drain(self.options.drain_timeout))

    def _spawn(
        self,
        name: str,
        command: list[str],
        configuration: Configuration,
        num_threads: int,
        descriptors: list[int],
        devices: Mapping[str, str] | None = None,
    ) -> Child:
        assert self._death_pipe is not None
        environment = child_environment(
            self._inherited, num_threads=num_threads, cache=self.options.cache_folder(), devices=devices
        )
        child = Child(name, command, environment=environment, death_pipe=self._death_pipe[0], listener=self)
        self._processes.add(child)
        child.send(Begin(configuration), descriptors)
        return child

    # what children say

    def heard(self, child: Child, message: FromChild) -> None:
        """A child's message."""
        match message:
            case PhaseReport():
                self._on_phase(message.phase)
            case Listening():
                self._on_listening(child, message.port)
            case Ready():
                self._on_ready(child, message)
            case Explained():
                assert self._on_explained is not None
                self._on_explained(message.info)
                self.stop()
            case Drained():
                for place in self._frontends:
                    place.is_drained = place.is_drained or place.child is child
            case DrainAsked():
                self._progress.line(f"{child.name}: an admin asked for the end.")
                if not self._is_draining:  # a second wish is no second signal
                    self.terminate()
            case LogLevelAsked():
                self._log_level = message.level
            case Refused():
                self._fail(Refusal(message.text))
            case Fault():
                child.fault = message.text
            case GroupFault():
                self._on_group_fault(message)
            case Pulse():
                child.num_silent_ticks = 0
        self._changed.set()

    def printed(self, child: Child, line: str) -> None:
        """A child's line of output."""
        if _level(line) >= _LEVELS[self._log_level.upper()]:
            self._progress.line(f"{child.name} | {line}")

    def ended(self, child: Child) -> None:
        """A child's process is gone."""
        self._processes.discard(child)
        self._changed.set()
        if self._is_closing or self._failure is not None:
            return
        place = next((place for place in self._frontends if place.child is child), None)
        if place is not None:
            self._on_frontend_end(place, child)
        elif child is self._core:
            self._on_core_end(child)
        elif child in self._workers.values():
            self._on_worker_end(child)

    def _on_frontend_end(self, place: FrontendPlace, child: Child) -> None:
        place.child = None
        if self._core is not None:
            self._core.send(FrontendLost(place.index, place.incarnation))
        if not self._is_draining:
            pause_s = self._pause_before_restart(place.restarts, child.cause())
            if pause_s is not None:
                self.start_task(self._restart_frontend(place, pause_s), f"restart frontend {place.index}")

    async def _restart_frontend(self, place: FrontendPlace, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._start_frontend(place)

    def _on_core_end(self, child: Child) -> None:
        self._core = None
        self._tell_frontends(CoreLost(self.core_incarnation, child.cause()))
        self._on_engine_part_end(self._core_restarts, child.cause())

    def _on_worker_end(self, child: Child) -> None:
        cause = f"{child.name} {self._group_fault}" if self._group_fault else child.cause()
        self._group_fault = ""
        group, self._workers = self._workers, {}
        for other in group.values():
            other.kill()
        if self._core is not None:
            self._core.send(WorkersLost(self.generation, cause))
        self._on_engine_part_end(self._worker_restarts, cause)

    def _on_engine_part_end(self, restarts: Restarts, cause: str) -> None:
        self._unready_since_s = self._unready_since_s or time.monotonic()
        pause_s = self._pause_before_restart(restarts, cause)
        if pause_s is not None:
            self._pause_s = max(self._pause_s, pause_s)
            self._on_phase(Phase(name="restarting", process="supervisor", began_s=time.monotonic(), detail=cause))
            self._engine_down.set()

    def _pause_before_restart(self, restarts: Restarts, cause: str) -> float | None:
        pause_s = restarts.died()
        if pause_s is None and self._on_explained is not None:
            self._fail(GaveUp(f"{cause}; a broken driver or library does that: see `trimaran doctor`"))
        elif pause_s is None:
            self._fail(GaveUp(f"{cause}. It was restarted {restarts.limit} times in a row (--max-restarts)."))
        else:
            what = f"restart {restarts.num_deaths} of {restarts.limit} in {pause_s:g} s"
            self._progress.line(f"{cause}; {what}.")
        return pause_s

    def _on_group_fault(self, message: GroupFault) -> None:
        if message.generation == self.generation and self._workers and not self._group_fault:
            self._group_fault = f"was killed: {message.text}"
            for worker in self._workers.values():
                worker.kill()

    def _on_listening(self, child: Child, port: int) -> None:
        for place in self._frontends:
            if place.child is child:
                place.port = port
        if not self._has_listened and all(place.port is not None for place in self._frontends):
            self._has_listened = True
            elapsed_s = time.monotonic() - self._began_s
            host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
            scheme = "http" if self.options.tls_certificate is None else "https"
            self._progress.line(f"Listening on {scheme}://{host}:{port} after {elapsed_s:.2f} s.")

    def _on_ready(self, child: Child, message: Ready) -> None:
        if child is not self._core or message.generation != self.generation or self._unready_since_s is None:
            return
        now = time.monotonic()
        for line in message.lines:
            if line not in self._decided:  # a restart says what it decided otherwise
                self._progress.line(line)
        self._decided = frozenset(message.lines)
        self._progress.finish()
        again = "" if self.generation == 1 else " again"
        self._progress.line(f"Ready{again} after {now - self._unready_since_s:.2f} s: {self._birth.served_model_name}.")
        self._unready_since_s = None
        self._phase = Phase(name="ready", process="supervisor", began_s=now)
        self._settled.set()

    # phases

    def _on_phase(self, phase: Phase) -> None:
        self._phase = phase
        self._progress.phase(phase, time.monotonic() - self._began_s)
        self._tell_frontends(self._phase_notice())

    def _model_progress(self, fraction: float, what: str) -> None:
        began_s = self._phase.began_s if self._phase.name == "model" else time.monotonic()
        self._on_phase(Phase(name="model", process="supervisor", began_s=began_s, detail=what, fraction=fraction))

    async def _timed(self, name: str, work: Callable[[], Awaitable[Model]]) -> Model:
        began_s = time.monotonic()
        result = await work()
        took_s = time.monotonic() - began_s
        self._own_phases.append(
            Phase(name=name, process="supervisor", began_s=began_s, took_s=took_s, detail=result.root)
        )
        self._on_phase(self._own_phases[-1])
        return result

    async def _tick(self) -> None:
        """Once a second: hung children; while not ready the phase to frontends, a sign of life, the deadline."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._kill_silent()
            self._progress.flush()
            if self._unready_since_s is None:
                continue
            now = time.monotonic()
            self._progress.tick(now - self._began_s)
            self._tell_frontends(self._phase_notice())
            waited_s = now - self._unready_since_s
            if waited_s > self._start_limit_s:
                phase = self._phase
                limit = "--start-timeout" if self._on_explained is None else "a driver that hangs does that"
                self._fail(
                    GaveUp(
                        f"Not ready after {waited_s:.0f} s ({limit}). The last phase was {phase.process}: "
                        f"{phase.name}, for {now - phase.began_s:.0f} s. {_last_words(self._processes)}"
                    )
                )

    @property
    def _start_limit_s(self) -> float:
        """To explain, nothing is loaded or compiled once the model's folder is there: what hangs then is a driver."""
        limit_s = self.options.start_timeout
        if self._on_explained is None or self.model is None:
            return limit_s
        return min(limit_s, LOOK_LIMIT_S + sum(phase.took_s or 0.0 for phase in self._own_phases))

    def _kill_silent(self) -> None:
        """A core or frontend whose loop turns no more is as good as dead.

        Ticks are counted, not seconds, so that a machine that was suspended kills nobody when it wakes.
        """
        for child in (self._core, *(place.child for place in self._frontends)):
            if child is None or child.num_silent_ticks is None:
                continue
            child.num_silent_ticks += 1
            silent_s = child.num_silent_ticks * _TICK_S
            if silent_s > HANG_FACTOR * self.options.stall_limit + _TICK_S:
                child.fault = child.fault or f"it was silent for {silent_s:.0f} s and was taken for hung"
                child.kill()

    def _phase_notice(self) -> PhaseNotice:
        return PhaseNotice(self._phase, time.monotonic() - (self._unready_since_s or self._began_s))

    def _model_known(self) -> ModelKnown:
        assert self.model is not None
        return ModelKnown(str(self.model.text_folder), self.model.root)

    def _tell_frontends(self, message: ToChild) -> None:
        for place in self._frontends:
            if place.child is not None:
                place.child.send(message)
        if self._watch is not None:
            self._watch(message)


def _level(line: str) -> int:
    """The level of a log line, from the word that logging puts among the first; what has none is printed."""
    return next((_LEVELS[word] for word in line.split(maxsplit=3)[:3] if word in _LEVELS), max(_LEVELS.values()))


def _last_words(children: set[Child]) -> str:
    said = [f"{child.name} last said: {child.last_lines[-1].strip()}." for child in children if child.last_lines]
    return " ".join(sorted(said))


def _first(group: BaseExceptionGroup[BaseException]) -> Exception:
    """The first failure in a group; the others followed from it."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            return _first(error)
        if isinstance(error, Exception):
            return error
    raise group
