"""Detect, describe, open, close, and again: what every platform does, with or without tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec.structs import asdict

from ..platforms.contract import Clause, Found, NotSupported, Platform, Refused
from .judgement import clause, demand, told, violated
from .subject import Usable

_SHORTEST_REASON = 8
"""Letters: less explains nothing."""


@clause("detection.usable", computes=False)
def test_it_can_be_used(outcome: Found | Refused) -> None:
    """Nothing can be judged of a platform that was refused, and its refusal must say why."""
    if isinstance(outcome, Found):
        demand(len(outcome.devices) > 0, "it was found, with no device: a platform without devices is refused")
        return
    demand(bool(outcome.reason.strip()), "it was refused without a reason")
    violated(f"it was refused, so nothing can be judged here: {outcome.reason}")


@clause("detection.stateless", computes=False)
def test_detection_is_stateless(platform: Platform, outcome: Found | Refused) -> None:
    looks = [platform.look() for _ in range(2)]
    demand(looks[0] == looks[1], f"two looks at one machine differ: {looks[0]}, then {looks[1]}")
    for which in ("second", "third"):
        again = platform.detect()
        demand(again == outcome, f"the {which} detection says {_said(again)}, the first said {_said(outcome)}")


def _said(outcome: Found | Refused) -> str:
    if isinstance(outcome, Refused):
        return f"refused ({outcome.reason})"
    return "found " + ", ".join(map(str, outcome.devices))


@clause("detection.devices", computes=False)
def test_devices_are_told_apart(outcome: Found | Refused) -> None:
    if isinstance(outcome, Refused):
        return
    indices = [device.index for device in outcome.devices]
    demand(len(set(indices)) == len(indices), f"two devices have one index: {indices}")
    demand(all(device.name.strip() for device in outcome.devices), "a device has no name")


@clause("declines.reasons", computes=False)
def test_declines_say_why(platform: Platform) -> None:
    known = set(Clause)
    for name, reason in platform.declines.items():
        demand(name in known, f"it declines {name!r}, and there is no such clause: {', '.join(sorted(known))}")
        is_reason = isinstance(reason, str) and len(reason.strip()) >= _SHORTEST_REASON
        demand(is_reason, f"{name} is declined without a reason that says anything: {reason!r}")
    declines_computing = Clause.COMPUTE in platform.declines
    demand(
        declines_computing == (not platform.computes),
        f"computes is {platform.computes}, and compute is {'' if declines_computing else 'not '}declined",
    )


@clause("profile.stable", computes=False)
def test_profiles(platform: Platform, outcome: Found | Refused) -> None:
    assert isinstance(outcome, Found)
    for device in outcome.devices:
        profile, again = platform.profile(device.index), platform.profile(device.index)
        changed = [name for name, value in asdict(profile).items() if asdict(again)[name] != value]
        demand(not changed, f"two profiles of device {device.index} differ in {', '.join(changed)}")
        named = (profile.platform, profile.index)
        demand(named == (platform.name, device.index), f"the profile of device {device.index} is of {named}")
        demand(bool(profile.name and profile.vendor), f"device {device.index} has no name or no vendor")
        demand((profile.memory_bytes or 0) > 0, f"device {device.index} has {profile.memory_bytes} bytes of memory")
        demand(bool(profile.capability.architecture), f"device {device.index} has no architecture")


@clause("life_cycle.busy", computes=False)
def test_a_free_device_is_not_busy(platform: Platform, outcome: Found | Refused) -> None:
    assert isinstance(outcome, Found)
    for device in outcome.devices:
        said = platform.busy(device.index)
        demand(said is None or bool(said.strip()), f"device {device.index} is busy and does not say with what")


@clause("life_cycle.twice", computes=False)
def test_opened_and_closed_twice(platform: Platform, outcome: Found | Refused, cache_dir: Path) -> None:
    assert isinstance(outcome, Found)
    usable, held = Usable(platform=platform, found=outcome), []
    for which in ("first", "second"):
        backend = usable.open(cache_dir)
        facts = backend.memory_facts()
        is_plausible = 0 < facts.free_bytes <= facts.total_bytes
        demand(is_plausible, f"{which} opening: {facts.free_bytes} bytes are free of {facts.total_bytes}")
        demand(backend.profile == platform.profile(usable.index), f"{which} opening: its profile is of another device")
        demand(backend.num_threads >= 1, f"{which} opening: it has {backend.num_threads} threads")
        backend.synchronize()
        held.append(facts.by_kind)
        try:
            backend.close()
        except Exception as error:
            violated(f"{which} closing raised {told(error)}")
    more = [kind for kind, num_bytes in held[1].items() if num_bytes > held[0].get(kind, 0)]
    demand(not more, f"the first opening held {held[0]} at its begin, the second one {held[1]}: closing kept some")
    demand(platform.detect() == outcome, "once a device was opened and closed, detection finds something else")


@clause("life_cycle.compute", computes=False)
def test_what_computes_nothing_says_so(platform: Platform, outcome: Found | Refused, cache_dir: Path) -> None:
    """Tensors are refused with NotSupported, not with whatever happens."""
    if platform.computes:
        return
    assert isinstance(outcome, Found)
    backend = Usable(platform=platform, found=outcome).open(cache_dir)
    asked: dict[str, Callable[[], object]] = {
        "torch_device": lambda: backend.torch_device,
        "capture_graph": lambda: backend.capture_graph(_idle),
    }
    for what, ask in asked.items():
        try:
            ask()
        except NotSupported:
            continue
        except Exception as error:
            violated(f"{what} raised {told(error)}; the contract says NotSupported")
        violated(f"{what} gave something, and compute is declined")
    backend.close()


def _idle() -> None:
    return None
