"""Which platform this machine has: each one tried, with its reason, and the option that forces one. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from ...ipc.conditions import Refusal
from ...ipc.facts import Decision
from .contract import Found, Platform
from .cpu import CpuPlatform
from .null import NullPlatform

PLATFORMS: tuple[Platform, ...] = (CpuPlatform(), NullPlatform())
"""In order of preference."""


class Detection(Struct, frozen=True):
    """The platform and how it was chosen. `refused` maps the names of the others to their reasons."""

    platform: Platform
    devices: tuple[str, ...]
    refused: dict[str, str]
    decision: Decision


def detect(forced: str | None = None, platforms: Sequence[Platform] = PLATFORMS) -> Detection:
    """The first platform that can be used, or the forced one. Raises Refusal with every reason."""
    names = [platform.name for platform in platforms]
    if forced is not None and forced not in names:
        raise Refusal(f"there is no platform {forced}; --platform takes {', '.join(names)}")
    refused: dict[str, str] = {}
    for platform in platforms:
        reason = _passed_over(platform, forced)
        if reason is None:
            found = platform.detect()
            if isinstance(found, Found):
                return Detection(platform, found.devices, refused, _decision(platform, forced, refused))
            reason = found.reason
        refused[platform.name] = reason
    story = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    raise Refusal(f"no platform can be used ({story}); repair one of them, or try --platform null")


def _passed_over(platform: Platform, forced: str | None) -> str | None:
    if forced is not None:
        return None if platform.name == forced else f"--platform {forced} was asked for"
    return None if platform.computes else "computes nothing, so it is used only when asked for by --platform"


def _decision(platform: Platform, forced: str | None, refused: dict[str, str]) -> Decision:
    story = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    reason = "asked for by --platform" if forced else f"first that can be used{f' ({story})' if story else ''}"
    return Decision(name="platform", value=platform.name, reason=reason, overridden=forced is not None)
