"""First chunks by PyTorch's attention, the rest by another: which goes where, and equal to the reference.

PyTorch's plain backend stands in for cuDNN's.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

from trimaran.ipc.facts import Problem
from trimaran.kernels.implementation import FunctionKernel, HostLengths
from trimaran.kernels.in_torch.first_chunk_attention import FirstChunkAttention
from trimaran.kernels.reference.attention import paged_attention
from trimaran.kernels.trials import make_trials
from trimaran.kernels.verification import compare

from ..step_driver import Row, StepDriver
from ..tiny_models import save, variants
from .test_decode_graphs import eager

LEAST = 8


class Rest(FunctionKernel):
    """The reference, and what it was asked: `(queries, cached)` of each sequence that has queries."""

    capturable = True
    workspace_bytes = 24

    def __init__(self) -> None:
        self.asked: list[list[tuple[int, int]]] = []
        super().__init__(self._note)

    def _note(self, *arguments: Any) -> None:
        starts, lengths = arguments[6].tolist(), arguments[7].tolist()
        assert starts[0] == 0 and starts[-1] == arguments[1].shape[0]
        counts = [end - begin for begin, end in pairwise(starts)]
        self.asked.append([pair for pair in zip(counts, lengths, strict=True) if pair[0]])
        paged_attention(*arguments)


def composed() -> tuple[FirstChunkAttention, Rest]:
    rest = Rest()
    return FirstChunkAttention(rest, LEAST, SDPBackend.MATH), rest


def problem(dtype: str, *, group: int = 4, head_dim: int = 64, block_size: int = 16) -> Problem:
    return Problem(
        dtype=dtype, kv_dtype=dtype, head_dim=head_dim, num_heads=2 * group, num_kv_heads=2, block_size=block_size
    )


def arguments_of(counts: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(len(counts))
    width = -(-max(lengths) // 16)
    tables = torch.randperm(width * len(lengths), generator=generator).to(torch.int32).view(len(lengths), width)
    keys, values = (torch.randn(width * len(lengths), 16, 2, 32, generator=generator) for _ in range(2))
    q = torch.randn(sum(counts), 4, 32, generator=generator)
    starts = torch.tensor((0, *counts), dtype=torch.int32).cumsum(0).to(torch.int32)
    rows = torch.arange(len(lengths), dtype=torch.int32).flip(0)
    return torch.empty_like(q), q, keys, values, tables, rows, starts, torch.tensor(lengths, dtype=torch.int32)


def host_of(arguments: tuple[Any, ...]) -> HostLengths:
    return HostLengths(arguments[6].numpy(), arguments[7].numpy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_agrees_with_the_reference(dtype: str, group: int) -> None:
    for head_dim in (64, 80, 128):
        kernel, rest = composed()
        asked = problem(dtype, group=group, head_dim=head_dim)
        assert compare("paged_attention", kernel, FunctionKernel(paged_attention), asked) is None
        assert rest.asked


def test_its_trials_have_such_chunks() -> None:
    """Else verification would not see what it is for."""
    trials = make_trials("paged_attention", problem("float32"), least_first_chunk=1024)
    assert [trial.arguments[-1].first_chunks(1024) for trial in trials] == [[], [], [], [1, 4]]
    assert len(make_trials("paged_attention", problem("float32"))) == len(trials) - 1


@pytest.mark.parametrize(
    ("counts", "lengths", "rest_is"),
    [
        ((8,), (8,), []),
        ((7,), (7,), [[(7, 7)]]),
        ((8,), (9,), [[(8, 9)]]),
        ((1, 1, 20), (30, 5, 20), [[(1, 30), (1, 5)]]),
        ((9, 3, 1, 16, 17, 0, 2), (9, 3, 40, 16, 17, 6, 18), [[(3, 3), (1, 40)], [(2, 18)]]),
        ((12, 0, 33), (12, 5, 33), []),
    ],
)
def test_which_sequences_go_which_way(
    counts: tuple[int, ...], lengths: tuple[int, ...], rest_is: list[list[tuple[int, int]]]
) -> None:
    kernel, rest = composed()
    arguments = arguments_of(counts, lengths)
    expected = torch.empty_like(arguments[0])
    paged_attention(expected, *arguments[1:], 0.2, 0)
    arguments[0].fill_(float("nan"))
    own = kernel(*arguments, 0.2, 0, host_of(arguments))
    assert rest.asked == rest_is
    assert (own is None) == (len(counts) > 1 or bool(rest_is)), "what is the whole step is not copied"
    torch.testing.assert_close(arguments[0] if own is None else own, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("case", ["no host lengths", "a window"])
def test_the_rest_does_it_all(case: str) -> None:
    kernel, rest = composed()
    arguments = arguments_of((20, 1), (20, 3))
    kernel(*arguments, 0.2, *((0,) if case == "no host lengths" else (5, host_of(arguments))))
    assert rest.asked == [[(20, 20), (1, 3)]]


def test_it_is_recorded_where_the_rest_is() -> None:
    """A recording has no host lengths, so what it holds is the rest."""
    kernel, _ = composed()
    assert kernel.capturable and kernel.workspace_bytes == 24


def test_first_chunks() -> None:
    host = HostLengths(np.array([0, 5, 5, 9, 10]), np.array([5, 0, 8, 1]))
    assert host.first_chunks(1) == [0, 3] and host.first_chunks(5) == [0] and host.first_chunks(6) == []


def test_steps_tell_what_the_host_knows(tmp_path: Path, cache: Path) -> None:
    """Of every step with a chunk; the same as the tensors say."""
    save(variants()["qwen3"], tmp_path)
    engine = eager(tmp_path, cache)
    kernels, told = engine._decoder._kernels, []

    def attention(*arguments: Any) -> None:
        starts, lengths, _, _, host = arguments[6:]
        told.append(host is not None)
        if host is None:
            assert starts.diff().tolist() == [1] * len(lengths)
        else:
            assert host.query_starts.tolist() == starts.tolist() and host.kv_lengths.tolist() == lengths.tolist()
        kernels.paged_attention(*arguments)

    engine._decoder._kernels = replace(kernels, paged_attention=FunctionKernel(attention))
    rows = [Row(row=index, tokens=[3 + index, 4, 5 + index]) for index in range(4)]
    StepDriver(engine, num_blocks=100).generate(rows, 3, chunk=2)
    assert set(told) == {True, False}
