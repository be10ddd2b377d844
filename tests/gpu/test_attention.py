"""Attention on the device that is here, against the reference: lengths around the borders of tiles, blocks and copies.

python -m pytest -m gpu tests/gpu/test_attention.py
"""

from typing import Any

import pytest
import torch

from trimaran.ipc.facts import DeviceProfile
from trimaran.kernels.catalog import CATALOG
from trimaran.kernels.implementation import HostLengths, Implementation, Services
from trimaran.kernels.reference.attention import paged_attention

from .test_triton_kernels import DEVICE, assert_agrees, make_problem, named, profile, pytestmark

__all__ = ["profile", "pytestmark"]
ATTENTIONS = [
    implementation
    for implementation in CATALOG
    if implementation.kernel == "paged_attention" and implementation.name.startswith(("triton_", "cudnn_"))
]
CUDNN = [implementation for implementation in ATTENTIONS if implementation.name.startswith("cudnn_")]
BORDERS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 4097)
BATCHES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "first chunks": (BORDERS, BORDERS),
    "decodes": (tuple(1 for _ in BORDERS), BORDERS),
    "chunks on a cached prefix": (tuple(min(length, 70) for length in BORDERS), tuple(2 * n + 31 for n in BORDERS)),
    "long chunks on a cached prefix": ((1500, 1, 64), (5000, 1, 4096)),
    "rows without tokens among them": ((0, 1030, 0, 1, 0, 1024, 33, 0), (7, 1030, 1, 900, 64, 1024, 97, 128)),
}
TOLERANCES = {"bfloat16": 1.6e-2, "float32": 2e-5}


def step(
    dtype: torch.dtype, head_dim: int, group: int, counts: tuple[int, ...], lengths: tuple[int, ...], block_size: int
) -> tuple[Any, ...]:
    """Arguments up to the lengths. Slots that no sequence has written hold NaN, and so does the output."""
    generator = torch.Generator(DEVICE).manual_seed(head_dim + group)
    width = -(-max(lengths) // block_size)
    num_blocks = sum(-(-length // block_size) for length in lengths)
    order = torch.randperm(num_blocks, generator=generator, device=DEVICE).to(torch.int32)
    tables = torch.zeros(len(lengths), width + 3, dtype=torch.int32, device=DEVICE)
    caches = [torch.full((num_blocks, block_size, 2, head_dim), float("nan"), dtype=dtype, device=DEVICE) for _ in "kv"]
    used = 0
    rows = list(range(len(lengths)))[::-1]
    for row, length in zip(rows, lengths, strict=True):
        blocks = order[used : used + -(-length // block_size)]
        used += len(blocks)
        tables[row, : len(blocks)] = blocks
        for cache in caches:
            numbers = torch.randn(length, 2, head_dim, generator=generator, device=DEVICE).to(dtype)
            places = torch.arange(length, device=DEVICE)
            cache[blocks.long()[places // block_size], places % block_size] = numbers
    q = torch.randn(sum(counts), 2 * group, head_dim, generator=generator, device=DEVICE).to(dtype)
    starts = torch.tensor((0, *counts), device=DEVICE).cumsum(0).to(torch.int32)
    integers = [torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (rows, lengths)]
    return torch.full_like(q, float("nan")), q, *caches, tables, integers[0], starts, integers[1]


def host_of(arguments: tuple[Any, ...]) -> HostLengths:
    return HostLengths(arguments[6].cpu().numpy(), arguments[7].cpu().numpy())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("implementation", ATTENTIONS, ids=named)
def test_borders(implementation: Implementation, dtype: str, batch: str, profile: DeviceProfile) -> None:
    counts, lengths = BATCHES[batch]
    num_tried = 0
    for head_dim in (64, 80, 96, 128, 256):
        for group, block_size in ((1, 64), (2, 16), (4, 64), (8, 32)):
            problem = make_problem(dtype, head_dim, group=group, block_size=block_size)
            if implementation.misfit(profile, problem) is not None:
                continue
            num_tried += 1
            kernel = implementation.load(profile, problem, Services(device=DEVICE))
            arguments = step(getattr(torch, dtype), head_dim, group, counts, lengths, block_size)
            for window in (0, 1, 100):
                arguments[0].fill_(float("nan"))
                kernel(*arguments, head_dim**-0.5, window, host_of(arguments))
                expected = torch.empty_like(arguments[0])
                paged_attention(expected, *arguments[1:], head_dim**-0.5, window)
                case = f"head {head_dim}, group {group}, blocks of {block_size}, window {window}"
                limit = TOLERANCES[dtype] * max(1.0, float(expected.abs().max()))
                torch.testing.assert_close(
                    arguments[0], expected, rtol=0, atol=limit, msg=lambda text, case=case: f"{case}: {text}"
                )
    if not num_tried:
        pytest.skip("fits none of these problems")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("implementation", CUDNN, ids=named)
def test_cudnn_agrees_on_its_trials(implementation: Implementation, dtype: str, profile: DeviceProfile) -> None:
    """Those with long first chunks among them, as at a start; head sizes without a window."""
    for head_dim in (64, 96, 128):
        for group in (1, 2, 4, 8):
            assert_agrees(implementation, profile, make_problem(dtype, head_dim, group=group, block_size=64))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("implementation", CUDNN, ids=named)
def test_first_chunks_never_wait_for_the_device(implementation: Implementation, profile: DeviceProfile) -> None:
    problem = make_problem("bfloat16", 128, block_size=64)
    misfit = implementation.misfit(profile, problem)
    if misfit is not None:
        pytest.skip(misfit)
    kernel = implementation.load(profile, problem, Services(device=DEVICE))
    arguments = step(torch.bfloat16, 128, 4, (1, 2048, 64), (300, 2048, 500), 64)
    host = host_of(arguments)
    kernel(*arguments, 128**-0.5, 0, host)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        kernel(*arguments, 128**-0.5, 0, host)
    finally:
        torch.cuda.set_sync_debug_mode("default")
