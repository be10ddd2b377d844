"""The watcher: each change of a device is told once, and its end."""

from typing import Any

import pytest

from trimaran.device_workers.watcher import Watcher
from trimaran.ipc.facts import DeviceHealth, MemoryFacts

GIB = 1 << 30


def told(*readings: dict[str, Any]) -> list[list[str]]:
    """What is said of each reading, by one watcher."""
    watcher = Watcher()
    return [watcher.changes(DeviceHealth(**reading)) for reading in readings]


def memory(free: int, ours: int, **holders: int) -> dict[str, Any]:
    facts = MemoryFacts(total_bytes=80 * GIB, free_bytes=free * GIB, ours_bytes=ours * GIB, holders=holders)
    return {"memory": facts}


def clock(value: float, busy: float | None = 0.9) -> dict[str, Any]:
    return {"clocks": {"sm": value}, "compute_utilization": busy}


def counts(said: list[list[str]]) -> list[int]:
    return [len(lines) for lines in said]


def test_nothing_is_said_of_a_steady_device() -> None:
    steady = {**clock(1900), "temperature": 60.0, "on_battery": False, **memory(40, 38)}
    assert counts(told(steady, steady, {**steady, **clock(1800), "temperature": 70.0})) == [0, 0, 0]
    assert counts(told({}, {})) == [0, 0]


def test_a_clock_that_falls_and_comes_back() -> None:
    said = told(clock(1980), clock(1200), clock(1100), clock(1900), clock(1200))
    assert counts(said) == [0, 1, 0, 1, 1]
    assert said[1] == ["the sm clock fell to 1200 MHz from 1980: steps get slower"]
    assert said[3] == ["the sm clock is back at 1900 MHz"]


def test_an_idle_device_may_clock_down() -> None:
    assert counts(told(clock(1980), clock(345, busy=0.0), clock(345, busy=0.1), clock(1980))) == [0, 0, 0, 0]
    assert counts(told(clock(1980, None), clock(345, None))) == [0, 1], "of one whose load is unknown it is said"


def test_each_clock_is_one_of_its_own() -> None:
    both = [{"clocks": {"sm": 1900.0, "memory": 2600.0}}, {"clocks": {"sm": 1000.0, "memory": 2600.0}}]
    assert told(*both)[1] == ["the sm clock fell to 1000 MHz from 1900: steps get slower"]


def test_heat_on_the_way_up_and_on_the_way_down() -> None:
    said = told(*({"temperature": value} for value in (70.0, 91.0, 93.0, 88.0, 84.0, 70.0)), {})
    assert counts(said) == [0, 1, 0, 0, 1, 0, 0]
    assert said[1] == ["the device is at 91 degrees C: look at its cooling"]
    assert said[4] == ["the device has cooled to 84 degrees C"]


def test_throttling_its_reasons_and_its_end() -> None:
    said = told({}, *({"throttle_reasons": reasons} for reasons in (("heat",), ("heat",), ("heat", "power"), (), ())))
    assert counts(said) == [0, 1, 0, 1, 1, 0]
    assert said[3] == ["the device is throttled: heat, power"]
    assert said[4] == ["the device is no longer throttled"]


def test_errors_as_they_come() -> None:
    said = told(*({"errors": errors} for errors in ((), ("2 lost pages",), ("2 lost pages",), ("3 lost pages",))))
    assert said == [[], ["the device reports: 2 lost pages"], [], ["the device reports: 3 lost pages"]]


@pytest.mark.parametrize(("first", "num_first"), [(False, 0), (True, 1)])
def test_battery_and_mains(first: bool, num_first: int) -> None:
    """One that starts on battery is told so; mains is nothing to say until it was battery."""
    said = told(*({"on_battery": state} for state in (first, None, first, not first, not first, first)))
    assert counts(said) == [num_first, 0, 0, 1, 0, 1]
    words = {True: "the machine runs on battery: steps may get slower", False: "the machine is on mains power again"}
    assert said[3] == [words[not first]] and said[5] == [words[first]]


def test_memory_that_others_take_and_give_back() -> None:
    said = told(memory(40, 38), memory(30, 38, python=10 * GIB), memory(30, 38), memory(41, 38))
    assert counts(said) == [0, 1, 0, 1]
    assert said[1] == ["other programs took 10.0 GiB of device memory, 30.0 GiB are free; python holds 10.0 GiB"]
    assert said[3] == ["other programs gave back 11.0 GiB of device memory, 41.0 GiB are free"]


def test_memory_that_is_ours_is_not_theirs() -> None:
    assert counts(told(memory(60, 10), memory(20, 50), {}, memory(60, 10))) == [0, 0, 0, 0]


def test_what_creeps_is_noticed_when_it_has_become_much() -> None:
    creeping = [
        {"memory": MemoryFacts(total_bytes=80 * GIB, free_bytes=40 * GIB - step * GIB // 4, ours_bytes=0)}
        for step in range(9)
    ]
    assert counts(told(*creeping)) == [0, 0, 0, 0, 1, 0, 0, 0, 1]
