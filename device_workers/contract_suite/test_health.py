"""What a live device says of itself: within what a device can be, from any thread, read anew."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch

from ...ipc.facts import DeviceHealth
from ..platforms.contract import Clause
from .judgement import clause, demand, told, violated
from .subject import Subject

_BETWEEN_S = 0.2
_MOST_MHZ = 20_000
_MOST_W = 10_000
_DEGREES = (-40, 150)


def _read(subject: Subject) -> DeviceHealth:
    try:
        return subject.backend.health()
    except Exception as error:
        violated(f"reading it raised {told(error)}: what cannot be read is None")


@clause("health.plausible", Clause.HEALTH)
def test_what_it_says_can_be(subject: Subject) -> None:
    _read(subject)
    time.sleep(_BETWEEN_S)  # what is counted over time is known from the second reading on
    health = _read(subject)
    demand(health != DeviceHealth(), f"it says nothing; decline {Clause.HEALTH}")
    for name, clock in health.clocks.items():
        demand(0 <= clock <= _MOST_MHZ, f"the clock {name} is {clock} MHz")
    if health.power is not None:
        demand(0 <= health.power <= _MOST_W, f"it draws {health.power} W")
    if health.temperature is not None:
        demand(_DEGREES[0] <= health.temperature <= _DEGREES[1], f"it is {health.temperature} degrees warm")
    for name, share in (("compute", health.compute_utilization), ("memory", health.memory_utilization)):
        demand(share is None or 0 <= share <= 1, f"its {name} utilization is {share}: shares are 0 to 1")
    memory = health.memory
    if memory is not None:
        demand(0 <= memory.free_bytes <= memory.total_bytes, f"{memory.free_bytes} of {memory.total_bytes} are free")


@clause("health.any_thread", Clause.HEALTH)
def test_it_is_read_beside_the_work(subject: Subject) -> None:
    """Steps own the device's thread; health is read on another one while they run."""
    x = subject.put(torch.zeros(4, 4))
    with ThreadPoolExecutor(1) as readers:
        for number in range(4):
            reading = readers.submit(_read, subject)
            x.add_(1)
            demand(isinstance(reading.result(30), DeviceHealth), "another thread got no health")
            is_right = bool((subject.read(x) == number + 1).all())
            demand(is_right, "reading health on another thread disturbed the work of this one")
