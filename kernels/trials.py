"""A small generated problem for each kernel: what verification and tests run an implementation and its reference on.

Deterministic: the same problem gives the same numbers. Inputs are made on the CPU and moved to the device asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..ipc.facts import Problem
from .implementation import HostLengths

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Arguments of one call, and which of them (by index) the call writes. `tolerance` is relative to the largest
    entry.
    """

    arguments: tuple[Any, ...]
    written: tuple[int, ...]
    tolerance: float

    def copy(self) -> Trial:
        """The same trial with its tensors cloned, so that a second implementation starts from the same state."""
        cloned = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in self.arguments)
        return Trial(arguments=cloned, written=self.written, tolerance=self.tolerance)


def make_trials(kernel: str, problem: Problem, device: str = "cpu", *, least_first_chunk: int = 0) -> tuple[Trial, ...]:
    """One per way of calling the kernel that an implementation may treat apart; of attention that treats first chunks
    of so many tokens apart, such a one too. Raises KeyError for a kernel that has none.
    """
    makers = _MAKERS[kernel]
    if least_first_chunk:
        makers = (*makers, partial(_long_first_chunks, num_tokens=least_first_chunk))
    return tuple(_made(maker, problem, device) for maker in makers)


def _made(maker: Callable[[Problem, torch.Generator], Trial], problem: Problem, device: str) -> Trial:
    trial = maker(problem, torch.Generator().manual_seed(20_260_101))
    moved = tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in trial.arguments)
    return Trial(arguments=moved, written=trial.written, tolerance=trial.tolerance)


def meddling(kernel: str, ours: Trial, reference: Trial) -> str | None:
    """None when a call left alone what it must only read, to the bit; else what it changed."""
    for index, (got, expected) in enumerate(zip(ours.arguments, reference.arguments, strict=True)):
        if index in ours.written or not isinstance(got, torch.Tensor):
            continue
        expected = expected.to(got.device)
        if not torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (got, expected))):
            return f"{kernel} changes its argument {index}, which is only there to be read"
    return None


def disagreement(kernel: str, ours: Trial, reference: Trial) -> str | None:
    """None when what two calls wrote agrees within the tolerance; else where and by how much it differs."""
    for index in ours.written:
        got, expected = _comparable(ours.arguments[index], reference.arguments[index])
        limit = ours.tolerance * max(1.0, float(expected[expected.isfinite()].abs().max()))
        same = torch.isclose(got, expected, rtol=0, atol=limit, equal_nan=True)
        if not bool(same.all()):
            worst = float((got - expected)[~same].abs().nan_to_num(float("inf")).max())
            return f"{kernel} disagrees with its reference in argument {index} by {worst:.3g} (allowed {limit:.3g})"
    return None


def _comparable(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Where they are if that is one place, since some are large; in a dtype that every device has and that tells any
    two values apart.
    """
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = tuple(tensor.cpu() for tensor in tensors)
    return [tensor.float() if tensor.is_floating_point() else tensor.cpu().double() for tensor in tensors]


def _tolerance(problem: Problem) -> float:
    return {"float32": 2e-5, "bfloat16": 1.6e-2, "float16": 2e-3}[problem.dtype]


def _randn(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _embed(problem: Problem, generator: torch.Generator) -> Trial:
    table = _randn(generator, DTYPES[problem.dtype], 37, problem.hidden_size)
    ids = torch.randint(0, 60, (9,), generator=generator, dtype=torch.int32)
    ids[2], ids[5] = -1, -4  # the last tokens of rows 0 and 3
    last_tokens = torch.randint(11, 48, (4,), generator=generator)
    out = torch.empty(9, problem.hidden_size, dtype=table.dtype)
    return Trial(arguments=(out, ids, last_tokens, table, 11), written=(0,), tolerance=0.0)


def _rms_norm(problem: Problem, generator: torch.Generator) -> Trial:
    dtype = DTYPES[problem.dtype]
    x, weight = _randn(generator, dtype, 7, problem.hidden_size), _randn(generator, dtype, problem.hidden_size)
    return Trial(arguments=(torch.empty_like(x), x, weight, 1e-5), written=(0,), tolerance=_tolerance(problem))


def _fused_add_rms_norm(problem: Problem, generator: torch.Generator) -> Trial:
    dtype = DTYPES[problem.dtype]
    x, residual = (_randn(generator, dtype, 7, problem.hidden_size) for _ in range(2))
    weight = _randn(generator, dtype, problem.hidden_size)
    arguments = (torch.empty_like(x), residual, x, weight, 1e-5)
    return Trial(arguments=arguments, written=(0, 1), tolerance=_tolerance(problem))


def _silu_and_mul(problem: Problem, generator: torch.Generator) -> Trial:
    gate_up = _randn(generator, DTYPES[problem.dtype], 5, 2 * problem.intermediate_size)
    out = torch.empty(5, problem.intermediate_size, dtype=gate_up.dtype)
    return Trial(arguments=(out, gate_up), written=(0,), tolerance=_tolerance(problem))


def _rotary_and_kv_write(problem: Problem, generator: torch.Generator) -> Trial:
    dtype, head_dim, num_tokens = DTYPES[problem.dtype], problem.head_dim, 11
    heads, kv_heads = problem.num_heads, problem.num_kv_heads
    rotary_dim = problem.rotary_dim or head_dim
    qkv = _randn(generator, dtype, num_tokens, (heads + 2 * kv_heads) * head_dim)
    positions = torch.randint(0, 50, (num_tokens,), generator=generator, dtype=torch.int32)
    slots = torch.randperm(3 * problem.block_size, generator=generator)[:num_tokens].to(torch.int32)
    slots[3] = -1
    angles = torch.rand(50, rotary_dim // 2, generator=generator) * 6.3
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    k_cache, v_cache = (_randn(generator, dtype, 3, problem.block_size, kv_heads, head_dim) for _ in range(2))
    norms = tuple(_randn(generator, dtype, head_dim) for _ in range(2))
    q = torch.empty(num_tokens, heads, head_dim, dtype=dtype)
    arguments = (q, qkv, positions, slots, cos_sin, k_cache, v_cache, *norms, 1e-6)
    return Trial(arguments=arguments, written=(0, 5, 6), tolerance=_tolerance(problem))


def _rotary_without_norms(problem: Problem, generator: torch.Generator) -> Trial:
    """As above, with neither norm."""
    trial = _rotary_and_kv_write(problem, generator)
    arguments = (*trial.arguments[:7], None, None, trial.arguments[9])
    return Trial(arguments=arguments, written=trial.written, tolerance=trial.tolerance)


def _mixed_attention(problem: Problem, generator: torch.Generator) -> Trial:
    """A decode, a first chunk, a row that has nothing to do, a later chunk and a decode."""
    return _paged_attention(problem, generator, (1, 21, 0, 18, 1), (45, 21, 3, 70, 1))


def _decode_attention(problem: Problem, generator: torch.Generator) -> Trial:
    """One token of each sequence, as in a step of decodes, and a row that has nothing to do. The table has room for
    more positions than there are, as the engine's has.
    """
    return _paged_attention(problem, generator, (1, 1, 0, 1), (1, 290, 2, 33), room=1200)


def _short_chunk_attention(problem: Problem, generator: torch.Generator) -> Trial:
    """No more tokens than rows, though one sequence has three: padding of a recorded step looks like this."""
    return _paged_attention(problem, generator, (0, 3, 1, 0, 0), (1, 19, 40, 1, 1))


def _long_first_chunks(problem: Problem, generator: torch.Generator, num_tokens: int) -> Trial:
    """Of so many tokens and of a few more, among a decode, a later chunk and a row that has nothing to do."""
    more = num_tokens + 6
    return _paged_attention(problem, generator, (1, num_tokens, 0, 18, more), (45, num_tokens, 3, 70, more))


def _paged_attention(
    problem: Problem,
    generator: torch.Generator,
    num_queries: tuple[int, ...],
    lengths: tuple[int, ...],
    *,
    room: int = 0,
) -> Trial:
    """Over a shuffled block table whose rows are not in the order of the sequences; unused slots hold NaN."""
    dtype, block_size = DTYPES[problem.dtype], problem.block_size
    width = -(-max(lengths) // block_size) + 1
    num_blocks = len(lengths) * width + 1
    tables = torch.randperm(num_blocks, generator=generator)[: len(lengths) * width].view(len(lengths), width)
    rows = torch.randperm(len(lengths), generator=generator).to(torch.int32)
    shape = (num_blocks, block_size, problem.num_kv_heads, problem.head_dim)
    k_cache, v_cache = _randn(generator, dtype, *shape), _randn(generator, dtype, *shape)
    _spoil_unused(tables[rows], lengths, block_size, k_cache, v_cache)
    q = _randn(generator, dtype, sum(num_queries), problem.num_heads, problem.head_dim)
    starts = torch.tensor((0, *num_queries), dtype=torch.int32).cumsum(0).to(torch.int32)
    kv_lengths = torch.tensor(lengths, dtype=torch.int32)
    window = 24 if problem.head_dim % 32 else 0
    arguments: tuple[Any, ...] = (
        torch.empty_like(q),
        q,
        k_cache,
        v_cache,
        torch.nn.functional.pad(tables.to(torch.int32), (0, max(0, room // block_size - width))),
        rows,
        starts,
        kv_lengths,
        problem.head_dim**-0.5,
        window,
        HostLengths(starts.numpy(), kv_lengths.numpy()),
    )
    if problem.caps_scores or problem.has_sinks:
        sinks = torch.randn(problem.num_heads, generator=generator) if problem.has_sinks else None
        arguments = (*arguments, 1.5 if problem.caps_scores else 0.0, sinks)
    return Trial(arguments=arguments, written=(0,), tolerance=_tolerance(problem))


def _spoil_unused(
    tables: torch.Tensor, lengths: tuple[int, ...], block_size: int, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    used = torch.zeros(k_cache.shape[0] * block_size, dtype=torch.bool)
    for row, length in enumerate(lengths):
        positions = torch.arange(length)
        used[tables[row, positions // block_size] * block_size + positions % block_size] = True
    k_cache.flatten(0, 1)[~used] = float("nan")
    v_cache.flatten(0, 1)[~used] = float("nan")


def _linear(
    problem: Problem, generator: torch.Generator, num_tokens: int, *, has_bias: bool = True, is_wide: bool = False
) -> Trial:
    """Arguments: out (float32 where it is wide, as logits are), x, weight, bias; the caller packs the weight."""
    dtype, num_inputs = DTYPES[problem.dtype], problem.hidden_size
    x = _randn(generator, dtype, num_tokens, num_inputs)
    weight = (torch.randn(75, num_inputs, generator=generator) / num_inputs**0.5).to(dtype)
    out = torch.empty(num_tokens, 75, dtype=torch.float32 if is_wide else dtype)
    arguments = (out, x, weight, _randn(generator, dtype, 75) if has_bias else None)
    return Trial(arguments=arguments, written=(0,), tolerance=_tolerance(problem))


def _logits(problem: Problem, generator: torch.Generator, num_rows: int) -> tuple[torch.Tensor, int]:
    """Rows of logits whose padding (and nothing else) is high, and the size without it."""
    vocab_size = min(problem.vocab_size or 500, 2000)
    logits = torch.randn(num_rows, vocab_size + 5, generator=generator) * 3
    logits[:, vocab_size:] = 1e4
    return logits, vocab_size


def _greedy_sample(problem: Problem, generator: torch.Generator) -> Trial:
    logits, vocab_size = _logits(problem, generator, 6)
    logits[2, 7] = float("nan")
    logits[3] = float("-inf")
    return Trial(arguments=(torch.empty(6, dtype=torch.int64), logits, vocab_size), written=(0,), tolerance=0.0)


def _sample(problem: Problem, generator: torch.Generator) -> Trial:
    logits, vocab_size = _logits(problem, generator, 8)
    logits[6, 3] = float("nan")
    parameters = (
        torch.tensor([1.0, 0.0, 0.7, 1.3, 1.0, 1e-5, 1.0, 0.9]),
        torch.tensor([0, 0, 5, 0, 20, 0, 0, 1], dtype=torch.int32),
        torch.tensor([1.0, 1.0, 1.0, 0.8, 0.5, 1.0, 1.0, 0.3]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1]),
        torch.randint(-(2**62), 2**62, (8,), generator=generator),
        torch.arange(8, dtype=torch.int32),
        torch.arange(8, dtype=torch.int32) * 1000,
    )
    arguments = (torch.empty(8, dtype=torch.int64), logits, *parameters, vocab_size)
    return Trial(arguments=arguments, written=(0,), tolerance=0.0)


def _apply_penalties(problem: Problem, generator: torch.Generator) -> Trial:
    logits, _ = _logits(problem, generator, 5)
    counts = torch.randint(0, 3, (2, logits.shape[1]), generator=generator, dtype=torch.int32)
    in_prompt = torch.randint(0, 2, (2, logits.shape[1]), generator=generator, dtype=torch.uint8)
    arguments = (logits, torch.tensor([3, 0]), counts, in_prompt, *torch.tensor([[0.5, 0.1], [0.2, -0.3], [1.2, 0.9]]))
    return Trial(arguments=arguments, written=(0,), tolerance=1e-5)


def _token_logprobs(problem: Problem, generator: torch.Generator) -> Trial:
    logits, vocab_size = _logits(problem, generator, 4)
    outs = (torch.empty(4), torch.empty(4, dtype=torch.int32), torch.empty(4, 6), torch.empty(4, 6, dtype=torch.int32))
    arguments = (*outs, logits, torch.tensor([3, 0, 9, 1]), vocab_size)
    return Trial(arguments=arguments, written=(0, 1, 2, 3), tolerance=1e-5)


def _quantize_fp8(problem: Problem, generator: torch.Generator, *, is_static: bool) -> Trial:
    """Rows of unlike sizes, one of zeros, one beyond what a static scale reaches, one with a NaN. Exact."""
    x = torch.randn(6, problem.hidden_size, generator=generator) * torch.logspace(-3, 3, 6).unsqueeze(1)
    x[1] = 0.0
    x[4, 3] = float("nan")
    out = torch.empty(6, problem.hidden_size, dtype=torch.float8_e4m3fn)
    scales = torch.full((1,), 0.037) if is_static else torch.empty(6)
    arguments = (out, scales, x.to(DTYPES[problem.dtype]), is_static)
    return Trial(arguments=arguments, written=(0,) if is_static else (0, 1), tolerance=0.0)


def _norm_linear(problem: Problem, generator: torch.Generator, *, num_tokens: int, has_bias: bool) -> Trial:
    """Also of a number of outputs that no program's rows divide."""
    dtype, hidden_size = DTYPES[problem.dtype], problem.hidden_size
    norm_weight, weight = _randn(generator, dtype, hidden_size), _weight(generator, dtype, 75, hidden_size)
    bias = _randn(generator, dtype, 75) if has_bias else None
    residual = torch.randn(num_tokens, hidden_size, generator=generator)
    arguments = (torch.empty(num_tokens, 75), residual, norm_weight, weight, bias, 1e-6)
    return Trial(arguments=arguments, written=(0,), tolerance=_tolerance(problem))


def _norm_gate_up(problem: Problem, generator: torch.Generator, *, num_tokens: int, has_bias: bool) -> Trial:
    trial = _norm_linear(problem, generator, num_tokens=num_tokens, has_bias=has_bias)
    dtype, (_, residual, norm_weight, _, _, eps) = DTYPES[problem.dtype], trial.arguments
    weight = _weight(generator, dtype, 74, problem.hidden_size)
    bias = _randn(generator, dtype, 74) if has_bias else None
    arguments = (torch.empty(num_tokens, 37), residual, norm_weight, weight, bias, eps)
    return Trial(arguments=arguments, written=(0,), tolerance=trial.tolerance)


def _add_attended(problem: Problem, generator: torch.Generator, *, num_tokens: int, has_bias: bool) -> Trial:
    return _linear_add(problem, generator, problem.num_heads * problem.head_dim, num_tokens, has_bias=has_bias)


def _add_activated(problem: Problem, generator: torch.Generator, *, num_tokens: int, has_bias: bool) -> Trial:
    return _linear_add(problem, generator, problem.intermediate_size, num_tokens, has_bias=has_bias)


def _linear_add(
    problem: Problem, generator: torch.Generator, num_inputs: int, num_tokens: int, *, has_bias: bool
) -> Trial:
    dtype = DTYPES[problem.dtype]
    x, residual = (torch.randn(num_tokens, size, generator=generator) for size in (num_inputs, 75))
    bias = _randn(generator, dtype, 75) if has_bias else None
    arguments = (residual, x, _weight(generator, dtype, 75, num_inputs), bias)
    return Trial(arguments=arguments, written=(0,), tolerance=_tolerance(problem))


def _weight(generator: torch.Generator, dtype: torch.dtype, num_outputs: int, num_inputs: int) -> torch.Tensor:
    return (torch.randn(num_outputs, num_inputs, generator=generator) / math.sqrt(num_inputs)).to(dtype)


def _decode_layer(
    problem: Problem, generator: torch.Generator, positions: tuple[int, ...], *, has_norms: bool
) -> Trial:
    """Over a shuffled block table whose rows are more and in another order; a token at position 0 is padding. Slots
    that no position before a token's own has hold NaN.
    """
    dtype, head_dim, block_size = DTYPES[problem.dtype], problem.head_dim, problem.block_size
    num_tokens, heads, kv_heads = len(positions), problem.num_heads, problem.num_kv_heads
    width = max(positions) // block_size + 2
    num_rows = num_tokens + 2
    num_blocks = num_rows * width + 1
    tables = torch.randperm(num_blocks, generator=generator)[: num_rows * width].view(num_rows, width).to(torch.int32)
    rows = torch.randperm(num_rows, generator=generator)[:num_tokens]
    k_cache, v_cache = (_randn(generator, dtype, num_blocks, block_size, kv_heads, head_dim) for _ in range(2))
    _spoil_unused(tables[rows].long(), positions, block_size, k_cache, v_cache)
    places = torch.tensor(positions, dtype=torch.int32)
    slots = tables[rows, places // block_size] * block_size + places % block_size
    slots[places == 0] = -1
    angles = torch.rand(max(positions) + 1, (problem.rotary_dim or head_dim) // 2, generator=generator) * 6.3
    arguments = (
        torch.empty(num_tokens, heads * head_dim),
        torch.randn(num_tokens, (heads + 2 * kv_heads) * head_dim, generator=generator),
        places,
        slots,
        torch.cat((angles.cos(), angles.sin()), dim=-1),
        k_cache,
        v_cache,
        *((_randn(generator, dtype, head_dim) for _ in range(2)) if has_norms else (None, None)),
        1e-6,
        tables,
        rows.to(torch.int32),
        head_dim**-0.5,
        24 if head_dim % 32 else 0,
    )
    return Trial(arguments=arguments, written=(0, 5, 6), tolerance=_tolerance(problem))


def _one_and_two(maker: Callable[..., Trial]) -> tuple[Callable[[Problem, torch.Generator], Trial], ...]:
    """Of one token, and of two with a bias."""
    return partial(maker, num_tokens=1, has_bias=False), partial(maker, num_tokens=2, has_bias=True)


_MAKERS: dict[str, tuple[Callable[[Problem, torch.Generator], Trial], ...]] = {
    "embed": (_embed,),
    "rms_norm": (_rms_norm,),
    "fused_add_rms_norm": (_fused_add_rms_norm,),
    "silu_and_mul": (_silu_and_mul,),
    "rotary_and_kv_write": (_rotary_and_kv_write, _rotary_without_norms),
    "paged_attention": (_mixed_attention, _decode_attention, _short_chunk_attention),
    "linear": (
        partial(_linear, num_tokens=15),
        *(partial(_linear, num_tokens=num_tokens, has_bias=False) for num_tokens in (1, 2, 4, 8, 40)),
        *(partial(_linear, num_tokens=num_tokens, is_wide=True) for num_tokens in (1, 8, 40)),
        *(partial(_linear, num_tokens=num_tokens, has_bias=False, is_wide=True) for num_tokens in (2, 15, 40)),
    ),
    "greedy_sample": (_greedy_sample,),
    "sample": (_sample,),
    "apply_penalties": (_apply_penalties,),
    "token_logprobs": (_token_logprobs,),
    "quantize_fp8": (partial(_quantize_fp8, is_static=False), partial(_quantize_fp8, is_static=True)),
    "norm_linear": _one_and_two(_norm_linear),
    "norm_gate_up": _one_and_two(_norm_gate_up),
    "linear_add": (*_one_and_two(_add_attended), *_one_and_two(_add_activated)),
    "decode_attention": (
        partial(_decode_layer, positions=(290,), has_norms=True),
        partial(_decode_layer, positions=(33, 0), has_norms=False),
    ),
}
