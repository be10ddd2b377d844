"""Plays supervisor and engine core to real worker processes, one step at a time: for tests of workers alone."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq
from msgspec import Struct

from trimaran.ipc.channel import RouterChannel, ipc_address
from trimaran.ipc.configuration import WorkerConfiguration
from trimaran.ipc.control import Attach, Begin, Fault, FromChild, Refused, Stop
from trimaran.ipc.plan import RingKind, StepPlan, StepResult, TokenMasks
from trimaran.ipc.process import ControlLink, child_arguments, create_control_link
from trimaran.ipc.ring import RingReader, RingWriter, create_doorbell, create_ring
from trimaran.ipc.worker_messages import (
    FROM_WORKER,
    STEP_ERROR,
    Allocate,
    FromWorker,
    Loaded,
    Negotiated,
    OversizedPlan,
    OversizedResult,
    Settled,
    StepError,
    WorkerHello,
    WorkerReady,
)

M = TypeVar("M", bound=Struct)
NUM_SLOTS = 4


class WorkerHost:
    """A worker group of real processes. Use as an async context manager."""

    def __init__(self, run_directory: Path, num_ranks: int, slot_bytes: int = 1 << 20, **options: Any) -> None:
        self._run_directory = run_directory
        self._num_ranks = num_ranks
        self._slot_bytes = slot_bytes
        self._options = options
        self.generation = 1
        self.messages: list[tuple[bytes, FromWorker, list[bytes]]] = []
        self.controls: list[FromChild] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._death_pipes: list[tuple[int, int]] = []
        self._links: list[ControlLink[FromChild]] = []
        self._something = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._context: zmq.Context[Any] = zmq.Context()
        self.address = ipc_address(str(self._run_directory), "w")
        self._channel: RouterChannel[FromWorker] = RouterChannel(
            self._context, self.address, FROM_WORKER, self._on_message
        )
        self._channel.open()
        self._make_rings()
        for rank in range(self._num_ranks):
            self._spawn(rank)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for link in self._links:
            link.close()
        for process in self.processes:
            process.kill()
            process.wait()
        for pair in self._death_pipes:
            os.close(pair[1])
        self._channel.close()
        self._context.destroy(linger=0)
        self._close_rings()

    def _make_rings(self) -> None:
        sizes = {"num_slots": NUM_SLOTS, "slot_bytes": self._slot_bytes, "generation": self.generation}
        self._plan_ring = create_ring(num_readers=self._num_ranks, **sizes)
        self._plan_bells = [create_doorbell() for _ in range(self._num_ranks)]
        self._result_rings = [create_ring(num_readers=1, **sizes) for _ in range(self._num_ranks)]
        self._result_bell = create_doorbell()
        self.plans = RingWriter(self._plan_ring, self._plan_bells)
        self.results = [RingReader(ring, 0, self._result_bell) for ring in self._result_rings]

    def _close_rings(self) -> None:
        self.plans.close()
        for result in self.results:
            result.close()
        for fd in (self._plan_ring, *self._plan_bells, *self._result_rings, self._result_bell):
            os.close(fd)

    def _descriptors(self, rank: int) -> list[int]:
        return [self._plan_ring, self._plan_bells[rank], self._result_rings[rank], self._result_bell]

    def _spawn(self, rank: int) -> None:
        link, theirs = create_control_link()
        death = os.pipe()
        environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
        command = [sys.executable, "-m", "trimaran.device_workers.process"]
        process = subprocess.Popen(
            [*command, *child_arguments(theirs.fileno(), death[0])],
            pass_fds=(theirs.fileno(), death[0]),
            env=environment,
            cwd=str(self._run_directory),
        )
        theirs.close()
        os.close(death[0])
        configuration = WorkerConfiguration(
            **{
                "rank": rank,
                "num_ranks": self._num_ranks,
                "generation": self.generation,
                "core_address": self.address,
                "run_directory": str(self._run_directory),
                "cache_directory": str(self._run_directory),
                "num_threads": 1,
                "kv_memory_bytes": 64 << 20,
                "collective_timeout_s": 60.0,
            }
            | self._options
        )
        link.send(Begin(configuration), self._descriptors(rank))
        link.open(self._on_control, lambda: None)
        self.processes.append(process)
        self._death_pipes.append(death)
        self._links.append(link)

    def _on_message(self, peer: bytes, message: FromWorker, frames: list[bytes]) -> None:
        self.messages.append((peer, message, frames))
        self._something.set()

    def _on_control(self, message: FromChild, descriptors: list[int]) -> None:
        self.controls.append(message)
        self._something.set()

    async def expect(
        self, kind: type[M], count: int | None = None, timeout_s: float = 60.0, begin: int = 0
    ) -> list[tuple[bytes, M, list[bytes]]]:
        """Wait for so many messages of a kind (one per rank) among those from `begin` on."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = [entry for entry in self.messages[begin:] if isinstance(entry[1], kind)]
            if len(found) >= (count or self._num_ranks):
                return found  # type: ignore[return-value]
            broken = [message for message in self.controls if isinstance(message, Refused | Fault)]
            assert not broken, broken
            await self._wait(
                deadline, f"no {kind.__name__}; got {[type(entry[1]).__name__ for entry in self.messages]}"
            )

    async def expect_control(self, kind: type[M], timeout_s: float = 60.0) -> M:
        deadline = time.monotonic() + timeout_s
        while True:
            for message in self.controls:
                if isinstance(message, kind):
                    return message
            await self._wait(deadline, f"no {kind.__name__}")

    async def _wait(self, deadline: float, text: str) -> None:
        self._something.clear()
        assert time.monotonic() < deadline, text
        try:
            await asyncio.wait_for(self._something.wait(), deadline - time.monotonic())
        except TimeoutError:
            raise AssertionError(text) from None

    async def start(self, settled: Settled, num_blocks: int | None = None) -> list[WorkerReady]:
        """The whole handshake."""
        hellos = await self.expect(WorkerHello)
        for peer, _, _ in hellos:
            self._channel.send(peer, Negotiated(self.generation, settled))
        loaded = await self.expect(Loaded)
        fits = min(message.kv_budget_bytes // message.kv_bytes_per_block for _, message, _ in loaded)
        for peer, _, _ in loaded:
            self._channel.send(peer, Allocate(self.generation, num_blocks or fits))
        return [message for _, message, _ in await self.expect(WorkerReady)]

    async def go_on(self, begin: int) -> None:
        """The handshake with workers that hold weights and cache already."""
        for peer, hello, _ in await self.expect(WorkerHello, begin=begin):
            assert hello.num_blocks is not None
            self._channel.send(peer, Allocate(self.generation, hello.num_blocks))
        await self.expect(WorkerReady, begin=begin)

    def send_plan(self, plan: StepPlan | TokenMasks) -> None:
        kind = RingKind.PLAN if isinstance(plan, StepPlan) else RingKind.MASKS
        slot = self.plans.slot()
        assert slot is not None, "the ring is full"
        if len(plan.SCHEMA.pack(plan.values())) > self._slot_bytes:
            sequence = self.plans.publish(0, RingKind.OVERSIZED)
            for peer in {peer for peer, _, _ in self.messages}:
                message = OversizedPlan(generation=self.generation, sequence=sequence, kind=kind)
                self._channel.send(peer, message, plan.SCHEMA.pack(plan.values()))
            return
        self.plans.publish(plan.SCHEMA.pack_into(slot, plan.values()), kind)

    async def outcomes_of_step(self, timeout_s: float = 30.0) -> list[StepResult | StepError]:
        """Each rank's next result."""
        return [await self._result(reader, timeout_s) for reader in self.results]

    async def results_of_step(self) -> list[StepResult]:
        outcomes = await self.outcomes_of_step()
        assert all(isinstance(outcome, StepResult) for outcome in outcomes), outcomes
        return outcomes  # type: ignore[return-value]

    async def _result(self, reader: RingReader, timeout_s: float) -> StepResult | StepError:
        deadline = time.monotonic() + timeout_s
        while (message := reader.poll()) is None:
            assert time.monotonic() < deadline, "no result came"
            dead = [process.returncode for process in self.processes if process.poll() is not None]
            assert not dead, f"workers ended with {dead}"
            await asyncio.sleep(0.001)
        kind, payload = message
        result: StepResult | StepError
        if kind == RingKind.FAILED:
            result = STEP_ERROR.decode(bytes(payload))
        elif kind == RingKind.OVERSIZED:
            oversized = [entry for entry in await self.expect(OversizedResult) if entry[1].sequence == reader.sequence]
            result = StepResult.unpack(oversized[-1][2][0])
        else:
            result = StepResult.unpack(payload).copy()
        payload.release()
        reader.release()
        return result

    def attach_new_rings(self) -> None:
        """As the supervisor does after the core died."""
        self._close_rings()
        self.generation += 1
        self._make_rings()
        for rank, link in enumerate(self._links):
            link.send(Attach(self.generation), self._descriptors(rank))

    def stop(self) -> None:
        for link in self._links:
            link.send(Stop())

    async def ended(self, timeout_s: float = 10.0) -> list[int]:
        """Exit codes."""
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in self.processes):
            assert time.monotonic() < deadline, "a worker does not end"
            await asyncio.sleep(0.02)
        return [process.returncode for process in self.processes]
