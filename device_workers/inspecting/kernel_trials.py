"""Loads and tries implementations for commands: each on the generated problem, against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...ipc.facts import DeviceProfile, Feature, Problem, Resolution
from ...kernels.implementation import Services
from ...kernels.registry import KernelChoices, Registry
from ..boot import make_registry
from ..inspection import Look
from ..platforms.contract import Backend
from ..platforms.detection import Detection


@dataclass(frozen=True, kw_only=True)
class Tested:
    """How one kernel's chain came out: the link that would serve, and those before it that failed."""

    kernel: str
    chosen: str | None
    demoted: tuple[str, ...]
    reasons: str


def sample_problem(profile: DeviceProfile) -> Problem:
    """The shape of a Llama of eight billion parameters on one device, in the dtype that the device computes best."""
    features = profile.capability.features
    dtype = "bfloat16" if Feature.BF16 in features else "float16" if Feature.FP16 in features else "float32"
    return Problem(
        dtype=dtype,
        kv_dtype=dtype,
        head_dim=128,
        num_heads=32,
        num_kv_heads=8,
        block_size=16,
        hidden_size=4096,
        intermediate_size=14336,
        vocab_size=128256,
        max_tokens=2048,
        max_rows=256,
        rotary_dim=128,
    )


def open_device(look: Look, detected: Detection, profile: DeviceProfile) -> tuple[Backend, Services]:
    worker = look.worker
    cache = Path(worker.cache_directory)
    num_threads = worker.num_threads or 1
    backend = detected.platform.open(profile.index, num_threads=num_threads, cache_dir=cache, warn=look.say)
    services = Services(num_threads=num_threads, cache_dir=cache, warn=look.say, device=str(backend.torch_device))
    return backend, services


def test_kernels(look: Look, detected: Detection, profile: DeviceProfile) -> Iterator[Tested]:
    """Walk each kernel's chain as a start would."""
    _, services = open_device(look, detected, profile)
    registry = make_registry(look.worker, look.say)
    choices = KernelChoices(look.worker.kernel_pins, frozenset(look.worker.without_kernels))
    problem = sample_problem(profile)
    for kernel in registry.kernels:
        yield _tested(registry, kernel, profile, problem, services, choices)


def _tested(
    registry: Registry,
    kernel: str,
    profile: DeviceProfile,
    problem: Problem,
    services: Services,
    choices: KernelChoices,
) -> Tested:
    try:
        _, resolution = registry.load(kernel, profile, problem, services, choices)
    except Exception as error:  # vendor code may raise anything, and the verdict is the answer
        return Tested(kernel=kernel, chosen=None, demoted=(), reasons=f"{type(error).__name__}: {error}")
    return Tested(
        kernel=kernel, chosen=resolution.chosen, demoted=tuple(resolution.demoted), reasons=_reasons(resolution)
    )


def _reasons(resolution: Resolution) -> str:
    return "; ".join(f"{name} failed: {reason}" for name, reason in resolution.demoted.items())
