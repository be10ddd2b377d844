"""Which platform this machine has: each one tried, with its reason, and the option that forces one.

Torch-free until a platform's own look has found hardware that could be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from ...ipc.conditions import Refusal
from ...ipc.facts import Decision
from .ascend import AscendPlatform
from .contract import Found, FoundDevice, Platform, Refused
from .cpu import CpuPlatform
from .cuda import CudaPlatform
from .host import Host
from .metal import MetalPlatform
from .null import NullPlatform
from .plugins import plugin_platforms
from .rocm import RocmPlatform
from .xpu import XpuPlatform

_ACCELERATORS: tuple[Callable[[Host], Platform], ...] = (
    CudaPlatform,
    RocmPlatform,
    XpuPlatform,
    AscendPlatform,
    MetalPlatform,
)
_OTHERS: tuple[Callable[[Host], Platform], ...] = (CpuPlatform, NullPlatform)
_MOST_LINES = 8
"""Of a refusal's list of platforms, so that it stands in the last ten lines that a user sees."""

FORCE = "--platform NAME (or TRIMARAN_PLATFORM) forces one"


def platforms(host: Host | None = None) -> tuple[Platform, ...]:
    """In order of preference: our accelerators, those of other packages, the processor, and the null platform."""
    seen = Host() if host is None else host
    accelerators = tuple(make(seen) for make in _ACCELERATORS)
    others = tuple(make(seen) for make in _OTHERS)
    plugins = plugin_platforms(platform.name for platform in (*accelerators, *others))
    return (*accelerators, *plugins, *others)


class Tried(Struct, frozen=True, kw_only=True):
    """One platform, in order: used, present (and not used), refused or passed over, and why."""

    name: str
    verdict: str
    reason: str
    hardware: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.verdict}: {self.reason}"


class Detection(Struct, frozen=True, kw_only=True):
    """The platform and how it was chosen. `warning` is for choices that nobody wants to overlook."""

    platform: Platform
    devices: tuple[FoundDevice, ...]
    tried: tuple[Tried, ...]
    decision: Decision
    basic_mode: str | None = None
    notes: tuple[str, ...] = ()
    warning: str | None = None

    @property
    def refused(self) -> dict[str, str]:
        """Why not each of the others, by name."""
        return {entry.name: entry.reason for entry in self.tried if entry.name != self.platform.name}

    def lines(self) -> list[str]:
        """For the log: one per platform, one per device, and what else is worth a line."""
        basic = [] if self.basic_mode is None else [f"basic mode: {self.basic_mode}"]
        return [
            *(f"platform {entry}" for entry in self.tried),
            f"platform {self.platform.name} is used: {_why(self.decision.overridden)}; {FORCE}",
            *map(str, self.devices),
            *self.notes,
            *basic,
        ]


class Wish(Struct, frozen=True, kw_only=True):
    """What the user and the supervisor ask of detection. `by_device`: devices were named, small ones among them."""

    platform: str | None = None
    by_device: bool = False
    num_ranks: int = 1


def detect(
    forced: str | None = None, candidates: Sequence[Platform] | None = None, wish: Wish | None = None
) -> Detection:
    """The first platform that can be used, or the forced one. Raises Refusal with every reason, in order."""
    asked = Wish(platform=forced) if wish is None else wish
    offered = platforms() if candidates is None else candidates
    check_name(asked.platform, offered)
    tried: list[Tried] = []
    hardware: dict[str, str] = {}
    chosen: tuple[Platform, Found] | None = None
    for platform in offered:
        passed_over = _passed_over(platform, asked, chosen)
        if passed_over is not None:
            tried.append(passed_over)
            continue
        outcome = _allowed(platform, platform.detect(), asked)
        if isinstance(outcome, Found):
            chosen = (platform, outcome)
            tried.append(Tried(name=platform.name, verdict="used", reason=_names(outcome)))
            continue
        if outcome.hardware is not None:
            hardware[platform.name] = outcome.reason
        tried.append(Tried(name=platform.name, verdict="refused", reason=outcome.reason, hardware=outcome.hardware))
    if chosen is None:
        raise Refusal(refusal_text(_others_looked_at(offered, tried), asked.platform))
    return _detection(*chosen, asked, tuple(tried), hardware)


def check_name(forced: str | None, offered: Sequence[Platform]) -> None:
    """Raises Refusal for a platform that nobody offers."""
    names = [platform.name for platform in offered]
    if forced is not None and forced not in names:
        raise Refusal(f"there is no platform {forced}; --platform takes {', '.join(names)}")


def _passed_over(platform: Platform, asked: Wish, chosen: tuple[Platform, Found] | None) -> Tried | None:
    """Why this one is not tried, if it is not."""
    if asked.platform is not None:
        if platform.name == asked.platform:
            return None
        return Tried(name=platform.name, verdict="not tried", reason=f"--platform {asked.platform} was asked for")
    if not platform.computes:
        reason = "computes nothing, so it is used only when asked for by --platform"
        return Tried(name=platform.name, verdict="not tried", reason=reason)
    if chosen is None:
        return None
    look = platform.look()
    if look.hardware is None:
        return Tried(name=platform.name, verdict="absent", reason=look.obstacle or "nothing is there")
    reason = f"{look.hardware}; {chosen[0].name} comes first, --platform {platform.name} takes it"
    return Tried(name=platform.name, verdict="present, not used", reason=reason)


def _allowed(platform: Platform, outcome: Found | Refused, asked: Wish) -> Found | Refused:
    """Small integrated GPUs count only when the user asked: for their platform, or for devices by name."""
    if isinstance(outcome, Refused) or asked.platform == platform.name or asked.by_device:
        return outcome
    real = tuple(device for device in outcome.devices if not device.is_integrated)
    if not real:
        names = ", ".join(str(device) for device in outcome.devices)
        reason = f"only an integrated GPU: {names}; --platform {platform.name} takes it"
        return Refused(reason=reason, hardware=names)
    left = tuple(f"integrated, not used: {device}" for device in outcome.devices if device.is_integrated)
    return Found(devices=real, basic_mode=outcome.basic_mode, notes=(*outcome.notes, *left))


def _names(found: Found) -> str:
    return ", ".join(dict.fromkeys(device.name for device in found.devices))


def _detection(
    platform: Platform, found: Found, asked: Wish, tried: tuple[Tried, ...], hardware: dict[str, str]
) -> Detection:
    warning = None
    if platform.name == "cpu" and hardware and asked.platform is None:
        why = "; ".join(f"{name}: {reason}" for name, reason in hardware.items())
        if asked.num_ranks > 1:
            raise Refusal(f"{refusal_text(tried)}; several ranks fall back to the CPU only when it is asked for")
        warning = f"running on the CPU because {why}"
    return Detection(
        platform=platform,
        devices=found.devices,
        tried=tried,
        decision=_decision(platform, asked, tried),
        basic_mode=found.basic_mode,
        notes=found.notes,
        warning=warning,
    )


def _decision(platform: Platform, asked: Wish, tried: Sequence[Tried]) -> Decision:
    is_forced = asked.platform is not None
    before = [entry for entry in tried if entry.verdict == "refused"]
    story = "; ".join(f"{entry.name}: {entry.reason}" for entry in before)
    reason = _why(is_forced) + (f" ({story})" if story and not is_forced else "")
    return Decision(name="platform", value=platform.name, reason=reason, overridden=is_forced)


def _why(is_forced: bool) -> str:
    return "asked for by --platform" if is_forced else "first that can be used"


def _others_looked_at(offered: Sequence[Platform], tried: Sequence[Tried]) -> list[Tried]:
    """What a forced platform's refusal says of the others: whether their hardware is there."""
    told = []
    for platform, entry in zip(offered, tried, strict=True):
        if entry.verdict != "not tried" or not platform.computes:
            told.append(entry)
            continue
        look = platform.look()
        verdict = "absent" if look.hardware is None else "present, not tried"
        reason = look.obstacle or look.hardware or "nothing is there"
        told.append(Tried(name=platform.name, verdict=verdict, reason=reason))
    return told


def refusal_text(tried: Sequence[Tried], forced: str | None = None) -> str:
    """A line per platform and one with the cure; where there are many, the last of them share a line."""
    lines = [f"  {entry}" for entry in tried]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES - 1 :] = ["  " + "; ".join(str(entry) for entry in tried[_MOST_LINES - 1 :])]
    cure = "Repair one of them, or take another: --platform NAME (or TRIMARAN_PLATFORM) forces one, such as cpu"
    head = "no platform can be used:" if forced is None else f"--platform {forced} cannot be used here:"
    return "\n".join([head, *lines, cure])
