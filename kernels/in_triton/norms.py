"""Root-mean-square norms. T rows, D channels; one program a row, which stays in registers where it fits a block."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .configurations import Configuration, early_start
from .launching import TritonKernel, next_power_of_two


@triton.jit
def _summed(x, residual, offsets, inside, ADDS: tl.constexpr):
    """A row's part as the norm sees it, in the dtype of the row: x, or residual + x rounded as it is stored."""
    part = tl.load(x + offsets, mask=inside, other=0.0)
    if ADDS:
        before = tl.load(residual + offsets, mask=inside, other=0.0)
        part = (before.to(tl.float32) + part.to(tl.float32)).to(part.dtype)
    return part


@triton.jit
def _normed(part, scale, weight):
    return (part.to(tl.float32) * scale).to(part.dtype).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def rms_norm_kernel(
    out, residual, x, weight, eps, num_channels, out_stride, residual_stride, x_stride,
    ADDS: tl.constexpr, BLOCK: tl.constexpr, ONE_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    out += row * out_stride
    residual += row * residual_stride
    x += row * x_stride
    channels = tl.arange(0, BLOCK)
    if ONE_BLOCK:
        inside = channels < num_channels
        part = _summed(x, residual, channels, inside, ADDS)
        if ADDS:
            tl.store(residual + channels, part, mask=inside)
        square = part.to(tl.float32) * part.to(tl.float32)
        scale = tl.rsqrt(tl.sum(square, 0) / num_channels + eps)
        weights = tl.load(weight + channels, mask=inside, other=0.0)
        tl.store(out + channels, _normed(part, scale, weights).to(out.dtype.element_ty), mask=inside)
    else:
        squares = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, num_channels, BLOCK):
            inside = begin + channels < num_channels
            part = _summed(x, residual, begin + channels, inside, ADDS)
            squares += part.to(tl.float32) * part.to(tl.float32)
        scale = tl.rsqrt(tl.sum(squares, 0) / num_channels + eps)
        for begin in range(0, num_channels, BLOCK):
            inside = begin + channels < num_channels
            part = _summed(x, residual, begin + channels, inside, ADDS)
            if ADDS:
                tl.store(residual + begin + channels, part, mask=inside)
            weights = tl.load(weight + begin + channels, mask=inside, other=0.0)
            normed = _normed(part, scale, weights).to(out.dtype.element_ty)
            tl.store(out + begin + channels, normed, mask=inside)


class _Norm(TritonKernel):
    def __init__(self, configuration: Configuration, architecture: str) -> None:
        self._block, self._num_warps = configuration["block"], configuration["num_warps"]
        self._early = early_start(architecture, configuration)

    def _launch(
        self, out: torch.Tensor, residual: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        num_channels = x.shape[-1]
        num_rows = x.numel() // num_channels
        block = min(self._block, next_power_of_two(num_channels))
        strides = tuple(_row_stride(tensor) for tensor in (out, x if residual is None else residual, x))
        constants = {"ADDS": residual is not None, "BLOCK": block, "ONE_BLOCK": block >= num_channels, **self._early}
        tensors = (out, x if residual is None else residual, x, weight)
        num_warps = max(1, min(self._num_warps, block // 256))
        if num_rows:
            numbers = (eps, num_channels, *strides)
            self.launch(rms_norm_kernel, (num_rows,), *tensors, *numbers, **constants, num_warps=num_warps)


def _row_stride(tensor: torch.Tensor) -> int:
    """Of rows that lie at equal distances: two dimensions, or more that are contiguous."""
    if tensor.dim() == 2:
        return tensor.stride(0)
    assert tensor.is_contiguous()
    return tensor.shape[-1]


class TritonRmsNorm(_Norm):
    def __call__(self, *arguments: Any) -> None:
        out, x, weight, eps = arguments
        self._launch(out, None, x, weight, eps)


class TritonFusedAddRmsNorm(_Norm):
    def __call__(self, *arguments: Any) -> None:
        out, residual, x, weight, eps = arguments
        self._launch(out, residual, x, weight, eps)
