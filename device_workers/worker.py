"""The worker's control loop: the core's socket, the supervisor's link, heartbeats. It never touches the device."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import zmq
from msgspec import Struct

from ..ipc.actor import Actor
from ..ipc.channel import DealerChannel
from ..ipc.conditions import Refusal
from ..ipc.configuration import WorkerConfiguration
from ..ipc.control import Attach, Drain, Fault, PhaseReport, Refused, Stop, ToChild
from ..ipc.facts import DeviceHealth, Phase
from ..ipc.process import ControlLink
from ..ipc.worker_messages import TO_WORKER, Allocate, Heartbeat, Negotiated, OversizedPlan, ToWorker
from .execution.contract import StepEngine
from .execution.progress import ProgressWatch
from .platforms.host import resident_bytes
from .step_thread import NewRings, Outlets, PlanBytes, StepThread
from .watcher import DeviceWatch

HEARTBEAT_S = 0.5
_STOP_S = 2.0
EXIT_DONE, EXIT_FAULT, EXIT_REFUSED = 0, 1, 3

log = logging.getLogger("trimaran.worker")


class Worker(Actor):
    """One device worker. `exit_code` says how it ended."""

    def __init__(self, link: ControlLink[ToChild], configuration: WorkerConfiguration, descriptors: list[int]) -> None:
        super().__init__()
        self._link = link
        self._configuration = configuration
        self._descriptors = descriptors
        self._generation = configuration.generation
        self._engine: StepEngine | None = None
        self._health: DeviceHealth | None = None
        self._device_watch: DeviceWatch | None = None
        self._context: zmq.Context[Any] = zmq.Context(1)
        self.exit_code = EXIT_DONE

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._link.open(self._on_control, self._on_orphaned)
        self._channel: DealerChannel[ToWorker] = DealerChannel(
            self._context,
            self._configuration.core_address,
            f"worker-{self._configuration.rank}",
            TO_WORKER,
            self._on_core,
        )
        self._channel.open()
        self._steps = StepThread(self._configuration, self._descriptors, self._outlets())
        self._thread = threading.Thread(target=self._steps.run, name="steps", daemon=True)
        self._thread.start()
        self.start_task(self._beat(), "heartbeat")

    async def close(self) -> None:
        if self._device_watch is not None:
            self._device_watch.stop()
        self._steps.stop()
        await asyncio.to_thread(self._thread.join, _STOP_S)
        await asyncio.sleep(0)
        self._channel.close()
        self._link.close()

    # -- from others

    def _on_control(self, message: ToChild, descriptors: list[int]) -> None:
        match message:
            case Attach():
                self._steps.deliver(NewRings(message.generation, descriptors))
            case Stop():
                self.stop()
            case Drain():
                pass  # the core decides when nothing runs any more
            case _:
                log.warning("a worker has no use for %s", type(message).__name__)

    def _on_orphaned(self) -> None:
        os._exit(EXIT_FAULT)

    def _on_core(self, message: ToWorker, frames: list[bytes]) -> None:
        match message:
            case Negotiated() | Allocate():
                self._steps.deliver(message)
            case OversizedPlan():
                self._steps.deliver(PlanBytes(message, frames[0]))

    # -- from the step thread

    def _outlets(self) -> Outlets:
        return Outlets(
            to_core=self._on_loop(self._to_core),
            to_supervisor=self._on_loop(self._to_supervisor),
            engine_known=self._on_loop(self._know_engine),
            generation_changed=self._on_loop(self._change_generation),
            ended=self._on_loop(self._on_ended),
            warn=self._on_loop(log.warning),
        )

    def _on_loop(self, function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            self._loop.call_soon_threadsafe(function, *arguments)

        return call

    def _to_core(self, message: Struct, frame: bytes | bytearray | None) -> None:
        self._channel.send(message, *(() if frame is None else (frame,)))

    def _to_supervisor(self, phase: Phase) -> None:
        self._link.send(PhaseReport(phase))

    def _know_engine(self, engine: StepEngine) -> None:
        self._engine = engine
        self._watch = ProgressWatch(engine.progress)
        interval_s = self._configuration.watch_interval_s
        if interval_s > 0:
            self._device_watch = DeviceWatch(engine.health, interval_s, self._on_loop(self._know_health))
            self._device_watch.start()

    def _know_health(self, health: DeviceHealth | None, lines: list[str]) -> None:
        self._health = health
        for line in lines:
            assert self._engine is not None
            log.warning("%s: %s", self._engine.profile.name, line)

    def _change_generation(self, generation: int) -> None:
        self._generation = generation

    def _on_ended(self, error: BaseException | None) -> None:
        if isinstance(error, Refusal):
            self.exit_code = EXIT_REFUSED
            self._link.send(Refused(str(error)))
        elif error is not None:
            self.exit_code = EXIT_FAULT
            log.error("the step thread ended", exc_info=error)
            self._link.send(Fault(f"worker {self._configuration.rank}: {type(error).__name__}: {error}"))
        self.stop()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._engine is not None:
                step, step_age_s, progress_age_s = self._watch.look()
                self._channel.send(
                    Heartbeat(
                        rank=self._configuration.rank,
                        generation=self._generation,
                        step=step,
                        step_age_s=step_age_s,
                        progress_age_s=progress_age_s,
                        resident_bytes=resident_bytes(),
                        compiled_after_ready=self._engine.progress.compiled_after_ready,
                        health=self._health,
                    )
                )
