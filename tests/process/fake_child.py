"""A child that speaks the control link and nothing else: `fake_child.py KIND`, KIND being frontend, core or worker.

It logs what it hears into $FAKE_FOLDER, and does there what behaviour.json says for its kind.
"""

import asyncio
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from trimaran.ipc.configuration import FrontendConfiguration
from trimaran.ipc.control import (
    Attach,
    Begin,
    Drain,
    Drained,
    Fault,
    GroupFault,
    Listening,
    PhaseReport,
    Ready,
    Refused,
    Stop,
)
from trimaran.ipc.facts import Phase
from trimaran.ipc.process import adopt
from trimaran.ipc.ring import RingReader, RingWriter

FOLDER = Path(os.environ["FAKE_FOLDER"])


class FakeChild:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.link, begin, descriptors = adopt()
        configuration = begin.configuration
        self.index = getattr(configuration, "index", getattr(configuration, "rank", 0))
        self.log = FOLDER / f"{kind}-{self.index}-{os.getpid()}.log"
        self.behaviour: dict[str, Any] = json.loads((FOLDER / "behaviour.json").read_text()).get(kind, {})
        self.done = asyncio.Event()
        self.heard(begin, descriptors)
        self.environment = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "TRIMARAN_API_KEY")}
        self.note("environment", self.environment)

    def note(self, what: str, content: object) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps({"what": what, "content": content}) + "\n")

    def heard(self, message: Any, descriptors: list[int]) -> None:
        self.note(type(message).__name__, to_builtins(message))
        match message:
            case Begin():
                self.begin(message, descriptors)
            case Attach():
                self.rings(message.generation, descriptors)
            case Drain() if not self.behaviour.get("never_drained"):
                self.link.send(Drained())
            case Stop() if not self.behaviour.get("deaf"):
                self.done.set()
            case _:
                pass

    def begin(self, message: Begin, descriptors: list[int]) -> None:
        if text := self.behaviour.get("refuse"):
            self.link.send(Refused(text))
        if text := self.behaviour.get("fault"):
            print("a line of its own")
            self.link.send(Fault(text))
            sys.exit(3)
        if self.behaviour.get("crash"):
            raise RuntimeError("out of luck")
        configuration = message.configuration
        if isinstance(configuration, FrontendConfiguration):
            assert not descriptors
            self.listener = socket.socket()
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self.listener.bind((configuration.host, configuration.port))
            self.listener.listen()
            self.link.send(Listening(configuration.port))
        else:
            self.rings(configuration.generation, descriptors)

    def rings(self, generation: int, descriptors: list[int]) -> None:
        if self.kind == "core":
            num_ranks = (len(descriptors) - 2) // 2
            plans = RingWriter(descriptors[0], descriptors[1 : 1 + num_ranks])
            results = [RingReader(fd, 0, descriptors[-1]) for fd in descriptors[1 + num_ranks : -1]]
            assert {ring.generation for ring in [plans, *results]} == {generation}
            if not self.behaviour.get("never_ready"):
                self.link.send(Ready(generation, ("a decision",)))
            if self.behaviour.get("stall") and generation == 1:
                self.link.send(GroupFault(generation, "no progress for 9 s"))
        else:
            plans_in = RingReader(descriptors[0], self.index, descriptors[1])
            results_out = RingWriter(descriptors[2], [descriptors[3]])
            assert {plans_in.generation, results_out.generation} == {generation}
            self.link.send(PhaseReport(Phase(name="load", process="worker", began_s=time.monotonic())))

    async def run(self) -> None:
        self.link.open(self.heard, self.done.set)
        await self.done.wait()
        self.note("end", self.kind)


if __name__ == "__main__":
    child = FakeChild(sys.argv.pop(1))
    asyncio.run(child.run())
