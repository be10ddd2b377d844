"""The one thread that owns the rings, the device and every torch call: boot, then steps until told to stop."""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from msgspec import Struct

from ..ipc.conditions import DeviceFault, Refusal, StepFailed
from ..ipc.configuration import WorkerConfiguration
from ..ipc.facts import AttentionStrategy, Phase, Resolution
from ..ipc.plan import StepPlan, TokenMasks, WorkFlag
from ..ipc.worker_messages import (
    Allocate,
    KernelsChanged,
    Loaded,
    Negotiated,
    OversizedPlan,
    OversizedResult,
    Settled,
    StepError,
    StepErrorKind,
    WorkerHello,
    WorkerReady,
)
from ..kernels.registry import Registry
from .boot import describe, open_engine, strategy_misfits
from .execution.contract import LoadFacts, PendingStep, StepEngine
from .rings import WorkerRings

_MAX_ERROR_CHARACTERS = 2000
_LOOK_S = 0.2
"""How often a waiting step thread looks whether it should stop or change rings."""
_MASKED = int(WorkFlag.MASKED)  # numpy is slow with the enum itself
_MOST_RUNNING = 2
"""Steps given to the device at a time: one runs, the next is queued."""
_SPIN_S = 0.002
_PAUSE_S = 0.00005
"""While the device works, the thread looks without a pause at first, since a small model's step takes no longer; then
with pauses."""


class NewRings(NamedTuple):
    """The supervisor made rings of a new generation: the old core is gone."""

    generation: int
    descriptors: list[int]


class PlanBytes(NamedTuple):
    """A plan or masks too large for a ring slot, as it came over the socket."""

    message: OversizedPlan
    frame: bytes


class _Reattached(Exception):
    def __init__(self, rings: NewRings) -> None:
        self.rings = rings


class Stopping(Exception):
    """The worker was told to end."""


M = TypeVar("M", Negotiated, Allocate)
Inbox = Negotiated | Allocate | PlanBytes | NewRings


@dataclass(frozen=True, kw_only=True)
class Outlets:
    """What the step thread says, each delivered on the control loop."""

    to_core: Callable[[Struct, bytes | bytearray | None], None]
    to_supervisor: Callable[[Phase], None]
    engine_known: Callable[[StepEngine], None]
    generation_changed: Callable[[int], None]
    ended: Callable[[BaseException | None], None]
    warn: Callable[[str], None]


def process_began_s() -> float | None:
    """When this process was started, on the clock of phases: its interpreter and imports are part of a start's time.

    None where the system does not tell.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    alive_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - alive_s


class StepThread:
    """`run` is the thread's body; `deliver` and `stop` are called from the control loop."""

    def __init__(self, configuration: WorkerConfiguration, descriptors: list[int], outlets: Outlets) -> None:
        self._configuration = configuration
        self._outlets = outlets
        self._inbox: queue.SimpleQueue[Inbox] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._rings = WorkerRings(descriptors, configuration.rank)
        self._generation = configuration.generation
        self._later: deque[StepPlan] = deque()
        self._running: deque[PendingStep] = deque()
        self._launched_s = 0.0
        self._failed_step = 0
        self._frames: dict[int, bytes] = {}
        self._phases: list[Phase] = []
        self._settled: Settled | None = None
        self._num_blocks: int | None = None
        self._loaded: LoadFacts | None = None
        self._misfits: dict[AttentionStrategy, str] = {}
        self._memory: dict[str, int] = {}
        self._resolutions: tuple[Resolution, ...] = ()
        self._registry: Registry | None = None

    def deliver(self, message: Inbox) -> None:
        self._inbox.put(message)

    def stop(self) -> None:
        """A kernel that is being compiled cannot be interrupted; the process ends with it."""
        self._stop.set()
        if self._registry is not None:
            self._registry.interrupt()

    def run(self) -> None:
        """Ends by `stop`, or with what went wrong."""
        try:
            self._work()
        except Stopping:
            self._outlets.ended(None)
        except BaseException as error:  # the control loop reports it, whatever it is
            self._outlets.ended(error)

    def _work(self) -> None:
        self._engine = self._boot()
        self._outlets.engine_known(self._engine)
        while True:
            try:
                self._shake_hands()
                self._serve()
            except _Reattached as event:
                self._adopt(event.rings)

    # -- boot

    def _boot(self) -> StepEngine:
        self._begin_phase("process", process_began_s())
        self._begin_phase("detect")
        described = describe(self._configuration, self._outlets.warn)
        self._registry = described.registry
        engine = open_engine(
            self._configuration, described, self._outlets.warn, self._begin_phase, self._kernels_changed
        )
        self._misfits = strategy_misfits(described, engine.model) if described.decodes else {}
        self._end_phase()
        return engine

    def _kernels_changed(self, resolutions: tuple[Resolution, ...]) -> None:
        self._resolutions = resolutions
        rank, generation = self._configuration.rank, self._generation
        self._send(KernelsChanged(rank=rank, generation=generation, resolutions=resolutions))

    def _shake_hands(self) -> None:
        self._send(self._hello())
        if self._num_blocks is None:
            settled = self._expect(Negotiated).settled
            if self._loaded is None or settled != self._settled:
                self._load(settled)
            self._send(self._loaded_now())
        num_blocks = self._expect(Allocate).num_blocks
        if num_blocks != self._num_blocks:
            self._allocate(num_blocks)
        self._send(self._ready_now())

    def _hello(self) -> WorkerHello:
        ready = self._num_blocks is not None
        spending = self._engine.spending
        return WorkerHello(
            rank=self._configuration.rank,
            generation=self._generation,
            pid=threading.get_native_id(),
            profile=self._engine.profile,
            model=self._engine.model,
            memory=spending.memory if spending else None,
            spendable_bytes=spending.spendable_bytes if spending else None,
            kv_limit_bytes=spending.kv_limit_bytes if spending else None,
            strategy_misfits=self._misfits,
            decisions=self._engine.decisions,
            settled=self._settled if ready else None,
            num_blocks=self._num_blocks,
        )

    def _load(self, settled: Settled) -> None:
        self._settled = settled
        self._loaded = self._engine.load(settled, self._on_fraction)
        self._resolutions = self._loaded.resolutions
        self._end_phase()

    def _loaded_now(self) -> Loaded:
        facts = self._loaded
        assert facts is not None
        return Loaded(
            rank=self._configuration.rank,
            generation=self._generation,
            resolutions=facts.resolutions,
            decisions=facts.decisions,
            memory=facts.memory,
            weight_bytes=facts.weight_bytes,
            activation_bytes=facts.activation_bytes,
            kv_budget_bytes=facts.kv_budget_bytes,
            kv_bytes_per_block=facts.kv_bytes_per_block,
            kv_is_limited=facts.kv_is_limited,
        )

    def _allocate(self, num_blocks: int) -> None:
        self._begin_phase("kv cache")
        self._engine.allocate(num_blocks)
        self._begin_phase("warm-up")
        try:
            self._memory = self._engine.warm_up()
        except StepFailed as error:  # it would fail at every start
            raise Refusal(str(error)) from error
        self._end_phase()
        self._num_blocks = num_blocks
        gc.collect()
        gc.freeze()

    def _ready_now(self) -> WorkerReady:
        return WorkerReady(
            rank=self._configuration.rank,
            generation=self._generation,
            resolutions=self._resolutions,
            decisions=self._engine.decisions,
            memory=self._memory,
            phases=tuple(self._phases),
        )

    # -- steps

    def _serve(self) -> None:
        while True:
            plan = self._later.popleft() if self._later else self._next_plan()
            self._launch(plan)

    def _next_plan(self) -> StepPlan:
        while True:
            message = self._next_message()
            if isinstance(message, StepPlan):
                return message
            assert self._is_stale(message), f"masks came for step {message.step[0]}, which does not wait for any"

    def _next_message(self) -> StepPlan | TokenMasks:
        """Meanwhile steps that the device finishes are told of."""
        while True:
            is_busy = self._tell_finished()
            if is_busy:
                message = self._rings.poll(self._frame)
            else:
                message = self._rings.wait(_LOOK_S, self._configuration.spin_s, self._frame)
            if message is not None:
                return message
            if not is_busy:
                self._look()
            elif time.monotonic() - self._launched_s > _SPIN_S:
                time.sleep(_PAUSE_S)

    def _tell_finished(self) -> bool:
        """Publish results in order; with as many steps given to the device as may be, wait for the oldest. Returns
        whether the device still works.
        """
        while self._running and (len(self._running) >= _MOST_RUNNING or self._running[0].is_done()):
            self._finish()
        return bool(self._running)

    def _finish(self) -> None:
        result = self._running.popleft().result()
        oversized = self._rings.publish(result, self._stop.is_set)
        if oversized is not None:
            sequence, packed = oversized
            rank, generation = self._configuration.rank, self._generation
            self._send(OversizedResult(rank=rank, generation=generation, sequence=sequence), packed)

    def _launch(self, plan: StepPlan) -> None:
        """Give a step to the device, while it may still work on the one before."""
        step = int(plan.step[0])
        try:
            self._engine.forward(plan)
            masks = self._masks(step) if (plan.flags & _MASKED).any() else None
            self._running.append(self._engine.sample(masks))
        except MemoryError as error:
            self._failed(step, StepErrorKind.OUT_OF_MEMORY, plan, error)
        except StepFailed as error:
            self._failed(step, StepErrorKind.ERROR, plan, error)
        self._launched_s = time.monotonic()

    def _masks(self, step: int) -> TokenMasks:
        """The masks of this step, which follow from the tokens of those before; plans that come before them wait their
        turn.
        """
        while self._running:
            self._finish()
        while True:
            message = self._next_message()
            if isinstance(message, StepPlan):
                self._later.append(message)
            elif not self._is_stale(message):
                assert int(message.step[0]) == step, f"masks of step {message.step[0]} came during step {step}"
                return message

    def _is_stale(self, masks: TokenMasks) -> bool:
        """They were on their way when their step failed."""
        return int(masks.step[0]) <= self._failed_step

    def _failed(self, step: int, kind: StepErrorKind, plan: StepPlan, error: Exception) -> None:
        """One step's sequences fail and the worker goes on; with several ranks the others would wait for ever, so it
        ends.
        """
        self._failed_step = step
        while self._running:  # results go out in the order of the steps
            self._finish()
        self._engine.progress.end()
        cause = str(error) or type(error).__name__
        text = f"step {step} ({len(plan.rows)} sequences, {int(plan.counts.sum())} tokens): {cause}"
        if self._configuration.num_ranks > 1 and self._engine.profile.platform != "null":
            raise DeviceFault(text) from error
        failure = StepError(
            rank=self._configuration.rank,
            generation=self._generation,
            step=step,
            kind=kind,
            text=text[:_MAX_ERROR_CHARACTERS],
        )
        self._rings.publish(failure, self._stop.is_set)

    # -- messages

    def _send(self, message: Struct, frame: bytes | bytearray | None = None) -> None:
        self._outlets.to_core(message, frame)

    def _look(self) -> None:
        """Take what came from the control loop. Raises Stopping or _Reattached."""
        if self._stop.is_set():
            raise Stopping
        while not self._inbox.empty():
            self._take(self._inbox.get())

    def _take(self, message: Inbox) -> Negotiated | Allocate | None:
        if isinstance(message, NewRings):
            raise _Reattached(message)
        if isinstance(message, PlanBytes):
            if message.message.generation == self._generation:
                self._frames[message.message.sequence] = bytes([message.message.kind]) + message.frame
            return None
        return message if message.generation == self._generation else None

    def _expect(self, kind: type[M]) -> M:
        while True:
            if self._stop.is_set():
                raise Stopping
            try:
                message = self._take(self._inbox.get(timeout=_LOOK_S))
            except queue.Empty:
                continue
            if isinstance(message, kind):
                return message

    def _frame(self, sequence: int) -> bytes:
        while sequence not in self._frames:
            if self._stop.is_set():
                raise Stopping
            try:
                self._take(self._inbox.get(timeout=_LOOK_S))
            except queue.Empty:
                continue
        return self._frames.pop(sequence)

    def _adopt(self, rings: NewRings) -> None:
        """Rings of a new generation: what the old core knew is forgotten, weights stay."""
        self._rings.close()
        self._rings = WorkerRings(rings.descriptors, self._configuration.rank)
        self._generation = rings.generation
        self._later.clear()
        self._frames.clear()
        while self._running:
            self._running.popleft().result()
        if self._num_blocks is not None:
            self._engine.drop_rows()
        self._outlets.generation_changed(rings.generation)

    # -- phases

    def _begin_phase(self, name: str, began_s: float | None = None) -> None:
        self._end_phase()
        self._phases.append(Phase(name=name, process=self._process, began_s=began_s or time.monotonic()))
        self._outlets.to_supervisor(self._phases[-1])

    def _end_phase(self) -> None:
        if self._phases and self._phases[-1].took_s is None:
            last = self._phases[-1]
            took_s = time.monotonic() - last.began_s
            self._phases[-1] = Phase(name=last.name, process=last.process, began_s=last.began_s, took_s=took_s)
            self._outlets.to_supervisor(self._phases[-1])

    def _on_fraction(self, name: str, fraction: float) -> None:
        """Progress of a phase, begun when its name is new; said at most once per percent."""
        if not self._phases or self._phases[-1].name != name:
            self._begin_phase(name)
            self._said = 0.0
        if fraction - self._said >= 0.01:
            self._said = fraction
            last = self._phases[-1]
            self._outlets.to_supervisor(Phase(name=name, process=last.process, began_s=last.began_s, fraction=fraction))

    @property
    def _process(self) -> str:
        return f"worker {self._configuration.rank}"
