"""Choosing a token from logits. R rows, V vocabulary entries including padding.

Rows are shared among programs, then the best of the parts is taken: of logits in `greedy_sample`, of logits and noise
in `sample`, which reads them once. Before, one program a row finds what top-k, top-p and min-p keep, as the smallest
number kept; a row that asks for none of them costs it nothing. Thresholds are found by their bits instead of sorting.

Words are the reference's, noise is as close as it allows. Sums of probabilities are float64, but their order is not the
reference's, so what is kept may differ where a sum meets top_p within about one part in 10^15. Ties among logits are
exact.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...ipc.facts import DeviceCapability, Problem
from .configurations import Configuration, register_limit
from .launching import TritonKernel, next_power_of_two
from .philox import gumbel, random_words
from .selection import key_of_rank, number_of_key, ordered_key, scaled

_INVALID_TOKEN = tl.constexpr(-1)
_GREEDY_TEMPERATURE = tl.constexpr(1e-4)
_MAX_PARTS = 64
_LOWEST_KEY = tl.constexpr(0x007FFFFF)  # of -inf


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
def _sum_of_weights(row, num_entries, temperature, highest, lowest_key, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, num_entries, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        weight, _ = _weights(row, ids, ids < num_entries, temperature, highest, lowest_key)
        total += weight
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
def _key_of_least(highest, min_p):
    """Of the smallest float32 whose probability is at least min_p times that of the highest."""
    least = highest.to(tl.float64) + tl.log(min_p.to(tl.float64))
    nearest = least.to(tl.float32)
    key = ordered_key(nearest)
    return tl.where(nearest.to(tl.float64) < least, key + 1, key)


@triton.jit(do_not_specialize=["vocab_size"])
def thresholds_kernel(
    thresholds, logits, temperatures, top_ks, top_ps, min_ps, logits_stride, vocab_size, BLOCK: tl.constexpr,
    WEIGHED: tl.constexpr,
):  # fmt: skip
    """Grid (R). The smallest scaled logit kept."""
    row = tl.program_id(0).to(tl.int64)
    entries = logits + row * logits_stride
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    lowest_key = tl.full([], _LOWEST_KEY, tl.uint32)
    takes_k = (top_k > 0) & (top_k < vocab_size)
    if (temperature >= _GREEDY_TEMPERATURE) & (takes_k | (top_p < 1.0) | (min_p > 0.0)):
        top, _ = _best(entries, 0, vocab_size, BLOCK)
        highest = tl.div_rn(top, temperature)
        if _is_finite(highest):
            if takes_k:
                lowest_key, _ = key_of_rank(entries, vocab_size, top_k, temperature, BLOCK)
            if top_p < 1.0:
                total = _sum_of_weights(entries, vocab_size, temperature, highest, lowest_key, BLOCK)
                wanted = top_p.to(tl.float64) * total
                nucleus = _nucleus_key(entries, vocab_size, temperature, highest, lowest_key, wanted, WEIGHED)
                lowest_key = tl.maximum(lowest_key, tl.minimum(nucleus, ordered_key(highest)))
            if min_p > 0.0:
                lowest_key = tl.maximum(lowest_key, _key_of_least(highest, min_p))
    tl.store(thresholds + row, number_of_key(lowest_key))


@triton.jit(do_not_specialize=["vocab_size", "part_size"])
def draw_parts_kernel(
    most, ids, thresholds, logits, temperatures, seeds, choices, positions, logits_stride, vocab_size, part_size,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (R, parts). A part is a range of counter numbers; a block of them lies within 1024 and has four tiles of
    entries that lie side by side. A NaN counts as +inf.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    logits += row * logits_stride
    temperature = tl.load(temperatures + row)
    is_drawn = temperature >= _GREEDY_TEMPERATURE
    temperature = tl.where(is_drawn, temperature, 1.0)
    threshold = tl.load(thresholds + row)
    seed = tl.load(seeds + row)
    choice = tl.load(choices + row)
    position = tl.load(positions + row)
    offsets = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.full([BLOCK], 2147483647, tl.int32)
    for begin in range(part * part_size, (part + 1) * part_size, BLOCK):
        words = random_words(seed, choice, position, begin + offsets)
        first = (begin // 1024) * 4096 + begin % 1024
        for fourth in tl.static_range(4):
            entries = first + fourth * 1024 + offsets
            x = scaled(logits, entries, entries < vocab_size, temperature)
            total = x + tl.where(is_drawn, gumbel(words[fourth]), 0.0)
            total = tl.where(x >= threshold, total, float("-inf"))
            total = tl.where(x == x, total, float("inf"))
            is_better = (total > best) | ((total == best) & (entries < at))
            best = tl.where(is_better, total, best)
            at = tl.where(is_better, entries, at)
    top = tl.max(best, 0)
    tl.store(most + row * PARTS + part, top)
    tl.store(ids + row * PARTS + part, tl.min(tl.where(best == top, at, 2147483647), 0))


class _InParts(TritonKernel):
    """Scratch memory holds each part's best; a call with more rows than it was made for goes in turns."""

    def __init__(self, problem: Problem, device: str) -> None:
        self._rows = max(16, problem.max_rows)
        self._most = torch.empty(self._rows, _MAX_PARTS, dtype=torch.float32, device=device)
        self._ids = torch.empty(self._rows, _MAX_PARTS, dtype=torch.int32, device=device)
        self.workspace_bytes = self._most.nbytes + self._ids.nbytes

    def __call__(self, *arguments: Any) -> None:
        *tensors, vocab_size = arguments
        for begin in range(0, len(tensors[0]), self._rows):
            tokens, *others = (tensor[begin : begin + self._rows] for tensor in tensors)
            num_parts = self._launch_parts(*others, vocab_size)
            best = (self._most, self._ids, num_parts)
            self.launch(greedy_choice_kernel, (len(tokens),), tokens, *best, PARTS=_MAX_PARTS, num_warps=1)

    def _launch_parts(self, *arguments: Any) -> int:
        """The number of parts."""
        raise NotImplementedError


def _shared(num_blocks: int, num_rows: int, num_programs: int) -> tuple[int, int]:
    """`(blocks of a part, parts)` of each row, such that there are about so many programs."""
    most_parts = max(1, min(_MAX_PARTS, num_programs // num_rows))
    blocks_per_part = -(-num_blocks // most_parts)
    return blocks_per_part, -(-num_blocks // blocks_per_part)


class TritonGreedySample(_InParts):
    def __init__(self, configuration: Configuration, problem: Problem, device: str) -> None:
        super().__init__(problem, device)
        self._block, self._num_warps = configuration["block"], configuration["num_warps"]

    def _launch_parts(self, *arguments: Any) -> int:
        logits, vocab_size = arguments
        blocks_per_part, num_parts = _shared(-(-vocab_size // self._block), len(logits), 512)
        numbers = (logits.stride(0), vocab_size, blocks_per_part * self._block)
        constants = {"PARTS": _MAX_PARTS, "BLOCK": self._block, "num_warps": self._num_warps}
        grid = (len(logits), num_parts)
        self.launch(greedy_parts_kernel, grid, self._most, self._ids, logits, *numbers, **constants)
        return num_parts


class TritonSample(_InParts):
    def __init__(
        self, configuration: Configuration, capability: DeviceCapability, problem: Problem, device: str
    ) -> None:
        super().__init__(problem, device)
        self._configuration = configuration
        self._limit = register_limit(capability.architecture, configuration["num_warps"])
        self._thresholds = torch.empty(self._rows, dtype=torch.float32, device=device)
        self.workspace_bytes += self._thresholds.nbytes

    def _launch_parts(self, *arguments: Any) -> int:
        logits, temperatures, top_ks, top_ps, min_ps, *keys, vocab_size = arguments
        self._launch_thresholds(logits, temperatures, top_ks, top_ps, min_ps, vocab_size)
        block = min(1024, self._configuration["draw_block"])
        blocks_per_part, num_parts = _shared(-(-vocab_size // 4096) * (1024 // block), len(logits), 1024)
        numbers = (logits.stride(0), vocab_size, blocks_per_part * block)
        constants = {"PARTS": _MAX_PARTS, "BLOCK": block, "num_warps": self._configuration["draw_warps"]}
        tensors = (self._most, self._ids, self._thresholds, logits, temperatures, *keys)
        self.launch(draw_parts_kernel, (len(logits), num_parts), *tensors, *numbers, **constants)
        return num_parts

    def _launch_thresholds(self, logits: torch.Tensor, *parameters: Any) -> None:
        *tensors, vocab_size = parameters
        chosen = self._configuration
        block = min(chosen["block"], next_power_of_two(vocab_size))
        constants = {"BLOCK": block, "WEIGHED": min(block, chosen["weighed"]), "num_warps": chosen["num_warps"]}
        numbers = (logits.stride(0), vocab_size)
        grid = (len(logits),)
        self.launch(thresholds_kernel, grid, self._thresholds, logits, *tensors, *numbers, **constants, **self._limit)
