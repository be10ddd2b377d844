"""Log probabilities of the raw logits. R rows, V vocabulary entries including padding, K most likely ones asked.

The K most likely are found by their bits and only then sorted. Of equal logits at the edge the lowest ids are taken
(the reference leaves open which). Ranks compare logits, not their rounded log probabilities.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..reference.logprobs import token_logprobs
from .configurations import Configuration
from .launching import TritonKernel, next_power_of_two
from .selection import key_of_rank, ordered_key, scaled

_MAX_TOP = 1024
"""More alternatives than this are left to the reference: they would not fit a program's registers."""


@triton.jit
def _log_sum(row, vocab_size, BLOCK: tl.constexpr):
    """`(largest, logarithm of the sum of exp(x - largest))`."""
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, vocab_size, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        most = tl.maximum(most, x, propagate_nan=tl.PropagateNan.ALL)
    largest = tl.max(most, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocab_size, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        total += tl.exp(x - largest)
    return largest, tl.log(tl.sum(total, 0))


@triton.jit
def _collect(top_logits, top_ids, row, vocab_size, num_top, BLOCK: tl.constexpr):
    """The num_top largest entries in order of ids: those above the key of that rank, and the first ones at it."""
    edge, at_edge = key_of_rank(row, vocab_size, num_top, 1.0, BLOCK)
    num_written = tl.zeros([], tl.int32)
    num_edge = tl.zeros([], tl.int32)
    for begin in range(0, vocab_size, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        inside = ids < vocab_size
        x = scaled(row, ids, inside, 1.0)
        key = ordered_key(x)
        is_edge = inside & (key == edge)
        edge_rank = num_edge + tl.cumsum(is_edge.to(tl.int32), 0)
        is_taken = (inside & (key > edge)) | (is_edge & (edge_rank <= at_edge))
        place = num_written + tl.cumsum(is_taken.to(tl.int32), 0) - 1
        is_taken = is_taken & (place < num_top)  # never beyond the row, whatever NaN did to its keys
        tl.store(top_logits + place, x, mask=is_taken)
        tl.store(top_ids + place, ids, mask=is_taken)
        num_edge += tl.sum(is_edge.to(tl.int32), 0)
        num_written += tl.sum(is_taken.to(tl.int32), 0)


@triton.jit(do_not_specialize=["top_stride", "top_ids_stride", "vocab_size", "num_top"])
def token_logprobs_kernel(
    logprobs, ranks, log_sums, top_logits, top_ids, logits, tokens,
    logits_stride, top_stride, top_ids_stride, vocab_size, num_top, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (R). Leaves the most likely entries unsorted, as logits, and what they are measured from in log_sums."""
    r = tl.program_id(0).to(tl.int64)
    row = logits + r * logits_stride
    largest, log_sum = _log_sum(row, vocab_size, BLOCK)
    token = tl.maximum(tl.load(tokens + r).to(tl.int64), 0)
    own = tl.load(row + token).to(tl.float32)
    num_better = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, vocab_size, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        num_better += (x > own).to(tl.int32)
    tl.store(logprobs + r, own - largest - log_sum)
    tl.store(ranks + r, tl.sum(num_better, 0) + 1)
    tl.store(log_sums + 2 * r, largest)
    tl.store(log_sums + 2 * r + 1, log_sum)
    if num_top > 0:
        _collect(top_logits + r * top_stride, top_ids + r * top_ids_stride, row, vocab_size, num_top, BLOCK)


@triton.jit(do_not_specialize=["top_stride", "top_ids_stride", "num_top"])
def sort_top_kernel(top_logprobs, top_ids, log_sums, top_stride, top_ids_stride, num_top, K: tl.constexpr):
    """Grid (R), one warp: by logit, the lower id first among equals."""
    r = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, K)
    inside = places < num_top
    x = tl.load(top_logprobs + r * top_stride + places, mask=inside, other=float("-inf"))
    ids = tl.load(top_ids + r * top_ids_stride + places, mask=inside, other=2147483647)
    packed = (ordered_key(x).to(tl.uint64) << 32) | (ids.to(tl.uint32) ^ 0xFFFFFFFF).to(tl.uint64)
    packed = tl.sort((packed ^ 0x8000000000000000).to(tl.int64, bitcast=True), descending=True)
    packed = packed.to(tl.uint64, bitcast=True) ^ 0x8000000000000000
    key = (packed >> 32).to(tl.uint32)
    bits = tl.where((key >> 31) != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    largest = tl.load(log_sums + 2 * r)
    log_sum = tl.load(log_sums + 2 * r + 1)
    sorted_x = bits.to(tl.float32, bitcast=True)
    sorted_ids = ((packed & 0xFFFFFFFF).to(tl.uint32) ^ 0xFFFFFFFF).to(tl.int32)
    tl.store(top_logprobs + r * top_stride + places, sorted_x - largest - log_sum, mask=inside)
    tl.store(top_ids + r * top_ids_stride + places, sorted_ids, mask=inside)


class TritonTokenLogprobs(TritonKernel):
    """Allocates one small tensor a call: its rows may be many (log probabilities of a prompt)."""

    def __init__(self, configuration: Configuration) -> None:
        self._block, self._num_warps = configuration["block"], configuration["num_warps"]

    def __call__(self, *arguments: Any) -> None:
        logprobs, ranks, top_logprobs, top_ids, logits, tokens, vocab_size = arguments
        num_rows, num_top = logits.shape[0], top_ids.shape[1]
        if num_top > _MAX_TOP:
            token_logprobs(*arguments)
            return
        if not num_rows:
            return
        log_sums = logprobs.new_empty(num_rows, 2)
        strides = (top_logprobs.stride(0), top_ids.stride(0))
        self.launch(
            token_logprobs_kernel,
            (num_rows,),
            *(logprobs, ranks, log_sums, top_logprobs, top_ids, logits, tokens),
            *(logits.stride(0), *strides, vocab_size, num_top),
            BLOCK=min(self._block, next_power_of_two(vocab_size)),
            num_warps=self._num_warps,
        )
        if num_top:
            width = max(2, next_power_of_two(num_top))
            tensors = (top_logprobs, top_ids, log_sums)
            self.launch(sort_top_kernel, (num_rows,), *tensors, *strides, num_top, K=width, num_warps=1)
