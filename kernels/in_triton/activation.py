"""Gated activations. T tokens, I intermediate channels."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .configurations import Configuration, early_start
from .launching import TritonKernel, next_power_of_two


@triton.jit
def silu_and_mul_kernel(out, gate_up, num_channels, out_stride, gate_up_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < num_channels
    gates = gate_up + token * gate_up_stride + channels
    gate = tl.load(gates, mask=inside, other=0.0)
    up = tl.load(gates + num_channels, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(gate.dtype)  # rounded before the product, as the reference does
    tl.store(out + token * out_stride + channels, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


class TritonSiluAndMul(TritonKernel):
    def __init__(self, configuration: Configuration, architecture: str) -> None:
        self._block, self._num_warps = configuration["block"], configuration["num_warps"]
        self._early = early_start(architecture, configuration)

    def __call__(self, *arguments: Any) -> None:
        out, gate_up = arguments
        num_tokens, num_channels = out.shape
        block = min(self._block, next_power_of_two(num_channels))
        grid = (num_tokens, -(-num_channels // block))
        numbers = (num_channels, out.stride(0), gate_up.stride(0))
        if num_tokens:
            self.launch(
                silu_and_mul_kernel, grid, out, gate_up, *numbers, BLOCK=block, num_warps=self._num_warps, **self._early
            )
