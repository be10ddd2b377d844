"""Arguments of a step's size for kernels, and the launch choices worth trying. Torch is imported with this file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...ipc.facts import Problem
from ...kernels.trials import DTYPES

_CONTEXT = 1024
_PREFIX = "triton_"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Candidates for one row of the configuration table, and the batch they are tried on."""

    configuration: str
    num_tokens: int
    candidates: tuple[Mapping[str, int], ...]


def _warps(*numbers: int) -> tuple[Mapping[str, int], ...]:
    return tuple({"num_warps": number} for number in numbers)


def _attention(keys: tuple[int, ...], warps: tuple[int, ...]) -> tuple[Mapping[str, int], ...]:
    return tuple({"decode_keys": k, "decode_warps": w, "decode_stages": s} for k in keys for w in warps for s in (2, 3))


_TUNABLE: Mapping[str, Choices] = {
    "rms_norm": Choices(configuration="rms_norm", num_tokens=256, candidates=_warps(2, 4, 8, 16)),
    "silu_and_mul": Choices(configuration="silu_and_mul", num_tokens=256, candidates=_warps(2, 4, 8)),
    "rotary_and_kv_write": Choices(configuration="rotary_and_kv_write", num_tokens=256, candidates=_warps(1, 2, 4)),
    "embed": Choices(configuration="embed", num_tokens=256, candidates=_warps(2, 4, 8)),
    "greedy_sample": Choices(configuration="greedy_sample", num_tokens=64, candidates=_warps(4, 8, 16)),
    "paged_attention_tiled": Choices(
        configuration="paged_attention_tiled", num_tokens=64, candidates=_attention((32, 64, 128), (2, 4))
    ),
    "paged_attention_bulk": Choices(
        configuration="paged_attention_bulk", num_tokens=64, candidates=_attention((32, 64, 128), (2, 4))
    ),
}


def tunable(implementation: str) -> Choices | None:
    """None for an implementation that has no choices, or none worth a measurement."""
    return _TUNABLE.get(implementation.removeprefix(_PREFIX)) if implementation.startswith(_PREFIX) else None


def workload(kernel: str, problem: Problem, device: torch.device, *, num_tokens: int) -> tuple[Any, ...]:
    """One decode step's arguments for the kernel; attention sees 1,024 positions of each sequence."""
    dtype = DTYPES[problem.dtype]

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, device=device, dtype=torch.int32)

    hidden, head_dim = problem.hidden_size, problem.head_dim
    heads, kv_heads = problem.num_heads, problem.num_kv_heads
    num_blocks = num_tokens * (_CONTEXT // problem.block_size)
    match kernel:
        case "rms_norm":
            x = floats(num_tokens, hidden)
            return torch.empty_like(x), x, floats(hidden), 1e-5
        case "silu_and_mul":
            out = torch.empty(num_tokens, problem.intermediate_size, dtype=dtype, device=device)
            return out, floats(num_tokens, 2 * problem.intermediate_size)
        case "embed":
            table = floats(32_000, hidden)
            out = torch.empty(num_tokens, hidden, dtype=dtype, device=device)
            return out, integers(32_000, num_tokens), integers(32_000, num_tokens).long(), table, 0
        case "greedy_sample":
            logits = torch.randn(num_tokens, problem.vocab_size, device=device)
            return torch.empty(num_tokens, dtype=torch.int64, device=device), logits, problem.vocab_size
        case "rotary_and_kv_write":
            caches = [floats(num_blocks, problem.block_size, kv_heads, head_dim) for _ in range(2)]
            angles = torch.rand(_CONTEXT, problem.rotary_dim // 2, device=device)
            cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
            slots = torch.randperm(num_blocks * problem.block_size, device=device)[:num_tokens].to(torch.int32)
            q = torch.empty(num_tokens, heads, head_dim, dtype=dtype, device=device)
            qkv = floats(num_tokens, (heads + 2 * kv_heads) * head_dim)
            return q, qkv, integers(_CONTEXT, num_tokens), slots, cos_sin, *caches, None, None, 1e-6
        case "paged_attention":
            caches = [floats(num_blocks, problem.block_size, kv_heads, head_dim) for _ in range(2)]
            tables = torch.randperm(num_blocks, device=device).to(torch.int32).view(num_tokens, -1)
            starts = torch.arange(num_tokens + 1, device=device, dtype=torch.int32)
            rows = starts[:num_tokens]
            lengths = torch.full((num_tokens,), _CONTEXT, device=device, dtype=torch.int32)
            q = floats(num_tokens, heads, head_dim)
            return torch.empty_like(q), q, *caches, tables, rows, starts, lengths, head_dim**-0.5, 0
    raise AssertionError(f"no workload for {kernel}")
