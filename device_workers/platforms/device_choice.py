"""Which of a platform's devices this worker uses: the one asked for, else its rank's; a busy one is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from ...ipc.conditions import Refusal
from .contract import FoundDevice, Platform

BUSY_WAIT_S = 20.0
_LOOK_AGAIN_S = 1.0


class DeviceWish(Struct, frozen=True, kw_only=True):
    """`device` as the user wrote it for this rank: an index or an identifier. None: by rank."""

    rank: int
    num_ranks: int
    device: str | None = None


def choose_device(
    platform: Platform,
    devices: Sequence[FoundDevice],
    wish: DeviceWish,
    say: Callable[[str], None],
    *,
    wait_s: float = BUSY_WAIT_S,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> FoundDevice:
    """A device that takes work now. Raises Refusal when the one asked for is not there or all stay busy.

    A lone worker whose device stays busy takes the next one, unless the user named it. Several ranks never move: each
    would have to know where the others went.
    """
    first = _first(platform, devices, wish)
    if len(devices) > 1 and wish.device is None and wish.num_ranks == 1:
        turned = [*devices[devices.index(first) :], *devices[: devices.index(first)]]
    else:
        turned = [first]
    reasons = []
    for device in turned:
        reason = _wait(platform, device, say, wait_s if device is turned[-1] else 0.0, sleep, clock)
        if reason is None:
            return device
        reasons.append(f"{device}: {reason}")
        if device is not turned[-1]:
            say(f"{device} is busy ({reason}): the next one is tried")
    raise Refusal(f"no device takes work ({'; '.join(reasons)}); end what uses it, or name another by --device")


def _first(platform: Platform, devices: Sequence[FoundDevice], wish: DeviceWish) -> FoundDevice:
    if wish.device is None:
        return devices[wish.rank % len(devices)]
    named = [device for device in devices if device.uuid is not None and _same(device.uuid, wish.device)]
    if named:
        return named[0]
    if platform.visibility and len(devices) == 1:  # the supervisor hid the others; a slice has an identifier of its own
        return devices[0]
    index = next((device for device in devices if wish.device == str(device.index)), None)
    if index is None:
        there = " or ".join(map(str, devices))
        raise Refusal(f"--device {wish.device} is not there; name {there}, or leave the option out")
    return index


def _same(uuid: str, asked: str) -> bool:
    """Identifiers may be shortened, as the vendors' variables allow, and written without their kind."""
    bare, wanted = uuid.lower(), asked.lower()
    return len(wanted) >= 8 and (bare.startswith(wanted) or bare.partition("-")[2].startswith(wanted))


def _wait(
    platform: Platform,
    device: FoundDevice,
    say: Callable[[str], None],
    wait_s: float,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> str | None:
    """None once the device takes work; its driver's words when it does not in time."""
    deadline, said = clock() + wait_s, False
    while (reason := platform.busy(device.index)) is not None:
        if clock() >= deadline:
            return reason
        if not said:
            said = True
            say(f"{device} is busy ({reason}): waiting up to {wait_s:.0f} s")
        sleep(_LOOK_AGAIN_S)
    return None
