"""All workers of one engine, as the core sees them: the boot handshake, plans out, results in, health.

One generation at a time. When the supervisor says the group is lost, it is `detach`ed; the next `attach` begins a new
generation. Messages of any other generation are dropped.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from ..ipc.channel import RouterChannel
from ..ipc.conditions import Oversized
from ..ipc.configuration import CoreConfiguration
from ..ipc.facts import Decision, DeviceProfile, ModelFacts, Phase, Resolution
from ..ipc.plan import RingKind, StepPlan, StepResult, TokenMasks
from ..ipc.ring import RingReader, RingWriter
from ..ipc.server_info import EngineLimits
from ..ipc.worker_messages import (
    FROM_WORKER,
    STEP_ERROR,
    Allocate,
    FromWorker,
    Heartbeat,
    KernelsChanged,
    Loaded,
    Negotiated,
    OversizedPlan,
    OversizedResult,
    Settled,
    StepError,
    WorkerHello,
    WorkerReady,
)
from .negotiation import count_blocks, settle

log = logging.getLogger("trimaran.core")


class RanksDisagree(Exception):
    """Two ranks sampled different tokens from the same plan: a device fault."""


class _Arrival:
    """One slot of a result ring; without a result yet when that travels as a frame."""

    __slots__ = ("result", "sequence")

    def __init__(self, sequence: int, result: StepResult | StepError | None) -> None:
        self.sequence = sequence
        self.result = result


class WorkerGroup:
    """`on_ready` is called when all ranks can run plans; `on_result` with each step's result, in order;
    `on_fault` when results cannot be trusted any more, with the reason.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        configuration: CoreConfiguration,
        *,
        on_ready: Callable[[], None],
        on_result: Callable[[StepResult | StepError], None],
        on_refusal: Callable[[Exception], None],
        on_fault: Callable[[str], None],
        on_explained: Callable[[], None] | None = None,
    ) -> None:
        self.configuration = configuration
        self.generation = 0
        self.is_ready = False
        self.settled: Settled | None = None
        self.limits: EngineLimits | None = None
        self.model: ModelFacts | None = None
        self._on_ready, self._on_result = on_ready, on_result
        self._on_refusal, self._on_fault = on_refusal, on_fault
        self._on_explained = on_explained
        self._channel: RouterChannel[FromWorker] = RouterChannel(
            context, configuration.workers_address, FROM_WORKER, self._message
        )
        self._num_ranks = configuration.num_ranks
        self._hellos: dict[int, WorkerHello] = {}
        self._loaded: dict[int, Loaded] = {}
        self._ready: dict[int, WorkerReady] = {}
        self.heartbeats: dict[int, Heartbeat] = {}
        self._heard_s: dict[int, float] = {}
        self._peers: dict[int, bytes] = {}
        self._sizing: tuple[Decision, ...] = ()
        self._plans: RingWriter | None = None
        self._results: list[RingReader] = []
        self._doorbell: int | None = None
        self._owned: list[int] = []
        self._arrived: list[deque[_Arrival]] = []

    def open(self) -> None:
        """Serve the workers' socket on the running loop."""
        self._channel.open()

    def close(self) -> None:
        """Let go of rings and socket."""
        self.detach()
        self._channel.close()

    # generations

    def attach(self, generation: int, descriptors: list[int]) -> None:
        """Take the rings of a new generation; see control.Attach for the order of descriptors."""
        self.detach()
        ranks = self._num_ranks
        assert len(descriptors) == 2 * ranks + 2, f"{len(descriptors)} descriptors for {ranks} ranks"
        plan_ring, doorbells = descriptors[0], descriptors[1 : 1 + ranks]
        result_rings, self._doorbell = descriptors[1 + ranks : 1 + 2 * ranks], descriptors[-1]
        self.generation = generation
        self._owned = descriptors
        self._plans = RingWriter(plan_ring, doorbells)
        self._results = [RingReader(ring, 0, self._doorbell) for ring in result_rings]
        self._arrived = [deque() for _ in range(ranks)]
        asyncio.get_running_loop().add_reader(self._doorbell, self._rung)

    def detach(self) -> None:
        """Forget the generation: its rings, its workers, what they said."""
        if self._doorbell is not None:
            asyncio.get_running_loop().remove_reader(self._doorbell)
        for ring in (self._plans, *self._results):
            if ring is not None:
                ring.close()
        for descriptor in self._owned:
            os.close(descriptor)
        self._plans, self._results, self._doorbell, self._owned, self._arrived = None, [], None, [], []
        self.is_ready = False
        for told in (self._hellos, self._loaded, self._ready, self.heartbeats, self._heard_s, self._peers):
            told.clear()

    # plans and results

    def can_publish(self) -> bool:
        """Whether a slot is free for the next plan."""
        return self._plans is not None and self._plans.slot() is not None

    def publish(self, message: StepPlan | TokenMasks) -> None:
        """Send a plan or masks to all ranks."""
        assert self._plans is not None
        slot = self._plans.slot()
        assert slot is not None, "the plan ring is full although few steps are in flight"
        kind = RingKind.PLAN if isinstance(message, StepPlan) else RingKind.MASKS
        values = message.values()
        try:
            self._plans.publish(message.SCHEMA.pack_into(slot, values), kind)
        except Oversized:
            sequence = self._plans.publish(0, RingKind.OVERSIZED)
            packed = message.SCHEMA.pack(values)
            for peer in self._peers.values():
                self._channel.send(peer, OversizedPlan(self.generation, sequence, kind), packed)

    def _rung(self) -> None:
        assert self._doorbell is not None
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._doorbell)
        self._look()
        self._deliver()

    def _look(self) -> None:
        """Take what lies in the result rings."""
        for reader, arrived in zip(self._results, self._arrived, strict=True):
            while (message := reader.poll()) is not None:
                arrived.append(_Arrival(reader.sequence, _unpack(*message)))
                reader.release()

    def _deliver(self) -> None:
        """Hand over each step that all ranks have returned."""
        while self._arrived and all(queue and queue[0].result is not None for queue in self._arrived):
            results = [queue.popleft().result for queue in self._arrived]
            try:
                agreed = self._agreed(results)
            except RanksDisagree as error:
                self._on_fault(str(error))
                return
            self._on_result(agreed)

    def _agreed(self, results: list[StepResult | StepError | None]) -> StepResult | StepError:
        for result in results:
            if isinstance(result, StepError):
                return result
        first = results[0]
        assert isinstance(first, StepResult)
        for rank, other in enumerate(results):
            assert isinstance(other, StepResult)
            if other.tokens_hash[0] != first.tokens_hash[0]:
                raise RanksDisagree(f"rank {rank} sampled other tokens than rank 0 in step {int(first.step[0])}")
        return first

    # the handshake

    def _message(self, peer: bytes, message: FromWorker, frames: list[bytes]) -> None:
        if message.generation != self.generation or self._plans is None:
            log.info("dropped %s of generation %d", type(message).__name__, message.generation)
            return
        self._peers[message.rank] = peer
        self._heard_s[message.rank] = time.monotonic()
        try:
            self._handle(message, frames)
        except Exception as error:
            self._on_refusal(error)

    def _handle(self, message: FromWorker, frames: list[bytes]) -> None:
        match message:
            case WorkerHello():
                self._hellos[message.rank] = message
                if len(self._hellos) == self._num_ranks:
                    self._negotiate()
            case Loaded():
                self._loaded[message.rank] = message
                if len(self._loaded) == self._num_ranks:
                    self._allocate()
            case WorkerReady():
                self._ready[message.rank] = message
                if len(self._ready) == self._num_ranks:
                    self.is_ready = True
                    self._on_ready()
            case Heartbeat():
                self.heartbeats[message.rank] = message
            case OversizedResult():
                self._arrive_late(message, frames)
            case KernelsChanged():
                known = self._ready.get(message.rank)
                if known is not None:
                    self._ready[message.rank] = _with_resolutions(known, message.resolutions)

    def _negotiate(self) -> None:
        hellos = [self._hellos[rank] for rank in range(self._num_ranks)]
        self.model = hellos[0].model
        held = [(hello.settled, hello.num_blocks) for hello in hellos]
        if all(settled is not None and num_blocks is not None for settled, num_blocks in held):
            settled, num_blocks = held[0]
            assert settled is not None and num_blocks is not None
            self.settled = settled
            self._limit(min(count for _, count in held if count is not None), settled.max_model_len)
            self._tell(Allocate(self.generation, num_blocks))
            return
        self.settled = settle(self.configuration, hellos)
        self._tell(Negotiated(self.generation, self.settled))

    def _allocate(self) -> None:
        assert self.settled is not None
        loaded = [self._loaded[rank] for rank in range(self._num_ranks)]
        num_blocks, max_model_len, self._sizing = count_blocks(self.configuration, self.settled, loaded)
        self._limit(num_blocks, max_model_len)
        if self._on_explained is not None:
            self._on_explained()
        else:
            self._tell(Allocate(self.generation, num_blocks))

    def _limit(self, num_blocks: int, max_model_len: int) -> None:
        assert self.settled is not None and self.model is not None
        if not self.is_encoder:
            max_model_len = min(max_model_len, num_blocks * self.settled.block_size)
        self.limits = EngineLimits(
            max_model_len=max_model_len,
            vocab_size=self.model.vocab_size,
            max_num_seqs=self.settled.max_num_seqs,
            num_blocks=num_blocks,
            block_size=self.settled.block_size,
            dtype=self.model.dtype,
            pooling=self.model.pooling,
        )

    def _tell(self, message: Negotiated | Allocate) -> None:
        for peer in self._peers.values():
            self._channel.send(peer, message)

    def _arrive_late(self, message: OversizedResult, frames: list[bytes]) -> None:
        """A frame for a slot that said OVERSIZED; it may overtake the slot's doorbell."""
        if not self._arrived or not frames:
            return
        self._look()
        for arrival in self._arrived[message.rank]:
            if arrival.sequence == message.sequence and arrival.result is None:
                arrival.result = StepResult.unpack(frames[0])
        self._deliver()

    # what others ask

    def stall(self, limit_s: float, now: float) -> str | None:
        """Why the group cannot make a token now: a silent worker, or a step that gets nowhere; None if it can."""
        for rank in range(self._num_ranks):
            silent_s = now - self._heard_s.get(rank, now)
            if silent_s > limit_s:
                return f"worker {rank} has been silent for {silent_s:.1f} s (limit {limit_s:g} s)"
            beat = self.heartbeats.get(rank)
            if beat is not None and beat.step is not None and beat.progress_age_s > limit_s:
                return f"step {beat.step} of worker {rank} has got nowhere for {beat.progress_age_s:.1f} s"
        return None

    @property
    def is_encoder(self) -> bool:
        """Whether the model computes whole prompts and needs no blocks."""
        return self.model is not None and self.model.is_encoder

    @property
    def profiles(self) -> tuple[DeviceProfile, ...]:
        """One per rank."""
        return tuple(self._hellos[rank].profile for rank in sorted(self._hellos))

    @property
    def resolutions(self) -> tuple[Resolution, ...]:
        """Rank 0's kernels."""
        if 0 in self._ready:
            return self._ready[0].resolutions
        return self._loaded[0].resolutions if 0 in self._loaded else ()

    @property
    def resolutions_by_rank(self) -> dict[int, tuple[Resolution, ...]]:
        """Every rank's kernels: they may differ where one rank's were demoted."""
        return {rank: ready.resolutions for rank, ready in sorted(self._ready.items())}

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Everything that was settled, with reasons."""
        told = (self._hellos[0].decisions if 0 in self._hellos else ()) + (
            self.settled.decisions if self.settled else ()
        )
        late = (self._loaded[0].decisions if 0 in self._loaded else ()) + self._sizing
        ready = self._ready[0].decisions if 0 in self._ready else ()
        newest = {decision.name: decision for decision in (*told, *late, *ready)}
        return tuple(newest.values())

    @property
    def memory(self) -> dict[str, int]:
        """Rank 0's memory by kind, in bytes; before it is ready as far as it is settled."""
        if 0 in self._ready:
            return self._ready[0].memory
        loaded, limits = self._loaded.get(0), self.limits
        if loaded is None or limits is None:
            return {}
        cache = limits.num_blocks * loaded.kv_bytes_per_block
        return {"weights": loaded.weight_bytes, "activations": loaded.activation_bytes, "kv_cache": cache}

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The workers' start-up phases."""
        return tuple(phase for ready in self._ready.values() for phase in ready.phases)


def _unpack(kind: int, payload: memoryview) -> StepResult | StepError | None:
    if kind == RingKind.OVERSIZED:
        return None
    packed = bytes(payload)
    if kind == RingKind.FAILED:
        return STEP_ERROR.decode(packed)
    assert kind == RingKind.RESULT, f"a result ring held a message of kind {kind}"
    return StepResult.unpack(packed)


def _with_resolutions(ready: WorkerReady, resolutions: tuple[Resolution, ...]) -> WorkerReady:
    return WorkerReady(ready.rank, ready.generation, resolutions, ready.decisions, ready.memory, ready.phases)
