"""Kernels that are batch-invariant give a row the same bits alone and among others, whatever computed the rest."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace

from trimaran.device_workers.platforms.cpu import CpuPlatform
from trimaran.ipc.facts import Problem
from trimaran.kernels.catalog import CATALOG
from trimaran.kernels.implementation import Kernel, Services
from trimaran.kernels.registry import KernelChoiceRefused, Registry
from trimaran.kernels.trials import DTYPES

PROFILE = CpuPlatform().profile(0)
REGISTRY = Registry(CATALOG)
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 64, 16
LENGTH = 300
pytestmark = pytest.mark.user_pain("Q3")


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Services:
    return Services(num_threads=2, cache_dir=tmp_path_factory.mktemp("kernels"))


def kernel(name: str, dtype: str, services: Services) -> Kernel:
    problem = Problem(
        dtype=dtype,
        kv_dtype=dtype,
        head_dim=HEAD_DIM,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        block_size=BLOCK_SIZE,
        hidden_size=576,
        intermediate_size=1536,
        batch_invariant=True,
    )
    return REGISTRY.load(name, PROFILE, problem, services)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1536, 576), (576, 1536), (4001, 576)], ids=str)
def test_products(services: Services, dtype: str, shape: tuple[int, int]) -> None:
    linear = kernel("linear", dtype, services)
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(shape, generator=generator) * 0.05).to(DTYPES[dtype])
    x = torch.randn(130, shape[1], generator=generator).to(DTYPES[dtype])
    packed = linear.pack(weight, None)  # type: ignore[attr-defined]

    def product(rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(rows), shape[0])
        linear(out, rows, packed)
        return out

    expected = product(x)
    for number in (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 31, 64, 96, 97):
        for begin in (0, 130 - number):
            some = product(x[begin : begin + number].contiguous())
            assert torch.equal(some, expected[begin : begin + number]), (number, begin)


class Cache:
    """Keys and values of one sequence among others of other lengths, and its queries."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(2)
        self.lengths = (LENGTH, 1, 40, 257, 9)
        width = -(-max(self.lengths) // BLOCK_SIZE)
        shape = (len(self.lengths) * width, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.keys, self.values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        self.tables = torch.randperm(shape[0], generator=generator).view(len(self.lengths), width).to(torch.int32)
        self.q = torch.randn(LENGTH, HEADS, HEAD_DIM, generator=generator).to(dtype)

    def attended(self, attention: Kernel, begin: int, end: int, window: int, others: Sequence[int]) -> torch.Tensor:
        """The sequence's queries `begin` to `end`, in one call with the last token of each other one."""
        rows = torch.tensor([*others, 0], dtype=torch.int32)
        starts = torch.tensor([*range(len(others) + 1), len(others) + end - begin], dtype=torch.int32)
        lengths = torch.tensor([*(self.lengths[other] for other in others), end], dtype=torch.int32)
        q = torch.cat((self.q[: len(others)], self.q[begin:end]))
        out = torch.empty_like(q)
        attention(out, q, self.keys, self.values, self.tables, rows, starts, lengths, HEAD_DIM**-0.5, window, None)
        return out[len(others) :]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [0, 50])
def test_attention(services: Services, dtype: str, window: int) -> None:
    """In one chunk, in several, token by token, and in steps with others."""
    attention, cache = kernel("paged_attention", dtype, services), Cache(DTYPES[dtype])
    expected = cache.attended(attention, 0, LENGTH, window, ())
    for cuts in ((0, 17, 18, 100, 299, LENGTH), tuple(range(0, LENGTH + 1, 60))):
        for begin, end in itertools.pairwise(cuts):
            for others in ((), (1,), (1, 2, 3, 4)):
                some = cache.attended(attention, begin, end, window, others)
                assert torch.equal(some, expected[begin:end]), (begin, end, others)
    for position in (0, 1, 31, 32, 63, 255, 256, 299):
        for others in ((), (3,), (1, 2, 3, 4)):
            some = cache.attended(attention, position, position + 1, window, others)
            assert torch.equal(some, expected[position : position + 1]), (position, others)


def test_where_no_kernel_is_so_it_is_refused_with_the_cure(services: Services) -> None:
    problem = Problem(
        dtype="bfloat16", kv_dtype="bfloat16", head_dim=64, num_heads=4, num_kv_heads=2, batch_invariant=True
    )
    profile = replace(PROFILE, platform="cuda")
    for name in ("linear", "paged_attention"):
        with pytest.raises(KernelChoiceRefused, match=f"--batch-invariant: no implementation of {name}.*leave it out"):
            REGISTRY.resolve(name, profile, problem)
    assert REGISTRY.resolve("decode_attention", profile, problem).chosen == "plain_decode_attention"
