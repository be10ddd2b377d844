"""`trimaran kernels`: what there is and what fits here, what fits where, and whether it computes what it should."""

from __future__ import annotations

from ...ipc.conditions import Refusal
from ...ipc.facts import DeviceProfile, Problem
from ...ipc.inspection import ImplementationSeen
from ...kernels.implementation import Implementation, KernelMetadata, Services
from ...kernels.registry import KernelChoices, Registry
from ...kernels.verification import compare
from ..boot import detect_platform, make_registry, settle_device, with_software
from ..inspection import Look
from ..profiles.declared import architecture_profile
from ..profiles.packaged import packaged_names, read_packaged
from .kernel_trials import open_device, sample_problem


def list_kernels(look: Look) -> None:
    """Every implementation in order of preference, with its reason where it does not fit this machine's device."""
    profile = _profile_here(look)
    registry, problem = make_registry(look.worker, look.say), sample_problem(profile)
    choices = _choices(look, registry)
    for kernel in registry.kernels:
        resolution = registry.resolve(kernel, profile, problem, choices)
        for implementation in registry.chain(kernel):
            state, reason = "fits", implementation.misfit(profile, problem) or ""
            if implementation.name == resolution.chosen:
                state = "chosen"
            elif implementation.name in resolution.rejected:
                state, reason = "rejected", resolution.rejected[implementation.name]
            elif reason:
                state = "does not fit"
            look.tell(_seen(implementation, profile.name, state, reason))


def show_matrix(look: Look) -> None:
    """What would serve each kernel on each device that has a capability file, from the declared facts alone."""
    registry = make_registry(look.worker, look.say)
    choices = _choices(look, registry)
    for name in packaged_names():
        profile = with_software(architecture_profile(read_packaged(name)))
        problem = sample_problem(profile)
        for kernel in registry.kernels:
            resolution = registry.resolve(kernel, profile, problem, choices)
            chosen = next(found for found in registry.chain(kernel) if found.name == resolution.chosen)
            reasons = "; ".join(f"{other}: {reason}" for other, reason in resolution.rejected.items())
            look.tell(_seen(chosen, name, "chosen", reasons))


def check_kernels(look: Look) -> None:
    """Each implementation that fits is loaded and compared with the reference. What a server demoted here before stays
    so, and is not run: it may have killed its process.
    """
    detected = detect_platform(look.worker, look.say)
    if not detected.platform.computes:
        raise Refusal(f"the {detected.platform.name} platform runs no kernels to check; take another --platform")
    profile = settle_device(look.worker, detected, look.say).profile
    _, services = open_device(look, detected, profile)
    registry, problem = make_registry(look.worker, look.say), sample_problem(profile)
    for kernel in registry.kernels:
        reference = registry.chain(kernel)[-1]
        for implementation in registry.chain(kernel):
            if look.configuration.tests and not {kernel, implementation.name} & set(look.configuration.tests):
                continue
            misfit = implementation.misfit(profile, problem)
            if misfit is not None:
                look.tell(_seen(implementation, profile.name, "does not fit", misfit))
                continue
            demoted = "; ".join(registry.known_failures(implementation, profile))
            if demoted:
                look.tell(_seen(implementation, profile.name, "demoted", demoted))
                continue
            failure = _failure(implementation, reference, profile, problem, services)
            look.tell(_seen(implementation, profile.name, "fails" if failure else "agrees", failure or ""))


def _failure(
    implementation: Implementation,
    reference: Implementation,
    profile: DeviceProfile,
    problem: Problem,
    services: Services,
) -> str | None:
    try:
        kernel = implementation.load(profile, problem, services)
        oracle = reference.load(profile, problem, services)
        return compare(implementation.kernel, kernel, oracle, problem, services.device)
    except Exception as error:  # vendor code and compilers may raise anything
        return f"{type(error).__name__}: {error}"


def _profile_here(look: Look) -> DeviceProfile:
    worker = look.worker
    return settle_device(worker, detect_platform(worker, look.say), look.say).profile


def _choices(look: Look, registry: Registry) -> KernelChoices:
    choices = KernelChoices(look.worker.kernel_pins, frozenset(look.worker.without_kernels))
    registry.check(choices)
    return choices


def _seen(implementation: Implementation, device: str, state: str, reason: str) -> ImplementationSeen:
    return ImplementationSeen(
        kernel=implementation.kernel,
        implementation=implementation.name,
        device=device,
        state=state,
        reason=reason,
        needs=needs(implementation.metadata),
    )


def needs(metadata: KernelMetadata) -> str:
    """What an implementation asks for, in words."""
    parts = []
    if metadata.platforms:
        parts.append("platform " + " or ".join(sorted(metadata.platforms)))
    if metadata.min_compute_capability is not None:
        parts.append(f"compute capability {metadata.min_compute_capability}")
    parts += sorted(metadata.features)
    if metadata.dtypes:
        parts.append("/".join(sorted(metadata.dtypes)))
    if metadata.block_sizes:
        parts.append(f"block sizes {', '.join(map(str, sorted(metadata.block_sizes)))}")
    if metadata.max_head_dim:
        parts.append(f"heads up to {metadata.max_head_dim}")
    return ", ".join(parts) or "nothing"
