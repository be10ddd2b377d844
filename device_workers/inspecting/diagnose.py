"""Measures the device: what its documents promise, and what they do not say. Writes nothing but a file's text.

Times are wall times around a fence, the best of several tries: what else runs on the machine makes a try longer, never
shorter.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...ipc.conditions import Refusal
from ...ipc.control import PhaseReport
from ...ipc.facts import DeviceProfile, Phase, Provenance
from ...ipc.inspection import Measured, TestSkipped
from ...kernels.implementation import Services
from ...kernels.registry import Registry
from ..boot import detect_platform, make_registry, settle_device
from ..inspection import Look
from ..platforms.contract import Backend
from ..profiles.writing import capability_text
from .kernel_trials import open_device

if TYPE_CHECKING:
    from ..profiles.capability_file import Value

TOOL = "trimaran diagnose"


class Skipped(Exception):
    """The test makes no sense, or cannot run, on this device; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a test works with."""

    backend: Backend
    profile: DeviceProfile
    services: Services
    registry: Registry

    def seconds(self, run: Callable[[], object], *, tries: int = 5, each: int = 1) -> float:
        """Of one `run`, fences included once per try of `each` runs."""
        best = float("inf")
        run()
        for _ in range(tries):
            self.backend.synchronize()
            began = time.perf_counter()
            for _ in range(each):
                run()
            self.backend.synchronize()
            best = min(best, time.perf_counter() - began)
        return best / each


Found = Iterator[tuple[str, "Value", str]]
"""Key of a capability file, value, unit."""
Test = Callable[[Bench], Found]


def diagnose(look: Look) -> str:
    """All tests, or those asked for; the text of a capability file with what they measured."""
    tests = _asked(look)
    detected = detect_platform(look.worker, look.say)
    if not detected.platform.computes:
        raise Refusal(f"the {detected.platform.name} platform computes nothing to measure; take another --platform")
    device = settle_device(look.worker, detected, look.say)
    began_s = time.monotonic()
    _report(look, "opening the device", began_s, 0.0)
    backend, services = open_device(look, detected, device.profile)
    bench = Bench(
        backend=backend, profile=device.profile, services=services, registry=make_registry(look.worker, look.say)
    )
    measured: dict[str, Value] = {}
    for number, (name, test) in enumerate(tests.items()):
        _report(look, name, began_s, number / len(tests))
        measured |= _run(look, name, test, bench)
    _report(look, "done", began_s, 1.0)
    backend.close()
    if not measured:
        raise Refusal("nothing could be measured; see the reasons above, and take other --test names")
    return capability_text(device.profile, measured, tool=TOOL, date=datetime.date.today())


def _asked(look: Look) -> Mapping[str, Test]:
    from .measurements import TESTS

    asked = look.configuration.tests
    unknown = [name for name in asked if name not in TESTS]
    if unknown:
        raise Refusal(f"--test {unknown[0]}: there is no such test; take {', '.join(TESTS)}")
    return {
        name: test for name, test in TESTS.items() if not look.configuration.tests or name in look.configuration.tests
    }


def _run(look: Look, name: str, test: Test, bench: Bench) -> dict[str, Value]:
    measured: dict[str, Value] = {}
    try:
        for key, value, unit in test(bench):
            measured[key] = value
            look.tell(_told(name, key, value, unit, bench.profile))
    except Skipped as skipped:
        look.tell(TestSkipped(test=name, reason=str(skipped)))
    except Exception as error:  # a driver may raise anything; the other tests still tell
        look.tell(TestSkipped(test=name, reason=f"failed: {type(error).__name__}: {error}"))
    return measured


def _told(name: str, key: str, value: Value, unit: str, profile: DeviceProfile) -> Measured:
    before, provenance = before_of(profile, key)
    return Measured(test=name, field=key, value=value, unit=unit, before=before, provenance=provenance)


def before_of(profile: DeviceProfile, key: str) -> tuple[float | int | bool | str | None, Provenance | None]:
    """What was known of a file's key: "bandwidth" of the profile, or "rates.bfloat16" of its capability."""
    name, _, entry = key.partition(".")
    owner, path = (profile, key) if hasattr(profile, name) else (profile.capability, f"capability.{key}")
    value = getattr(owner, name)
    if name == "features":
        known = any(str(feature) == entry for feature in value)
        return known, profile.provenance.get(path)
    if isinstance(value, dict):
        value = value.get(entry)
    return (None if isinstance(value, dict) else value), profile.provenance.get(path)


def _report(look: Look, name: str, began_s: float, fraction: float) -> None:
    look.tell(PhaseReport(Phase(name=name, process="diagnose", began_s=began_s, fraction=fraction)))
