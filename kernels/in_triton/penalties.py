"""Penalties on what was said before. P penalised rows, V vocabulary entries, R rows of logits."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .configurations import Configuration
from .launching import TritonKernel


@triton.jit(do_not_specialize=["vocab_size"])
def apply_penalties_kernel(
    logits, rows, output_counts, in_prompt, presences, frequencies, repetitions,
    logits_stride, counts_stride, in_prompt_stride, vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (P, blocks of the vocabulary)."""
    entry = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    places = logits + tl.load(rows + entry).to(tl.int64) * logits_stride + ids
    x = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    count = tl.load(output_counts + entry * counts_stride + ids, mask=inside, other=0)
    was_asked = tl.load(in_prompt + entry * in_prompt_stride + ids, mask=inside, other=0) != 0
    was_said = count > 0
    repetition = tl.load(repetitions + entry).to(tl.float32)
    repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where(was_said | was_asked, repeated, x)
    x -= tl.load(frequencies + entry).to(tl.float32) * count.to(tl.float32)
    x -= tl.where(was_said, tl.load(presences + entry).to(tl.float32), 0.0)
    tl.store(places, x.to(logits.dtype.element_ty), mask=inside)


class TritonApplyPenalties(TritonKernel):
    def __init__(self, configuration: Configuration) -> None:
        self._block, self._num_warps = configuration["block"], configuration["num_warps"]

    def __call__(self, *arguments: Any) -> None:
        logits, rows, output_counts, in_prompt, *parameters = arguments
        num_entries, vocab_size = rows.shape[0], logits.shape[1]
        if not num_entries:
            return
        self.launch(
            apply_penalties_kernel,
            (num_entries, -(-vocab_size // self._block)),
            *(logits, rows.to(logits.device), output_counts, in_prompt, *parameters),
            *(logits.stride(0), output_counts.stride(0), in_prompt.stride(0), vocab_size),
            BLOCK=self._block,
            num_warps=self._num_warps,
        )
