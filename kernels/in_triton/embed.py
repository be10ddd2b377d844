"""Token embedding lookup. T tokens, V ids held here, D channels."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .configurations import Configuration
from .launching import TritonKernel, next_power_of_two


@triton.jit(do_not_specialize=["first_id", "num_ids"])
def embed_kernel(
    out, token_ids, last_tokens, table, first_id, num_ids, num_channels, out_stride, table_stride, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < num_channels
    token_id = tl.load(token_ids + token).to(tl.int64)
    if token_id < 0:
        token_id = tl.load(last_tokens - 1 - token_id)
    local = token_id - first_id
    held = (local >= 0) & (local < num_ids)
    row = tl.load(table + tl.where(held, local, 0) * table_stride + channels, mask=inside & held, other=0.0)
    tl.store(out + token * out_stride + channels, row, mask=inside)


class TritonEmbed(TritonKernel):
    def __init__(self, configuration: Configuration) -> None:
        self._block, self._num_warps = configuration["block"], configuration["num_warps"]

    def __call__(self, *arguments: Any) -> None:
        out, token_ids, last_tokens, table, first_id = arguments
        num_channels = table.shape[1]
        block = min(self._block, next_power_of_two(num_channels))
        grid = (out.shape[0], -(-num_channels // block))
        numbers = (first_id, table.shape[0], num_channels, out.stride(0), table.stride(0))
        if out.shape[0]:
            tensors = (out, token_ids, last_tokens, table)
            self.launch(embed_kernel, grid, *tensors, *numbers, BLOCK=block, num_warps=self._num_warps)
