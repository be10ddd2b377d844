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
PAGED = [implementation for implementation in TRITON if implementation.kernel == "paged_attention"]
ATTENTIONS = [*PAGED, *(implementation for implementation in TRITON if implementation.kernel == "decode_attention")]
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
    problems = [make_problem(dtype, head_dim) for head_dim in HEAD_DIMS]
    for problem in problems:
        if implementation.misfit(profile, problem) is None or problem.head_dim == HEAD_DIMS[0]:
            assert_agrees(implementation, profile, problem)
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
@pytest.mark.parametrize("implementation", PAGED, ids=named)
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
        "fused_linears",
        "decode_attentions",
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
        torch.cuda.synchronize()
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
        ours = trial.copy()
        torch.cuda.synchronize()  # a kernel that starts early may read inputs before the copies have ended
        yield trial, kernel, ours


# -- fused layers of a decode


SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 40_000}
NUM_LAYERS = 4


class FusedChain:
    """Layers of Qwen3-0.6B's shape and a head, with random weights, as the decoder calls them."""

    def __init__(self, profile: DeviceProfile, positions: tuple[int, ...], *, pdl: int) -> None:
        problem = Problem(
            dtype="bfloat16", kv_dtype="bfloat16", head_dim=128, num_heads=16, num_kv_heads=8, block_size=16, **SMALL
        )
        names = ("norm_linear", "norm_gate_up", "linear_add", "decode_attention")
        best = {name: {"pdl": pdl} for name in names}
        profile = replace(profile, capability=replace(profile.capability, best=best))
        chosen = {each.kernel: each for each in TRITON}
        self.kernels: Any = {name: chosen[name].load(profile, problem, Services(device=DEVICE)) for name in names}
        torch.manual_seed(5)
        num_tokens, width = len(positions), max(positions) // 16 + 1

        def weight(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, device=DEVICE) / shape[-1] ** 0.5).bfloat16()

        self.layers = [
            {
                "qkv": weight(4096, 1024),
                "output": weight(1024, 2048),
                "gate_up": weight(6144, 1024),
                "down": weight(1024, 3072),
                "norms": [1 + weight(size) for size in (1024, 1024, 128, 128)],
                "cache": [torch.randn(num_tokens * width, 16, 8, 128, device=DEVICE).bfloat16() for _ in range(2)],
            }
            for _ in range(NUM_LAYERS)
        ]
        self.head, self.final_norm = weight(SMALL["vocab_size"], 1024), 1 + weight(1024)
        places = torch.tensor(positions, dtype=torch.int32)
        tables = torch.randperm(num_tokens * width).view(num_tokens, width).int()
        slots = tables[torch.arange(num_tokens), places // 16] * 16 + places % 16
        rows = torch.arange(num_tokens, dtype=torch.int32)
        self.step = [tensor.int().to(DEVICE) for tensor in (places, slots, tables, rows)]
        angles = torch.rand(max(positions) + 1, 64, device=DEVICE) * 6.3
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.embedded = torch.randn(num_tokens, 1024, device=DEVICE)
        sizes = (1024, 4096, 2048, 3072, SMALL["vocab_size"])
        self.residual, self.qkv, self.attended, self.activated, self.logits = (
            torch.full((num_tokens, size), float("nan"), device=DEVICE) for size in sizes
        )
        torch.cuda.synchronize()

    def __call__(self) -> None:
        """As the decoder does, in the place of whose embedding stands a copy by an ordinary kernel."""
        places, slots, tables, rows = self.step
        torch.add(self.embedded, 0.0, out=self.residual)
        for layer in self.layers:
            norms: Any = layer["norms"]
            self.kernels["norm_linear"](self.qkv, self.residual, norms[0], layer["qkv"], None, 1e-6)
            self.kernels["decode_attention"](
                *(self.attended, self.qkv, places, slots, self.cos_sin, *layer["cache"], norms[2], norms[3], 1e-6),
                *(tables, rows, 128**-0.5, 0),
            )
            self.kernels["linear_add"](self.residual, self.attended, layer["output"], None)
            self.kernels["norm_gate_up"](self.activated, self.residual, norms[1], layer["gate_up"], None, 1e-6)
            self.kernels["linear_add"](self.residual, self.activated, layer["down"], None)
        self.kernels["norm_linear"](self.logits, self.residual, self.final_norm, self.head, None, 1e-6)

    def recorded(self) -> torch.cuda.CUDAGraph:
        self()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph


@pytest.mark.timeout(300)
@pytest.mark.parametrize("positions", [(0,), (127,), (1023, 5), (4000,), (700, 31, 0, 290)], ids=str)
def test_a_fused_chain_that_starts_early_gives_the_same_bits(
    positions: tuple[int, ...], profile: DeviceProfile
) -> None:
    """Replayed 200 times: kernels that overlap those ahead of them never read what is not written yet."""
    for name in ("norm_linear", "decode_attention"):
        implementation = next(each for each in TRITON if each.kernel == name)
        if implementation.misfit(profile, make_problem("bfloat16", 128)) is not None:
            pytest.skip("does not fit")
    apart, early = (FusedChain(profile, positions, pdl=pdl) for pdl in (0, 1))
    apart.recorded().replay()
    torch.cuda.synchronize()
    assert bool(apart.logits.isfinite().all())
    graph = early.recorded()
    for _ in range(200):
        early.logits.fill_(float("nan"))
        graph.replay()
        assert torch.equal(early.logits, apart.logits)
        for ours, theirs in zip(early.layers, apart.layers, strict=True):
            assert all(torch.equal(*pair) for pair in zip(ours["cache"], theirs["cache"], strict=True))
