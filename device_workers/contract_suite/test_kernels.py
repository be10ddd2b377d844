"""Every kernel that fits the device, against its plain PyTorch reference on the processor, over generated problems."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ...ipc.facts import DeviceProfile, Problem
from ...kernels.catalog import CATALOG
from ...kernels.implementation import DeclaredImplementation, FunctionKernel, Implementation, Kernel, Services
from ...kernels.registry import Registry
from ...kernels.trials import disagreement, make_trials
from ...kernels.verification import VerdictCache, Verifier, run_trial
from ..platforms.contract import Found, Platform
from ..platforms.plugins import plugin_kernels
from .judgement import clause, demand, told, violated
from .kernel_problems import fitting, judged_profile, reference
from .subject import Subject

_APART = 1e-6
"""Where two implementations on one device must be equal, two devices may round a quotient apart."""


@clause("kernels.agree")
def test_it_agrees_with_its_reference(
    implementation: Implementation, platform: Platform, outcome: Found, subject: Subject, is_thorough: bool
) -> None:
    """Ours judge the device's arithmetic; the vendor's judge themselves."""
    profile, num_problems = judged_profile(platform, outcome), 0
    for problem in fitting(implementation, profile, is_thorough=is_thorough):
        num_problems += 1
        try:
            loaded = implementation.load(profile, problem, subject.services)
            reason = _compared(implementation.kernel, loaded, problem, profile, subject)
        except Exception as error:
            violated(f"{implementation.name} on {_named(problem)} raised {told(error)}")
        demand(reason is None, f"{implementation.name} on {_named(problem)}: {reason}")
    if num_problems == 0:
        more = "" if is_thorough else "; --thorough has more of them"
        pytest.skip(f"{implementation.name} fits no generated problem{more}")


def _compared(kernel: str, loaded: Kernel, problem: Problem, profile: DeviceProfile, subject: Subject) -> str | None:
    """None: every trial agrees. The reference runs on the processor, whatever the device is."""
    expected = reference(kernel).load(profile, problem, Services(cache_dir=None))
    there, here = make_trials(kernel, problem, str(subject.device)), make_trials(kernel, problem, "cpu")
    for ours, right in zip(there, here, strict=True):
        run_trial(kernel, loaded, ours.arguments)
        subject.backend.synchronize()
        run_trial(kernel, expected, right.arguments)
        ours = replace(ours, tolerance=max(ours.tolerance, _APART))
        reason = disagreement(kernel, ours, right)
        if reason is not None:
            return reason
    return None


def _named(problem: Problem) -> str:
    return (
        f"{problem.dtype}, {problem.num_heads} heads on {problem.num_kv_heads} of size {problem.head_dim}, "
        f"blocks of {problem.block_size}"
    )


@clause("kernels.offered")
def test_what_packages_offer_can_be_used() -> None:
    """A start passes a broken one over with a warning; here it is a failure."""
    said: list[str] = []
    plugin_kernels(Registry(CATALOG).kernels, said.append)
    demand(not said, "; ".join(said))


@clause("kernels.demotion")
def test_a_kernel_that_disagrees_is_demoted(platform: Platform, outcome: Found, subject: Subject) -> None:
    """The registry's own check works on this device: a kernel that leaves its output as it was is not served."""
    idle = DeclaredImplementation(
        name="idle_silu_and_mul", kernel="silu_and_mul", loader=lambda *_: FunctionKernel(lambda out, gate_up: None)
    )
    plain = reference("silu_and_mul")
    verifier = Verifier({"silu_and_mul": plain}, VerdictCache(None, lambda text: None))
    profile = judged_profile(platform, outcome)
    problem = Problem(dtype="float32", intermediate_size=64)
    _, resolution = Registry((idle, plain), verifier).load("silu_and_mul", profile, problem, subject.services)
    demand(resolution.chosen == plain.name, "a kernel that computes nothing passed the check before it serves")
