"""Quantisation of activations to 8-bit floats (e4m3, finite). T tokens, D channels; one program a row.

The eight bits are composed by integer arithmetic: exact, and the same on every target.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..reference.quantize_fp8 import LARGEST, SMALLEST_SCALE
from .configurations import Configuration
from .launching import TritonKernel, next_power_of_two

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _encoded(x):
    """The eight bits of the nearest value of e4m3, even among equals, of float32 cut to its range. A NaN is 127."""
    size = tl.minimum(tl.abs(tl.where(x == x, x, 0.0)), _LARGEST)
    bits = size.to(tl.uint32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20  # the exponent and three bits below it, rounded
    steps = ((size + 24576.0) - 24576.0) * 512.0  # float32 near 24576 counts in steps of 2^-9, as e4m3 below 2^-6
    code = tl.where(size < 0.015625, steps.to(tl.uint32), normal - 960)
    sign = (x.to(tl.uint32, bitcast=True) >> 31) << 7
    return (tl.where(x == x, code, 127) | sign).to(tl.uint8)


@triton.jit
def quantize_fp8_kernel(
    out, scales, x, num_channels, out_stride, x_stride,
    IS_STATIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    out += row * out_stride
    x += row * x_stride
    channels = tl.arange(0, BLOCK)
    if IS_STATIC:
        scale = tl.load(scales)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        is_nan = tl.zeros([BLOCK], tl.int32)
        for begin in range(0, num_channels, BLOCK):
            part = tl.load(x + begin + channels, mask=begin + channels < num_channels, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(tl.where(part == part, part, 0.0)))
            is_nan = is_nan | (part != part).to(tl.int32)
        scale = tl.maximum(tl.div_rn(tl.max(largest, 0), _LARGEST), _SMALLEST_SCALE)
        scale = tl.where(tl.max(is_nan, 0) > 0, float("nan"), scale)
        tl.store(scales + row, scale)
    for begin in range(0, num_channels, BLOCK):
        inside = begin + channels < num_channels
        part = tl.load(x + begin + channels, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + begin + channels, _encoded(tl.div_rn(part, scale)), mask=inside)


class TritonQuantizeFp8(TritonKernel):
    def __init__(self, configuration: Configuration) -> None:
        self._block, self._num_warps = configuration["block"], configuration["num_warps"]

    def __call__(self, *arguments: Any) -> None:
        out, scales, x, is_static = arguments
        num_tokens, num_channels = x.shape
        block = min(self._block, next_power_of_two(num_channels))
        constants = {"IS_STATIC": is_static, "BLOCK": block}
        num_warps = max(1, min(self._num_warps, block // 256))
        if num_tokens:
            tensors, numbers = (out.view(torch.uint8), scales, x), (num_channels, out.stride(0), x.stride(0))
            self.launch(quantize_fp8_kernel, (num_tokens,), *tensors, *numbers, **constants, num_warps=num_warps)
