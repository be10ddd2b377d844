"""The doctor: judges the host before serving. Every verdict that is not a pass ends with its cure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import structs

from ...ipc.conditions import Refusal, part_cure
from ...ipc.facts import DeviceProfile, Feature
from ...ipc.inspection import Level, Verdict
from ..inspection import Look
from ..platforms.detection import Detection, Tried
from ..platforms.host import Host
from .host_checks import CHECKS, Examined

if TYPE_CHECKING:
    from .kernel_trials import Tested

_WITH_TRITON = ("cuda", "rocm", "xpu")
"""Platforms whose vendors ship a Triton; on others, plain PyTorch or the vendor's own kernels serve by design."""


def examine(look: Look) -> None:
    """All checks, each told as soon as it is known: the host's first, then the device's, then each kernel's."""
    from ..boot import detect_platform, settle_device

    worker = look.worker
    host = Host(variables=worker.visibility)
    detected: Detection | Refusal
    try:
        detected = detect_platform(worker, look.say)
    except Refusal as refusal:
        detected = refusal
    profile: DeviceProfile | None = None
    device = None
    if isinstance(detected, Detection):
        try:
            profile = settle_device(worker, detected, look.say).profile
        except Refusal as refusal:
            device = _verdict("device", Level.FAIL, str(refusal))
    examined = Examined(
        host=host,
        cache_directory=worker.cache_directory,
        num_ranks=worker.num_ranks,
        needs_triton=profile is not None and profile.platform in _WITH_TRITON,
    )
    for verdict in host_verdicts(examined):
        look.tell(verdict)
    for verdict in platform_verdicts(detected):
        look.tell(verdict)
    if device is not None:
        look.tell(device)
    if isinstance(detected, Detection) and profile is not None:
        look.tell(Verdict(check="device", level=Level.PASS, text=device_text(profile)))
        if detected.platform.computes:
            _examine_kernels(look, detected, profile)


def host_verdicts(examined: Examined) -> Iterator[Verdict]:
    for check in CHECKS.values():
        yield from check(examined)


def platform_verdicts(detected: Detection | Refusal) -> Iterator[Verdict]:
    """One for the platform that serves, and one for each whose hardware is there and cannot be used."""
    if isinstance(detected, Refusal):
        yield _verdict("platform", Level.FAIL, str(detected))
        return
    for tried in detected.tried:
        if tried.verdict == "refused" and tried.hardware is not None:
            yield _refused_hardware(tried, detected)
    name = detected.platform.name
    if detected.basic_mode is not None:
        yield _verdict("platform", Level.WARN, detected.basic_mode, f"{name} in basic mode: ")
    else:
        yield Verdict(check="platform", level=Level.PASS, text=f"{name}: {', '.join(map(str, detected.devices))}")


def _refused_hardware(tried: Tried, detected: Detection) -> Verdict:
    """Hardware that stays unused is a failure: whoever has it wants it used, or says --platform."""
    level = Level.WARN if detected.decision.overridden else Level.FAIL
    verdict = _verdict(f"platform {tried.name}", level, tried.reason, f"{tried.hardware}: ")
    return structs.replace(verdict, cure=f"{verdict.cure}; --platform {detected.platform.name} serves without it")


def _verdict(check: str, level: Level, text: str, prefix: str = "") -> Verdict:
    """Of a refusal or a reason, which end with the cure."""
    found, cure = part_cure(text, "see `trimaran probe` for what was found")
    return Verdict(check=check, level=level, text=prefix + found, cure=cure)


def device_text(profile: DeviceProfile) -> str:
    capability = profile.capability
    facts = [profile.name, capability.architecture]
    if profile.memory_bytes is not None:
        facts.append(f"{profile.memory_bytes / (1 << 30):.1f} GiB")
    if profile.driver is not None:
        facts.append(f"driver {profile.driver}")
    if profile.runtime is not None:
        facts.append(f"runtime {profile.runtime}")
    return ", ".join(facts)


def _examine_kernels(look: Look, detected: Detection, profile: DeviceProfile) -> None:
    """Each kernel compiled, run and compared. The one that serves must agree; a demoted one costs speed only."""
    from .kernel_trials import test_kernels

    for tested in test_kernels(look, detected, profile):
        look.tell(kernel_verdict(tested, profile))


def kernel_verdict(tested: Tested, profile: DeviceProfile) -> Verdict:
    check = f"kernel {tested.kernel}"
    if tested.chosen is None:
        return Verdict(
            check=check,
            level=Level.FAIL,
            text=f"no implementation works: {tested.reasons}",
            cure="take another --platform, and report this with the output of `trimaran kernels check`",
        )
    if tested.demoted:
        return Verdict(
            check=check,
            level=Level.WARN,
            text=f"{tested.chosen} serves; {tested.reasons}",
            cure="update driver and libraries, or forbid what fails by --without-kernel "
            + " --without-kernel ".join(tested.demoted),
        )
    if Feature.CPP_COMPILER not in profile.capability.features and profile.platform == "cpu":
        return Verdict(
            check=check,
            level=Level.WARN,
            text=f"{tested.chosen} agrees with the reference; the C++ one needs a compiler",
            cure="install g++",
        )
    return Verdict(check=check, level=Level.PASS, text=f"{tested.chosen} agrees with the reference")
