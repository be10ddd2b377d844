"""Choosing a token from logits. R rows, V vocabulary entries including padding.

`greedy_sample` shares a row among programs, then takes the best of the parts. `sample` gives a row to one program,
which finds the thresholds of top-k and top-p by their bits instead of sorting. Draws have the reference's bits, and
sums are float64; but their order is not the reference's, so a result may differ where a sum meets its target (top_p,
min_p, the draw) within about one part in 10^15. Ties among logits are exact.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...ipc.facts import DeviceCapability, Problem
from .configurations import Configuration, register_limit
from .launching import TritonKernel, next_power_of_two
from .philox import uniform_draw
from .selection import key_of_rank, ordered_key, scaled

_INVALID_TOKEN = tl.constexpr(-1)
_GREEDY_TEMPERATURE = tl.constexpr(1e-4)
_MAX_PARTS = 64


@triton.jit
def _best(row, begin, end, BLOCK: tl.constexpr):
    """`(most, id)` of the entries from begin to end; the first id among equals. A NaN counts as +inf."""
    offsets = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, BLOCK):
        ids = start + offsets
        x = tl.load(row + ids, mask=ids < end, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))
        is_better = x > most
        most = tl.where(is_better, x, most)
        at = tl.where(is_better, ids, at)
    top = tl.max(most, 0)
    return top, tl.min(tl.where(most == top, at, 2147483647), 0)


@triton.jit
def _is_finite(x):
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit(do_not_specialize=["vocab_size", "part_size"])
def greedy_parts_kernel(most, ids, logits, logits_stride, vocab_size, part_size, PARTS: tl.constexpr,
                        BLOCK: tl.constexpr):  # fmt: skip
    """Grid (R, parts)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    begin = part * part_size
    end = tl.minimum(begin + part_size, vocab_size)
    top, at = _best(logits + row * logits_stride, begin, end, BLOCK)
    tl.store(most + row * PARTS + part, top)
    tl.store(ids + row * PARTS + part, at)


@triton.jit(do_not_specialize=["num_parts"])
def greedy_choice_kernel(tokens, most, ids, num_parts, PARTS: tl.constexpr):
    """Grid (R)."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    tops = tl.load(most + row * PARTS + parts, mask=parts < num_parts, other=float("-inf"))
    at = tl.load(ids + row * PARTS + parts, mask=parts < num_parts, other=0)
    top = tl.max(tops, 0)
    best = tl.min(tl.where((tops == top) & (parts < num_parts), at, 2147483647), 0)
    tl.store(tokens + row, tl.where(_is_finite(top), best, _INVALID_TOKEN).to(tl.int64))


@triton.jit
def _weights(row, ids, inside, temperature, highest, lowest_key):
    """Unnormalised float64 probabilities of entries whose key is at least lowest_key, zeros elsewhere; and keys."""
    x = scaled(row, ids, inside, temperature)
    key = ordered_key(x)
    weight = tl.exp(x.to(tl.float64) - highest.to(tl.float64))
    return tl.where(inside & (key >= lowest_key), weight, 0.0), key


@triton.jit
def _sum_of_weights(row, num_entries, temperature, highest, lowest_key, least, BLOCK: tl.constexpr):
    """Over weights of at least `least`."""
    total = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, num_entries, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        weight, _ = _weights(row, ids, ids < num_entries, temperature, highest, lowest_key)
        total += tl.where(weight >= least, weight, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _with_nucleus_digit(row, num_entries, found, temperature, highest, lowest_key, wanted, SHIFT: tl.constexpr,
                        BLOCK: tl.constexpr):  # fmt: skip
    """`found` with four more bits, those from SHIFT on: the first for which what lies above every key that begins with
    them sums to less than wanted.
    """
    digits = tl.arange(0, 16)
    sums = tl.zeros([BLOCK, 16], tl.float64)
    ends = found | (digits.to(tl.uint32) << SHIFT) | ((1 << SHIFT) - 1)
    for begin in range(0, num_entries, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        weight, key = _weights(row, ids, ids < num_entries, temperature, highest, lowest_key)
        sums += tl.where(key[:, None] > ends[None, :], weight[:, None], 0.0)
    digit = tl.min(tl.where(tl.sum(sums, 0) < wanted, digits, 15), 0)
    return found | (digit.to(tl.uint32) << SHIFT)


@triton.jit
def _nucleus_key(row, num_entries, temperature, highest, lowest_key, wanted, BLOCK: tl.constexpr):
    """The smallest key above which the weights sum to less than `wanted`: entries from it on are the nucleus."""
    found = tl.zeros([], tl.uint32)
    for step in tl.static_range(8):
        found = _with_nucleus_digit(
            row, num_entries, found, temperature, highest, lowest_key, wanted, 28 - 4 * step, BLOCK
        )
    return found


@triton.jit
def _drawn(row, num_entries, temperature, highest, lowest_key, least, target, BLOCK: tl.constexpr):
    """The first kept id whose running sum exceeds target; the last kept one where rounding leaves none."""
    before = tl.zeros([], tl.float64)
    first = tl.full([], 2147483647, tl.int32)
    last = tl.full([], 0, tl.int32)
    for begin in range(0, num_entries, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        weight, _ = _weights(row, ids, ids < num_entries, temperature, highest, lowest_key)
        weight = tl.where(weight >= least, weight, 0.0)
        sums = before + tl.cumsum(weight, 0)
        is_kept = weight > 0.0
        first = tl.minimum(first, tl.min(tl.where(is_kept & (sums > target), ids, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(is_kept, ids, 0), 0))
        before += tl.sum(weight, 0)
    return tl.minimum(first, last)


@triton.jit(do_not_specialize=["vocab_size"])
def sample_kernel(
    tokens, logits, temperatures, top_ks, top_ps, min_ps, seeds, choices, positions, logits_stride, vocab_size,
    BLOCK: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """Grid (R)."""
    row = tl.program_id(0).to(tl.int64)
    entries = logits + row * logits_stride
    top, chosen = _best(entries, 0, vocab_size, BLOCK)
    temperature = tl.load(temperatures + row)
    if not _is_finite(top):
        chosen = tl.full([], _INVALID_TOKEN, tl.int32)
    elif temperature >= _GREEDY_TEMPERATURE:
        highest = tl.div_rn(top, temperature)
        lowest_key = tl.zeros([], tl.uint32)
        top_k = tl.load(top_ks + row)
        if (top_k > 0) & (top_k < vocab_size):
            lowest_key, _ = key_of_rank(entries, vocab_size, top_k, temperature, BLOCK)
        top_p = tl.load(top_ps + row).to(tl.float64)
        if top_p < 1.0:
            wanted = top_p * _sum_of_weights(entries, vocab_size, temperature, highest, lowest_key, 0.0, BLOCK)
            nucleus = _nucleus_key(entries, vocab_size, temperature, highest, lowest_key, wanted, WEIGHED)
            lowest_key = tl.maximum(lowest_key, tl.minimum(nucleus, ordered_key(highest)))
        least = tl.load(min_ps + row).to(tl.float64)  # the largest weight is 1
        total = _sum_of_weights(entries, vocab_size, temperature, highest, lowest_key, least, BLOCK)
        draw = uniform_draw(tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row))
        chosen = _drawn(entries, vocab_size, temperature, highest, lowest_key, least, draw * total, BLOCK)
    tl.store(tokens + row, chosen.to(tl.int64))


class TritonGreedySample(TritonKernel):
    """Scratch memory holds each part's best; a call with more rows than it was made for goes in turns."""

    def __init__(self, configuration: Configuration, problem: Problem, device: str) -> None:
        self._block, self._num_warps = configuration["block"], configuration["num_warps"]
        self._rows = max(16, problem.max_rows)
        self._most = torch.empty(self._rows, _MAX_PARTS, dtype=torch.float32, device=device)
        self._ids = torch.empty(self._rows, _MAX_PARTS, dtype=torch.int32, device=device)
        self.workspace_bytes = self._most.nbytes + self._ids.nbytes

    def __call__(self, *arguments: Any) -> None:
        tokens, logits, vocab_size = arguments
        for begin in range(0, logits.shape[0], self._rows):
            self._some(tokens[begin : begin + self._rows], logits[begin : begin + self._rows], vocab_size)

    def _some(self, tokens: torch.Tensor, logits: torch.Tensor, vocab_size: int) -> None:
        num_rows, most_parts = logits.shape[0], max(1, min(_MAX_PARTS, 512 // logits.shape[0]))
        blocks_per_part = -(-vocab_size // (self._block * most_parts))
        part_size = blocks_per_part * self._block
        num_parts = -(-vocab_size // part_size)
        buffers, num_warps = (self._most, self._ids), self._num_warps
        self.launch(
            greedy_parts_kernel,
            (num_rows, num_parts),
            *(*buffers, logits, logits.stride(0), vocab_size, part_size),
            PARTS=_MAX_PARTS,
            BLOCK=self._block,
            num_warps=num_warps,
        )
        self.launch(greedy_choice_kernel, (num_rows,), tokens, *buffers, num_parts, PARTS=_MAX_PARTS, num_warps=1)


class TritonSample(TritonKernel):
    def __init__(self, configuration: Configuration, capability: DeviceCapability) -> None:
        self._configuration = configuration
        self._limit = register_limit(capability.architecture, configuration["num_warps"])

    def __call__(self, *arguments: Any) -> None:
        tokens, logits, *parameters, vocab_size = arguments
        chosen = self._configuration
        block = min(chosen["block"], next_power_of_two(vocab_size))
        constants = {"BLOCK": block, "WEIGHED": min(block, chosen["weighed"]), "num_warps": chosen["num_warps"]}
        if logits.shape[0]:
            numbers = (logits.stride(0), vocab_size)
            self.launch(
                sample_kernel, (logits.shape[0],), tokens, logits, *parameters, *numbers, **constants, **self._limit
            )
