"""The engine core's actor: sockets on one side, rings on the other, the engine between them.

Everything on the step path runs inside one callback: a doorbell rings, results are committed, the next plan goes into
the ring, news goes out. No task wakes up per step.
"""

import asyncio
import gc
import logging
import time
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import zmq

from ..ipc.actor import Actor
from ..ipc.channel import RouterChannel
from ..ipc.conditions import Refusal
from ..ipc.configuration import HANG_FACTOR, CoreConfiguration
from ..ipc.control import (
    Attach,
    Drain,
    Drained,
    Explained,
    FrontendLost,
    GroupFault,
    PhaseReport,
    Pulse,
    Ready,
    Refused,
    Stop,
    ToChild,
    WorkersLost,
)
from ..ipc.facts import Phase
from ..ipc.frontend_messages import (
    TO_CORE,
    Abort,
    EngineState,
    Failed,
    FailKind,
    FinishSequence,
    Hello,
    InfoReply,
    InfoRequest,
    MetricsReply,
    MetricsRequest,
    OutputColumns,
    Outputs,
    Rejected,
    RejectKind,
    Report,
    ResetPrefixCache,
    Submit,
    ToCore,
    Vocabulary,
)
from ..ipc.metrics import MetricFamily, MetricKind, Sample
from ..ipc.plan import StepResult
from ..ipc.process import ControlLink
from ..ipc.sampling import Sampling
from ..ipc.server_info import ServerInfo
from ..ipc.worker_messages import StepError
from .admission import Door, admit
from .commit import INTERNAL, Failure, News
from .device_metrics import device_families
from .engine import Engine
from .grammar_compiler import GrammarCompiler, GrammarRefused
from .grammar_limits import roomy_thread
from .growth_watch import GrowthWatch
from .masks import Masks
from .metric_totals import MetricTotals
from .policies import HOST_PLATFORMS
from .request import Request
from .statistics import Statistics
from .token_bytes import TokenBytes
from .worker_group import WorkerGroup

log = logging.getLogger("trimaran.core")

HEARTBEAT_S = 1.0
_BOOT_TOKEN = 0
_ENGINE_COUNTERS = {
    "num_preemptions_total": "Sequences whose blocks were taken back",
    "recomputed_tokens_total": "Positions to compute again after that",
    "computed_tokens_total": "Positions computed",
    "prefix_cache_queries_total": "Tokens looked up in the prefix cache",
    "prefix_cache_hits_total": "Tokens found in the prefix cache",
    "kernels_compiled_after_ready_total": "Kernels compiled after ready",
}


class Owner:
    """One frontend, as the core knows it."""

    def __init__(self, peer: bytes, index: int, incarnation: int, number: int) -> None:
        self.peer = peer
        self.index = index
        self.incarnation = incarnation
        self.number = number


class Core(Actor):
    """Owns the engine, the worker group and the frontends' socket."""

    def __init__(self, configuration: CoreConfiguration, control: ControlLink[ToChild], descriptors: list[int]) -> None:
        super().__init__()
        self.configuration = configuration
        self.statistics = Statistics()
        self.totals = MetricTotals()
        self._counted: Counter[str] = Counter()  # by the engines of earlier generations
        self.engine: Engine | None = None
        self._control = control
        self._descriptors = descriptors
        self._context: zmq.Context[Any] = zmq.Context()
        self._frontends: RouterChannel[ToCore] = RouterChannel(
            self._context, configuration.frontends_address, TO_CORE, self._from_frontend
        )
        self.group = WorkerGroup(
            self._context,
            configuration,
            on_ready=self._workers_ready,
            on_result=self._result,
            on_refusal=self._refuse,
            on_fault=self._distrust,
            on_explained=self._explain if configuration.explain else None,
        )
        self.grammars = GrammarCompiler(
            self.start_task, num_cached=configuration.num_cached_grammars, limit_s=configuration.grammar_limit_s
        )
        self._mask_thread = roomy_thread("masks")
        self._owners: dict[bytes, Owner] = {}
        self._by_number: dict[int, Owner] = {}
        self._num_owners = 0
        self._next_order = 0
        self._next_internal = -1
        self._is_booted = False
        self._boot_s = 0.0
        self._boot_phase: Phase | None = None
        self._draining = False
        self._loss = "the engine is starting"
        self._last_step_s = time.monotonic()
        self._stalled_since: float | None = None
        self._growth_watch: GrowthWatch | None = None
        self._growth = ""
        self._growth_s = 0.0

    async def open(self) -> None:
        """Take connections, attach the first rings."""
        self._control.open(self._from_supervisor, self.stop)
        self._frontends.open()
        self.group.open()
        self.group.attach(self.configuration.generation, self._descriptors)
        self.start_task(self._beat(), "heartbeat")

    async def close(self) -> None:
        """Give sockets, rings, threads and children back."""
        await self.grammars.close()
        self._mask_thread.shutdown(wait=True, cancel_futures=True)
        self.group.close()
        self._frontends.close()
        self._context.term()

    # the step path

    def _result(self, result: StepResult | StepError) -> None:
        assert self.engine is not None
        if isinstance(result, StepError):
            log.error("step %d failed (%s): %s", result.step, result.kind.value, result.text)
        news = self.engine.commit(result, time.monotonic())
        self._make_masks()
        self._plan_ahead()  # first: the device may be out of work before the news is packed and sent
        self._tell(news)
        self._note_drained()

    def _pump(self) -> None:
        self._plan_ahead()
        self._note_drained()

    def _plan_ahead(self) -> None:
        """Keep as many steps in flight as may be, while there is work."""
        engine = self.engine
        if engine is None or not self.group.is_ready:
            return
        while engine.can_plan() and self.group.can_publish():
            now = time.monotonic()
            plan = engine.plan(now)
            if plan is None:
                break
            self._last_step_s = now
            self.group.publish(plan)
        self._make_masks()

    def _make_masks(self) -> None:
        """The device may be waiting for them; they are computed in a thread, since some take a tenth of a second."""
        assert self.engine is not None
        if (work := self.engine.masks_due()) is not None:
            making = asyncio.get_running_loop().run_in_executor(self._mask_thread, work.run)
            making.add_done_callback(partial(self._masked, self.engine, work.step))

    def _masked(self, engine: Engine, step: int, making: "asyncio.Future[Masks]") -> None:
        if making.cancelled():
            return
        made = making.result()
        if engine is not self.engine or not engine.is_step_due(step):
            return  # the group was lost, or the step failed before it wanted them
        self.group.publish(made.masks)
        failed = {sequence.request.request_id: (sequence.request, reason) for sequence, reason in made.failed}
        for request, reason in failed.values():
            if not request.is_over:
                self._fail_constrained(engine, request, reason)

    def _fail_constrained(self, engine: Engine, request: Request, reason: str) -> None:
        if request.compiled is not None:
            self.grammars.forget(request.compiled)
        log.warning("request %d: its constraint failed on the way: %s", request.request_id, reason)
        text = f"the answer cannot go on as its constraint wants: {reason}; change the constraint"
        self._fail([engine.fail(request, FailKind.GRAMMAR, text)])

    def _note_drained(self) -> None:
        if self._draining and self.group.is_ready and self.engine is not None and not self.engine.requests:
            self._control.send(Drained())

    def _tell(self, news: News) -> None:
        for number, columns in news.outputs:
            self._send_outputs(number, columns)
        self._fail(news.failures)

    def _send_outputs(self, number: int, columns: OutputColumns) -> None:
        if number == INTERNAL:
            self._own_token()
        elif (owner := self._by_number.get(number)) is not None:
            self._frontends.send(owner.peer, Outputs(), OutputColumns.SCHEMA.pack(columns.values()))

    def _fail(self, failures: list[Failure]) -> None:
        for request, kind, text in failures:
            if request.owner == INTERNAL and kind is not FailKind.WORKER_LOST:
                self._distrust(f"the engine's own token could not be made: {text}")
            owner = self._by_number.get(request.owner)
            if owner is not None:
                self._frontends.send(owner.peer, Failed((request.request_id,), kind, text))

    # frontends

    def _from_frontend(self, peer: bytes, message: ToCore, frames: list[bytes]) -> None:
        match message:
            case Submit():
                self._submit(peer, message, frames)
            case Abort():
                self._abort(peer, message.request_id)
            case FinishSequence():
                self._finish_sequence(peer, message)
            case Hello():
                self._know(peer, message)
                self._frontends.send(peer, self._state())
            case Vocabulary():
                self._know_vocabulary(message, frames)
            case Report():
                self.totals.report(message)
            case MetricsRequest():
                self._frontends.send(peer, MetricsReply(message.query_id, tuple(self._metrics())))
            case InfoRequest():
                self._frontends.send(peer, InfoReply(message.query_id, self._info()))
            case ResetPrefixCache():
                if self.engine is not None:
                    self.engine.pool.forget_free_content()
                self._frontends.send(peer, InfoReply(message.query_id, self._info()))

    def _know(self, peer: bytes, hello: Hello) -> None:
        if peer not in self._owners:
            self._num_owners += 1
            owner = Owner(peer, hello.index, hello.incarnation, self._num_owners)
            self._owners[peer] = self._by_number[owner.number] = owner

    def _submit(self, peer: bytes, submit: Submit, frames: list[bytes]) -> None:
        owner = self._owners.get(peer)
        if owner is None or submit.core_incarnation != self.configuration.incarnation:
            return  # meant for a core that is gone; its frontend has failed it already
        engine = self.engine
        if engine is None or not self._is_booted or self._draining or self._growth:
            text = "the server is shutting down" if self._draining else self._growth or self._loss
            self._frontends.send(peer, Rejected(submit.request_id, RejectKind.UNAVAILABLE, text, self._retry_after_s()))
            return
        if submit.request_id in engine.requests:
            self._frontends.send(
                peer, Rejected(submit.request_id, RejectKind.INVALID, "this request id is already in use", None)
            )
            return
        answer = admit(
            submit,
            frames[0] if frames else b"",
            self._door(engine),
            owner=owner.number,
            order=self._next_order,
            num_queued=len(engine.waiting) + len(engine.compiling),
            num_queued_tokens=engine.waiting.num_tokens,
            root=lambda salt, adapter: engine.cache.root(salt=salt, adapter=adapter),
            retry_after_s=self._retry_after_s(),
            default_seed=self.configuration.seed,
        )
        if isinstance(answer, Rejected):
            self.statistics.num_rejected += 1
            self._frontends.send(peer, answer)
            return
        self._next_order += 1
        engine.submit(answer)
        if answer.grammar is not None:
            self.start_task(self._compile(engine, answer), "wait for a grammar")
            return
        self._pump()

    async def _compile(self, engine: Engine, request: Request) -> None:
        """The request waits outside for its grammar, then stands in line or is turned away."""
        assert request.grammar is not None
        try:
            request.compiled = await self.grammars.compile(request.grammar)
        except GrammarRefused as refusal:
            if not request.is_over:
                engine.reject(request)
                self.statistics.num_rejected += 1
                self._reject(request, refusal)
            return
        if not request.is_over:
            engine.queue(request)
            self._pump()

    def _reject(self, request: Request, refusal: GrammarRefused) -> None:
        owner = self._by_number.get(request.owner)
        if owner is not None:
            retry_after_s = None if refusal.kind is RejectKind.GRAMMAR else self._retry_after_s()
            self._frontends.send(owner.peer, Rejected(request.request_id, refusal.kind, refusal.text, retry_after_s))
        self._note_drained()

    def _know_vocabulary(self, message: Vocabulary, frames: list[bytes]) -> None:
        """While nobody is served yet there is time to make something of it."""
        joined, lengths = frames
        vocabulary = TokenBytes(
            joined, np.frombuffer(lengths, np.int32), control_ids=message.control_ids, end_ids=message.end_ids
        )
        self.grammars.know(vocabulary, prepares=not self._is_booted)

    def _door(self, engine: Engine) -> Door:
        return Door(
            max_model_len=engine.limits.max_model_len,
            vocab_size=engine.limits.vocab_size,
            pooling=engine.limits.pooling,
            max_queued_requests=self.configuration.max_queued_requests,
            max_queued_tokens=self.configuration.max_queued_tokens,
        )

    def _abort(self, peer: bytes, request_id: int) -> None:
        engine, owner = self.engine, self._owners.get(peer)
        request = engine.requests.get(request_id) if engine is not None else None
        if engine is not None and request is not None and owner is not None and request.owner == owner.number:
            self._send_outputs(owner.number, engine.abort(request, time.monotonic()))
            self._pump()

    def _finish_sequence(self, peer: bytes, message: FinishSequence) -> None:
        engine, owner = self.engine, self._owners.get(peer)
        request = engine.requests.get(message.request_id) if engine is not None else None
        if engine is None or request is None or owner is None or request.owner != owner.number:
            return
        columns = engine.finish_sequence(request, message.choice, time.monotonic())
        if columns is not None:
            self._send_outputs(owner.number, columns)
            self._pump()

    def _retry_after_s(self) -> float:
        return 1.0 if self._is_booted else 2.0

    # the supervisor

    def _from_supervisor(self, message: ToChild, descriptors: list[int]) -> None:
        match message:
            case Attach():
                self.group.attach(message.generation, descriptors)
            case WorkersLost():
                self._lose_workers(message)
            case FrontendLost():
                self._lose_frontend(message)
            case Drain():
                self._draining = True
                self._broadcast_state()
                self._pump()
                if self.engine is None:
                    self._control.send(Drained())
            case Stop():
                self.stop()
            case _:
                log.warning("the core has no use for %s", type(message).__name__)

    def _lose_workers(self, message: WorkersLost) -> None:
        if message.generation != self.group.generation:
            return
        self._counted += self._engine_counts()
        self.group.detach()
        self._is_booted = False
        self._stalled_since = None
        self._loss = f"the device workers are being restarted: {message.cause}"
        engine, self.engine = self.engine, None
        self._broadcast_state()  # first, so that whoever is failed and asks again at once hears the reason
        if engine is not None:
            for step in engine.in_flight():
                log.error("lost in generation %d: %s", message.generation, step)
            self._fail(engine.fail_all(FailKind.WORKER_LOST, f"the device worker was lost: {message.cause}"))
        if self._draining:
            self._control.send(Drained())

    def _distrust(self, text: str) -> None:
        """The group computes wrongly or not at all: its requests fail now, and nothing it says counts any more."""
        log.error("generation %d: %s", self.group.generation, text)
        self._control.send(GroupFault(self.group.generation, text))
        self._lose_workers(WorkersLost(self.group.generation, text))

    def _lose_frontend(self, message: FrontendLost) -> None:
        gone = [
            owner
            for owner in self._owners.values()
            if owner.index == message.index and owner.incarnation == message.incarnation
        ]
        for owner in gone:
            del self._owners[owner.peer], self._by_number[owner.number]
            if self.engine is not None:
                mine = [request for request in self.engine.requests.values() if request.owner == owner.number]
                for request in mine:
                    self.engine.abort(request, time.monotonic())
        self._pump()

    # boot, canary, state

    def _workers_ready(self) -> None:
        group = self.group
        assert group.limits is not None and group.settled is not None
        self.engine = Engine(
            group.limits,
            max_batched_tokens=group.settled.max_batched_tokens,
            max_chunk_tokens=group.settled.max_chunk_tokens,
            ordering=group.settled.queue_ordering,
            prompt_step_s=group.settled.prompt_step_s,
            prefix_caching=self.configuration.prefix_caching and not group.is_encoder,
            encodes=group.is_encoder,
            statistics=self.statistics,
            is_asynchronous=group.profiles[0].platform not in HOST_PLATFORMS,
        )
        self._boot_s = time.monotonic()
        self._submit_own()

    def _explain(self) -> None:
        """All is settled and nothing loaded: say so."""
        self._control.send(Explained(self._info()))

    def _submit_own(self) -> None:
        """One token of the engine's own making, or one vector, proves that it can make them."""
        assert self.engine is not None
        request = Request(
            request_id=self._next_internal,
            owner=INTERNAL,
            order=self._next_internal,  # ahead of all, and no place in line that would key a request's draws
            prompt=np.array([_BOOT_TOKEN], np.int32),
            sampling=Sampling(max_tokens=1, temperature=0.0, seed=0),
            priority=0,
            arrival_s=time.monotonic(),
            pools=self.group.model is not None and not self.group.model.generates,
        )
        self._next_internal -= 1
        self.engine.submit(request)
        self._pump()

    def _own_token(self) -> None:
        if self._is_booted:
            return
        self._is_booted = True
        self._loss = self._growth = ""
        limit = self.configuration.memory_growth_limit_bytes
        if limit is not None:
            self._growth_watch = GrowthWatch(limit, time.monotonic(), self.configuration.growth_settling_s)
        gc.collect()
        gc.freeze()
        took_s = time.monotonic() - self._boot_s
        self._boot_phase = Phase(name="boot token", process="core", began_s=self._boot_s, took_s=took_s)
        self._control.send(PhaseReport(self._boot_phase))
        self._control.send(Ready(self.group.generation, self._ready_lines()))
        self._broadcast_state()

    def _ready_lines(self) -> tuple[str, ...]:
        lines = [f"{item.name} = {item.value}: {item.reason}" for item in self.group.decisions]
        for found in self.group.resolutions:
            reasons = {**found.rejected, **found.demoted}
            because = "".join(f"; not {name}: {reason}" for name, reason in reasons.items())
            lines.append(f"kernel {found.kernel} = {found.chosen}{because}")
        if memory := self.group.memory:
            parts = (f"{name.replace('_', ' ')} {size / 2**30:.2f} GiB" for name, size in memory.items())
            lines.append(f"memory = {', '.join(parts)}")
        return tuple(lines)

    def _state(self) -> EngineState:
        engine = self.engine
        stall = self.group.stall(self.configuration.stall_limit_s, time.monotonic()) if self._is_booted else None
        reason = "the server is shutting down" if self._draining else self._growth or self._loss or stall or ""
        return EngineState(
            incarnation=self.configuration.incarnation,
            generation=self.group.generation,
            ready=self._is_booted and stall is None and not self._draining and not self._growth,
            reason=reason,
            limits=engine.limits if engine is not None else None,
            num_running=engine.num_running if engine is not None else 0,
            num_waiting=engine.num_waiting if engine is not None else 0,
            draining=self._draining,
            retry_after_s=self._retry_after_s(),
        )

    def _broadcast_state(self) -> None:
        state = self._state()
        for owner in self._owners.values():
            self._frontends.send(owner.peer, state)

    async def _beat(self) -> None:
        interval = min(HEARTBEAT_S, self.configuration.stall_limit_s / 4)
        while True:
            self._control.send(Pulse())
            self._broadcast_state()
            self._watch_stall()
            self._watch_growth()
            idle_s = time.monotonic() - self._last_step_s
            is_idle = self._is_booted and self.engine is not None and not self.engine.requests and not self._draining
            if is_idle and idle_s > self.configuration.idle_canary_s:
                self._submit_own()
            await asyncio.sleep(interval)

    def _watch_stall(self) -> None:
        now, limit_s = time.monotonic(), self.configuration.stall_limit_s
        stall = self.group.stall(limit_s, now) if self.group.is_ready else None
        if stall is None:
            self._stalled_since = None
        elif self._stalled_since is None:
            log.warning("not ready: %s", stall)
            self._stalled_since = now
        elif now - self._stalled_since > (HANG_FACTOR - 1) * limit_s:
            self._control.send(GroupFault(self.group.generation, f"it hung: {stall}"))
            self._stalled_since = now

    def _watch_growth(self) -> None:
        """A worker that leaks is restarted in order: no new requests, those that are here end, then a new group."""
        now = time.monotonic()
        if self._growth_watch is None or not self._is_booted or self._draining:
            return
        if not self._growth:
            grown = self._growth_watch.look(self.group.heartbeats, now)
            if grown is None:
                return
            self._growth = f"the device workers are restarted to give memory back: {grown}"
            self._growth_s = now
            log.warning("%s", self._growth)
            self._broadcast_state()
        is_idle = self.engine is None or not self.engine.requests
        if is_idle or now - self._growth_s > self.configuration.drain_timeout_s:
            self._growth_watch = None
            self._control.send(GroupFault(self.group.generation, self._growth))

    def _refuse(self, error: Exception) -> None:
        if not isinstance(error, Refusal):
            raise error
        self._control.send(Refused(str(error)))

    # what users ask

    def _metrics(self) -> list[MetricFamily]:
        engine = self.engine
        gauges: dict[str, tuple[float, str]] = {}
        gauges["engine_ready"] = (float(self._state().ready), "1 when the engine can make a token now")
        gauges["engine_generation"] = (float(self.group.generation), "How often the worker group was started")
        if engine is not None:
            pool = engine.pool
            gauges |= {
                "num_requests_running": (engine.num_running, "Sequences that hold a row"),
                "num_requests_waiting": (engine.num_waiting, "Sequences that wait for a row"),
                "kv_cache_usage_perc": (pool.num_held / max(pool.num_blocks, 1), "Share of KV blocks held, 0 to 1"),
                "kv_cache_blocks": (pool.num_blocks, "KV blocks in all"),
                "queue_limit_requests": (self.configuration.max_queued_requests or 0, "Requests that may wait; 0: any"),
            }
        else:
            gauges |= {
                "num_requests_running": (0.0, "Sequences that hold a row"),
                "num_requests_waiting": (0.0, "Sequences that wait for a row"),
                "kv_cache_usage_perc": (0.0, "Share of KV blocks held, 0 to 1"),
            }
        counts = self._counted + self._engine_counts()
        counters = {name: (float(counts[name]), text) for name, text in _ENGINE_COUNTERS.items()}
        grammars = self.grammars
        counters |= {
            "grammars_compiled_total": (grammars.num_compiled, "Grammars compiled"),
            "grammar_cache_hits_total": (grammars.num_hits, "Requests whose grammar was compiled already"),
            "grammars_refused_total": (grammars.num_refused, "Grammars that could not be honoured"),
        }
        families = self.statistics.families(gauges, counters)
        families.append(_phase_family(self._phases()))
        families += device_families(self.group.profiles, self.group.heartbeats, self.group.resolutions_by_rank)
        return [*families, *self.totals.families()]

    def _engine_counts(self) -> Counter[str]:
        """What this generation counted, by the names of _ENGINE_COUNTERS."""
        compiled = sum(beat.compiled_after_ready for beat in self.group.heartbeats.values())
        counts = Counter({"kernels_compiled_after_ready_total": compiled})
        if (engine := self.engine) is not None:
            counts["num_preemptions_total"] = engine.scheduler.num_preemptions
            counts["recomputed_tokens_total"] = engine.scheduler.num_recomputed_tokens
            counts["computed_tokens_total"] = engine.scheduler.num_computed_tokens
            counts["prefix_cache_queries_total"] = engine.cache.num_queried_tokens
            counts["prefix_cache_hits_total"] = engine.cache.num_hit_tokens
        return counts

    def _info(self) -> ServerInfo:
        group = self.group
        return ServerInfo(
            generation=group.generation,
            model=group.model,
            limits=group.limits,
            devices=group.profiles,
            kernels=group.resolutions,
            decisions=group.decisions,
            memory=group.memory,
            phases=self._phases(),
        )

    def _phases(self) -> tuple[Phase, ...]:
        boot = () if self._boot_phase is None else (self._boot_phase,)
        return self.configuration.phases + self.group.phases + boot


def _phase_family(phases: tuple[Phase, ...]) -> MetricFamily:
    samples = tuple(
        Sample({"process": phase.process, "phase": phase.name}, phase.took_s)
        for phase in phases
        if phase.took_s is not None
    )
    return MetricFamily("startup_phase_seconds", MetricKind.GAUGE, "How long each phase of the start took", samples)
