"""Every Triton kernel on the device that is here: against its reference, recorded by a graph, and without a host wait.

python -m pytest -m gpu tests/gpu/test_triton_kernels.py
"""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from trimaran.ipc.facts import DeviceProfile, Problem
from trimaran.kernels.catalog import CATALOG
from trimaran.kernels.implementation import Implementation, Services
from trimaran.kernels.registry import Registry
from trimaran.kernels.trials import Trial, make_trials
from trimaran.kernels.verification import VerdictCache, Verifier, run_trial
from trimaran.tools.compile_matrix import TARGETS

DEVICE = "cuda:0"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
TRITON = [implementation for implementation in CATALOG if implementation.name.startswith("triton_")]
ATTENTIONS = [implementation for implementation in TRITON if implementation.kernel == "paged_attention"]
DTYPES = ("float32", "float16", "bfloat16")
HEAD_DIMS = (32, 40, 64, 80, 96, 112, 128, 160, 192, 256)
REFERENCES = {kernel: Registry(CATALOG).chain(kernel)[-1] for kernel in Registry(CATALOG).kernels}


def named(implementation: Implementation) -> str:
    return implementation.name


@pytest.fixture(scope="module")
def profile() -> Iterator[DeviceProfile]:
    """What the kernels' matches and configurations ask, read off the device."""
    device: Any = torch.cuda.get_device_properties(0)
    is_amd = torch.version.hip is not None
    architecture = device.gcnArchName.split(":")[0] if is_amd else f"sm_{device.major}{device.minor}"
    if architecture not in TARGETS:
        pytest.skip(f"no capability is known of {architecture}")
    known = TARGETS[architecture].profile()
    exact = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False  # the reference's products of float32 are whole
    capability = replace(known.capability, num_multiprocessors=device.multi_processor_count)
    yield replace(known, name=device.name, capability=capability)
    torch.backends.cuda.matmul.allow_tf32 = exact


def make_problem(dtype: str, head_dim: int, *, group: int = 4, block_size: int = 16, **more: Any) -> Problem:
    return Problem(
        dtype=dtype,
        kv_dtype=dtype,
        head_dim=head_dim,
        num_heads=2 * group,
        num_kv_heads=2,
        block_size=block_size,
        hidden_size=more.pop("hidden_size", 1024),
        intermediate_size=1000,
        vocab_size=2000,
        **more,
    )


def assert_agrees(implementation: Implementation, profile: DeviceProfile, problem: Problem) -> None:
    """Loaded, run on its trials and compared by the registry, as at a start."""
    misfit = implementation.misfit(profile, problem)
    if misfit is not None:
        pytest.skip(misfit)
    verifier = Verifier(REFERENCES, VerdictCache(None, lambda text: None))
    registry = Registry((implementation, REFERENCES[implementation.kernel]), verifier)
    _, resolution = registry.load(implementation.kernel, profile, problem, Services(device=DEVICE))
    assert resolution.chosen == implementation.name, resolution.demoted


@pytest.mark.timeout(600)
@pytest.mark.user_pain("D5")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", TRITON, ids=named)
def test_agrees_with_its_reference(implementation: Implementation, dtype: str, profile: DeviceProfile) -> None:
    for head_dim in HEAD_DIMS:
        assert_agrees(implementation, profile, make_problem(dtype, head_dim))
    assert_agrees(implementation, profile, make_problem(dtype, 80, rotary_dim=32))
    assert_agrees(implementation, profile, make_problem(dtype, 64, hidden_size=18_000))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("implementation", ATTENTIONS, ids=named)
def test_block_sizes_and_groups(implementation: Implementation, block_size: int, profile: DeviceProfile) -> None:
    cases = (("bfloat16", 64, 1), ("bfloat16", 80, 7), ("float16", 128, 8), ("float32", 256, 20))
    for dtype, head_dim, group in cases:
        assert_agrees(implementation, profile, make_problem(dtype, head_dim, group=group, block_size=block_size))


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("implementation", ATTENTIONS, ids=named)
def test_long_contexts(implementation: Implementation, window: int, profile: DeviceProfile) -> None:
    from ..triton_checks import PROBLEM, long_contexts

    if implementation.misfit(profile, PROBLEM) is not None:
        pytest.skip("does not fit")
    assert long_contexts(DEVICE, profile, implementation.name, window) == ""


@pytest.mark.parametrize(
    "check",
    [
        "draws",
        "sampled_rows",
        "drawn_in_parts",
        "greedy_rows",
        "ranks_and_tops",
        "every_bfloat16",
        "wide_rows",
        "linears",
    ],
)
def test_exactness(check: str, profile: DeviceProfile) -> None:
    from ..triton_checks import CHECKS

    assert CHECKS[check](DEVICE, profile) == ""


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("implementation", TRITON, ids=named)
def test_a_call_never_waits_for_the_device(implementation: Implementation, profile: DeviceProfile) -> None:
    for _, kernel, ours in warmed(implementation, profile):
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            run_trial(implementation.kernel, kernel, ours.arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("implementation", TRITON, ids=named)
def test_replays_of_a_recorded_call_equal_the_call(implementation: Implementation, profile: DeviceProfile) -> None:
    """Also where the call changes what it reads: from equal inputs to equal outputs."""
    for fresh, kernel, ours in warmed(implementation, profile):
        if not kernel.capturable:
            pytest.skip("not capturable")
        called = fresh.copy()
        run_trial(implementation.kernel, kernel, called.arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_trial(implementation.kernel, kernel, ours.arguments)
        for _ in range(3):
            for mine, original in zip(ours.arguments, fresh.arguments, strict=True):
                if isinstance(mine, torch.Tensor):
                    mine.copy_(original)
            graph.replay()
            torch.cuda.synchronize()
            for index in ours.written:
                pair = [bits(trial.arguments[index]) for trial in (ours, called)]
                assert torch.equal(*pair)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, since a NaN does not equal itself."""
    return tensor.contiguous().view(torch.uint8)


def warmed(implementation: Implementation, profile: DeviceProfile) -> Iterator[tuple[Trial, Any, Trial]]:
    """Each trial, untouched, a kernel that has compiled for it, and a copy of the trial."""
    problem = make_problem("bfloat16", 128, block_size=64)
    misfit = implementation.misfit(profile, problem)
    if misfit is not None:
        pytest.skip(misfit)
    kernel: Any = implementation.load(profile, problem, Services(device=DEVICE))
    for trial in make_trials(implementation.kernel, problem, DEVICE):
        run_trial(implementation.kernel, kernel, trial.copy().arguments)
        yield trial, kernel, trial.copy()
