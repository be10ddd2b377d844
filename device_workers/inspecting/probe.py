"""Every platform in the order of detection, and the whole profile of each device of those that can be used."""

from __future__ import annotations

from ...ipc.conditions import Refusal
from ...ipc.facts import DeviceProfile
from ...ipc.inspection import PlatformSeen
from ..inspection import Look
from ..platforms.contract import Found, Platform
from ..platforms.detection import Wish, check_name, detect, platforms
from ..platforms.host import Host
from ..profiles.settling import settle_profile


def probe(look: Look) -> None:
    """Tells of each platform. One that fails in its own detection is refused with what it said."""
    worker = look.worker
    candidates = platforms(Host(variables=worker.visibility))
    check_name(worker.platform, candidates)
    chosen = _chosen(look, candidates)
    for platform in candidates:
        if platform.computes or platform.name == worker.platform:
            look.tell(_seen(look, platform, is_chosen=platform.name == chosen))


def _chosen(look: Look, candidates: tuple[Platform, ...]) -> str | None:
    try:
        return detect(wish=Wish(platform=look.worker.platform), candidates=candidates).platform.name
    except Refusal:
        return None


def _seen(look: Look, platform: Platform, *, is_chosen: bool) -> PlatformSeen:
    found = platform.detect()
    if not isinstance(found, Found):
        return PlatformSeen(name=platform.name, refused=found.reason)
    notes = found.notes if found.basic_mode is None else (*found.notes, f"basic mode: {found.basic_mode}")
    devices: list[DeviceProfile] = []
    for device in found.devices:
        detected = platform.profile(device.index)
        override = look.worker.device_config if is_chosen else None
        profile, decision = settle_profile(detected, override, look.worker.allow_mismatch)
        devices.append(profile)
        notes = (*notes, f"device {device.index}: {decision.reason}")
    return PlatformSeen(
        name=platform.name, refused=None, devices=tuple(devices), is_chosen=is_chosen, notes=tuple(notes)
    )
