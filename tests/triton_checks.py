"""What Triton kernels must get exactly right, beyond the trials: run by the interpreter's child and on real devices.

Each check takes a device and a profile and returns what is wrong, or an empty string. This module imports Triton.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from msgspec.structs import replace

from trimaran.ipc.facts import DeviceProfile, Problem
from trimaran.kernels.catalog import CATALOG
from trimaran.kernels.implementation import Services
from trimaran.kernels.in_triton import philox
from trimaran.kernels.reference.attention import paged_attention
from trimaran.kernels.reference.logprobs import token_logprobs
from trimaran.kernels.reference.philox import random_words
from trimaran.kernels.reference.quantize_fp8 import quantize_fp8
from trimaran.kernels.reference.sample import greedy_sample, gumbel, sample
from trimaran.kernels.trials import Trial, _decode_layer, disagreement, meddling

PROBLEM = Problem(dtype="float32", kv_dtype="float32", head_dim=64, num_heads=4, num_kv_heads=2, block_size=16)


def loaded(name: str, profile: DeviceProfile, device: str, problem: Problem = PROBLEM) -> Any:
    implementation = next(implementation for implementation in CATALOG if implementation.name == name)
    refusal = implementation.misfit(profile, problem)
    assert refusal is None, refusal
    return implementation.load(profile, problem, Services(device=device))


@triton.jit
def words_kernel(out, seeds, choices, positions):
    i = tl.program_id(0)
    numbers = 1024 + tl.arange(0, 64)
    words = philox.random_words(tl.load(seeds + i), tl.load(choices + i), tl.load(positions + i), numbers)
    for fourth in tl.static_range(4):
        tl.store(out + i * 256 + fourth * 64 + tl.arange(0, 64), words[fourth].to(tl.int64))


@triton.jit
def noise_kernel(out, words):
    places = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(out + places, philox.gumbel(tl.load(words + places).to(tl.uint32)))


def draws(device: str, profile: DeviceProfile) -> str:
    """The same words as the reference's, for seeds of all sizes and signs; noise as close as it allows."""
    generator = torch.Generator().manual_seed(5)
    seeds = torch.randint(-(2**63), 2**63 - 1, (40,), generator=generator)
    seeds[:3] = torch.tensor([0, -1, 2**63 - 1])
    choices, positions = (torch.randint(0, 2**31 - 1, (40,), generator=generator, dtype=torch.int32) for _ in range(2))
    out = torch.empty(40, 4, 64, dtype=torch.int64, device=device)
    words_kernel[(40,)](out, seeds.to(device), choices.to(device), positions.to(device))
    expected = random_words(seeds, choices, positions, 8192)[:, 4096:].view(40, 4, 1024)[:, :, :64]
    wrong = (out.cpu() != expected).flatten(1).any(1).nonzero().flatten().tolist()
    if wrong:
        return f"words {wrong} differ"
    words = torch.randint(0, 2**32, (64, 1024), generator=generator)
    words[0], words[1], words[2] = torch.arange(1024), 2**32 - 1 - torch.arange(1024), 2**30 + torch.arange(1024)
    words[3] = (2**32 * 0.29289) + torch.arange(1024)
    noise = torch.empty(64, 1024, device=device)
    noise_kernel[(64,)](noise, words.to(device))
    wanted = gumbel(words).double()
    worst = float(((noise.cpu() - wanted).abs() / wanted.abs().clamp(min=1.0)).max())
    return "" if worst < 5e-7 else f"noise is off by {worst}"


def sampled_rows(device: str, profile: DeviceProfile) -> str:
    """Rows of all kinds at once; logits on a coarse grid, so that the edge of top-k and top-p is a tie."""
    generator = torch.Generator().manual_seed(11)
    num_rows, vocab_size = 48, 1300
    logits = (torch.randn(num_rows, vocab_size + 9, generator=generator) * 4).round() / 2
    logits[:, vocab_size:] = 1e5
    logits[1::6] *= -1.0
    logits[2, :1250] = float("-inf")
    logits[3, 9], logits[4, 10], logits[5] = float("nan"), float("inf"), float("-inf")

    def of(*values: float) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (num_rows,), generator=generator)]

    parameters = (
        of(1.0, 0.7, 1.9, 0.0, 0.2, 1e-4),
        of(0, 1, 3, 20, 1299, 5000).int(),
        of(1.0, 0.9, 0.5, 0.05, 0.0, 0.999),
        of(0.0, 0.0, 0.1, 0.7, 1.0),
        torch.randint(-(2**62), 2**62, (num_rows,), generator=generator),
        torch.arange(num_rows, dtype=torch.int32),
        torch.arange(num_rows, dtype=torch.int32) * 77,
    )
    return _sampled_otherwise(device, profile, logits, parameters, vocab_size)


def _sampled_otherwise(
    device: str, profile: DeviceProfile, logits: torch.Tensor, parameters: tuple[torch.Tensor, ...], vocab_size: int
) -> str:
    num_rows = len(logits)
    expected, tokens = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.int64, device=device)
    sample(expected, logits, *parameters, vocab_size)
    kernel = loaded("triton_sample", profile, device)
    kernel(tokens, logits.to(device), *(parameter.to(device) for parameter in parameters), vocab_size)
    wrong = [row for row in range(num_rows) if tokens[row] != expected[row]]
    return f"rows {wrong}: {tokens.cpu()[wrong].tolist()} for {expected[wrong].tolist()}" if wrong else ""


def drawn_in_parts(device: str, profile: DeviceProfile) -> str:
    """Temperature alone, more rows than scratch memory has, several groups of counters, the last one cut."""
    generator = torch.Generator().manual_seed(12)
    num_rows, vocab_size = 20, 9001
    logits = torch.randn(num_rows, vocab_size + 3, generator=generator)
    logits[:, vocab_size:] = 1e5
    parameters = (
        torch.linspace(0.3, 2.0, num_rows),
        torch.zeros(num_rows, dtype=torch.int32),
        torch.ones(num_rows),
        torch.zeros(num_rows),
        torch.randint(-(2**62), 2**62, (num_rows,), generator=generator),
        torch.arange(num_rows, dtype=torch.int32),
        torch.arange(num_rows, dtype=torch.int32) * 77,
    )
    return _sampled_otherwise(device, profile, logits, parameters, vocab_size)


def greedy_rows(device: str, profile: DeviceProfile) -> str:
    """Ties go to the first id, also across the parts of a row; more rows than scratch memory has."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(40, 9000, generator=generator).round()
    logits[7, 8999], logits[8, 0] = float("nan"), float("inf")
    logits[9] = float("-inf")
    expected, tokens = torch.empty(40, dtype=torch.int64), torch.empty(40, dtype=torch.int64, device=device)
    greedy_sample(expected, logits, 9000)
    loaded("triton_greedy_sample", profile, device)(tokens, logits.to(device), 9000)
    wrong = (tokens.cpu() != expected).nonzero().flatten().tolist()
    return f"rows {wrong}" if wrong else ""


def ranks_and_tops(device: str, profile: DeviceProfile) -> str:
    """Ranks count what is strictly better; alternatives are in order, the lower id first among equals."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(6, 1500, generator=generator) * 8).round() / 8
    tokens = torch.tensor([5, 0, -1, 1499, 700, 3])
    kernel = loaded("triton_token_logprobs", profile, device)
    for num_top in (0, 1, 5, 20, 37):
        made = [
            (
                torch.empty(6, device=where),
                torch.empty(6, dtype=torch.int32, device=where),
                torch.empty(6, num_top, device=where),
                torch.empty(6, num_top, dtype=torch.int32, device=where),
            )
            for where in ("cpu", device)
        ]
        token_logprobs(*made[0], logits, tokens, 1500)
        kernel(*made[1], logits.to(device), tokens.to(device), 1500)
        ordered = logits.double().neg().sort(dim=-1, stable=True).indices[:, :num_top]
        values, ranks, tops, ids = (tensor.cpu() for tensor in made[1])
        agrees = torch.allclose(values, made[0][0], atol=1e-5) and torch.allclose(tops, made[0][2], atol=1e-5)
        if not agrees or not torch.equal(ranks, made[0][1]) or not torch.equal(ids.long(), ordered):
            return f"{num_top} alternatives: ranks {ranks.tolist()}, ids {ids.tolist()} for {ordered.tolist()}"
    return ""


def every_bfloat16(device: str, profile: DeviceProfile) -> str:
    """All 65536 values, and float32 ones at the middle between two of e4m3, which round to even."""
    everything = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(64, 1024)
    codes = torch.arange(0, 126, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = torch.cat(((codes[:-1] + codes[1:]) / 2, -(codes[:-1] + codes[1:]) / 2)).view(1, -1)
    kernel = loaded("triton_quantize_fp8", profile, device)
    for x in (everything, middles):
        expected, out = (torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=where) for where in ("cpu", device))
        quantize_fp8(expected, torch.ones(1), x, True)
        kernel(out, torch.ones(1, device=device), x.to(device), True)
        got, wanted = out.cpu().float(), expected.float()
        wrong = ~((got == wanted) | (got.isnan() & wanted.isnan()))
        if wrong.any():
            return f"{x[wrong][:5].tolist()} became {got[wrong][:5].tolist()}, not {wanted[wrong][:5].tolist()}"
    return ""


def wide_rows(device: str, profile: DeviceProfile) -> str:
    """Rows wider than a block, which are read twice; rows that do not lie side by side."""
    from trimaran.kernels.reference.rms_norm import fused_add_rms_norm, rms_norm

    generator = torch.Generator().manual_seed(4)
    wide = torch.randn(3, 20_000, generator=generator)
    x, residual, weight = wide[:, :18_000], torch.randn(3, 18_000, generator=generator), wide[0, 1000:19_000].clone()
    expected, out = torch.empty(3, 18_000), torch.empty(3, 18_000, device=device)
    rms_norm(expected, x, weight, 1e-5)
    loaded("triton_rms_norm", profile, device)(out, wide.to(device)[:, :18_000], weight.to(device), 1e-5)
    if not torch.allclose(out.cpu(), expected, atol=1e-4):
        return "rms_norm"
    ours = residual.clone().to(device)
    fused_add_rms_norm(expected, residual, x, weight, 1e-5)
    kernel = loaded("triton_fused_add_rms_norm", profile, device)
    kernel(out, ours, wide.to(device)[:, :18_000], weight.to(device), 1e-5)
    agrees = torch.allclose(out.cpu(), expected, atol=1e-4) and torch.equal(ours.cpu(), residual)
    return "" if agrees else "fused_add_rms_norm"


def linears(device: str, profile: DeviceProfile) -> str:
    """Shared inputs whose last share is cut or empty, twice, since counters must be as they were; three and four
    tokens of a small weight; more outputs than scratch memory has sums for; more than 16 tokens, some tiles early.
    """
    generator = torch.Generator().manual_seed(6)
    wide = {"linear": {"small_dot_tokens": 32}, "linear_dot_small": {"early": 2, "tile": 128, "pdl": 1}}
    for best, most_tokens in (({}, 16), (wide, 32)):
        local = replace(profile, capability=replace(profile.capability, best=best))
        kernel = loaded("triton_linear", local, device, replace(PROBLEM, dtype="bfloat16", kv_dtype="bfloat16"))
        for num_outputs, num_inputs in ((40, 1024), (33, 1280), (16, 1400), (48, 2100), (7, 4096), (16, 77)):
            weight = (torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5).bfloat16()
            bias = torch.randn(num_outputs, generator=generator).bfloat16()
            for num_tokens in (1, 3, 4, 5, 5, 16, 17) if not best else (5, 17, 32, 32, 33):
                x = torch.randn(num_tokens, num_inputs, generator=generator).bfloat16()
                packed = kernel.pack(weight.to(device), bias.to(device))
                out = torch.full((num_tokens, num_outputs), float("nan"), device=device)
                kernel(out, x.to(device), packed)
                worst = float((out.cpu() - (x.double() @ weight.double().T + bias.double())).abs().max())
                if not worst < (1e-5 if num_tokens <= most_tokens else 4e-2):
                    return f"{num_tokens} tokens, {num_outputs} x {num_inputs}, {best}: off by {worst}"
    return ""


def long_contexts(device: str, profile: DeviceProfile, name: str, window: int) -> str:
    """Lengths around the edges of tiles, blocks and shares; chunks behind a cached prefix; a table wider than used."""
    generator = torch.Generator().manual_seed(window)
    steps = (
        ((1, 1, 1), (520, 64, 129)),
        ((40, 1, 1, 0, 17), (400, 300, 1, 7, 17)),
        ((1,), (700,)),
    )
    kernel = loaded(name, profile, device)
    for counts, lengths in steps:
        width = -(-max(lengths) // 16)
        num_blocks = width * len(lengths)
        tables = torch.randperm(num_blocks, generator=generator).to(torch.int32).view(len(lengths), width)
        tables = torch.nn.functional.pad(tables, (0, 120 - width))
        rows = torch.arange(len(lengths), dtype=torch.int32).flip(0)
        keys, values = (torch.randn(num_blocks, 16, 2, 64, generator=generator) for _ in range(2))
        q = torch.randn(sum(counts), 4, 64, generator=generator)
        starts = torch.tensor((0, *counts), dtype=torch.int32).cumsum(0).to(torch.int32)
        inputs = (q, keys, values, tables, rows, starts, torch.tensor(lengths, dtype=torch.int32))
        expected, out = torch.empty_like(q), torch.empty_like(q, device=device)
        paged_attention(expected, *inputs, 0.125, window)
        kernel(out, *(tensor.to(device) for tensor in inputs), 0.125, window)
        worst = float((out.cpu() - expected).abs().max())
        if not worst < 1e-5:
            return f"lengths {lengths}, counts {counts}: off by {worst}"
    return ""


def fused_linears(device: str, profile: DeviceProfile) -> str:
    """One to four tokens; rows of one tile and of several, with a masked last one and without; outputs that a program's
    rows divide and others; with a bias and without; other dtypes of residual and output.
    """
    generator = torch.Generator().manual_seed(6)
    narrow = {name: {"block_k": 128} for name in ("norm_linear", "norm_gate_up", "linear_add")}
    for best, num_inputs, num_outputs in (({}, 96, 8), ({}, 3072, 12), (narrow, 384, 6), (narrow, 420, 16)):
        local = replace(profile, capability=replace(profile.capability, best=best))
        for num_tokens in (1, 2, 3, 4):
            has_bias = num_tokens % 2 == 0
            norm = torch.randn(num_inputs, generator=generator)
            weight = torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5
            bias = torch.randn(num_outputs, generator=generator) if has_bias else None
            dtype = torch.bfloat16 if num_tokens == 3 else torch.float32
            x = torch.randn(num_tokens, num_inputs, generator=generator).to(dtype)
            residual = torch.randn(num_tokens, num_outputs, generator=generator)
            calls: dict[str, tuple[Any, ...]] = {
                "norm_linear": (torch.empty(num_tokens, num_outputs), x, norm, weight, bias, 1e-6),
                "norm_gate_up": (torch.empty(num_tokens, num_outputs // 2, dtype=dtype), x, norm, weight, bias, 1e-6),
                "linear_add": (residual, x, weight, bias),
            }
            for name, arguments in calls.items():
                trial = Trial(arguments=arguments, written=(0,), tolerance=1e-2 if dtype == torch.bfloat16 else 1e-5)
                wrong = differs(name, device, local, trial, PROBLEM)
                if wrong:
                    return f"{num_tokens} tokens, weight {num_outputs} x {num_inputs}, {best}: {wrong}"
    return ""


def decode_attentions(device: str, profile: DeviceProfile) -> str:
    """One to four sequences of all lengths around tiles and shares, padding among them; few and many parts."""
    cases: tuple[tuple[tuple[int, ...], int, dict[str, Any], bool, int], ...] = (
        ((0, 2), 32, {}, True, 0),
        ((1,), 1, {}, True, 0),
        ((15, 16), 4, {}, False, 0),
        ((17, 0, 64), 32, {"head_dim": 80, "num_heads": 14}, True, 0),
        ((500, 63, 0, 129), 32, {"rotary_dim": 20}, True, 0),
        ((500, 63, 0, 129), 8, {"num_heads": 2}, False, 100),
        ((700,), 32, {"head_dim": 128, "rotary_dim": 64, "num_heads": 6}, True, 0),
        ((700,), 4, {"head_dim": 112, "block_size": 8}, True, 33),
        ((333, 1), 2, {"head_dim": 96, "block_size": 64, "num_heads": 40}, False, 17),
    )
    for positions, max_splits, sizes, has_norms, window in cases:
        problem = replace(PROBLEM, **sizes)
        best = {"decode_attention": {"keys": 16, "max_splits": max_splits}}
        local = replace(profile, capability=replace(profile.capability, best=best))
        made = _decode_layer(problem, torch.Generator().manual_seed(8), positions, has_norms=has_norms)
        trial = Trial(arguments=(*made.arguments[:-1], window), written=made.written, tolerance=2e-5)
        wrong = differs("decode_attention", device, local, trial, problem)
        if wrong:
            return f"{positions}, {max_splits} parts, {sizes}, window {window}: {wrong}"
    return ""


def differs(name: str, device: str, profile: DeviceProfile, trial: Trial, problem: Problem) -> str | None:
    """Called twice: what a kernel keeps between calls must be as it was."""
    kernel = loaded(f"triton_{name}", profile, device, problem)
    reference = next(each for each in CATALOG if each.name == f"plain_{name}").load(profile, problem, Services())
    for _ in range(2):
        ours, expected = trial.copy(), trial.copy()
        moved = tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in ours.arguments)
        ours = Trial(arguments=moved, written=trial.written, tolerance=trial.tolerance)
        kernel(*ours.arguments)
        reference(*expected.arguments)
        reason = disagreement(name, ours, expected) or meddling(name, ours, expected)
        if reason is not None:
            return reason
    return None


CHECKS: dict[str, Callable[[str, DeviceProfile], str]] = {
    check.__name__: check
    for check in (
        draws,
        sampled_rows,
        drawn_in_parts,
        greedy_rows,
        ranks_and_tops,
        every_bfloat16,
        wide_rows,
        linears,
        fused_linears,
        decode_attentions,
    )
}
ATTENTIONS = tuple(f"triton_paged_attention_{name}" for name in ("tiled", "bulk", "lean"))
