"""Matrix products of a few tokens with what stands before and after them in a layer: norm, gated activation, residual.

For steps of one to four tokens, where a product takes as long as its weight takes to read. A program owns whole rows of
the weight and multiplies them in float32 on the ordinary units; there is nothing to add up among programs.

T tokens, D channels of the residual, K inputs, N outputs. A row is read in TILES tiles of BLOCK inputs; the first EARLY
of them are asked for before the kernel waits for the one ahead of it (PDL), whose outputs it must not read till then.
"""

# In compiled code tuples grow while loops are unrolled, by addition alone, and no type can tell that:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,var-annotated,unreachable"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .configurations import Configuration, register_limit, rows_and_warps, starts_early
from .launching import TritonKernel, next_power_of_two

MAX_TOKENS = 4
_TOGETHER = 2
"""Tokens that one launch takes: the sums of more would not fit the registers."""


@triton.jit
def _weights(weight, rows, first, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Inputs from `first` on, of some rows: `[ROWS, BLOCK]`. They are read once, so the cache need not keep them."""
    inputs = first + tl.arange(0, BLOCK)
    at = weight + rows.to(tl.int64)[:, None] * K + inputs[None, :]
    if N % ROWS == 0 and K % BLOCK == 0:
        return tl.load(at, eviction_policy="evict_first")
    mask = (rows < N)[:, None] & (inputs < K)[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _inputs(x, first, K: tl.constexpr, BLOCK: tl.constexpr):
    """Inputs from `first` on, of one token, in float32."""
    inputs = first + tl.arange(0, BLOCK)
    if K % BLOCK == 0:
        return tl.load(x + inputs).to(tl.float32)
    return tl.load(x + inputs, mask=inputs < K, other=0.0).to(tl.float32)


@triton.jit
def _outputs(x, rows, N: tl.constexpr, ROWS: tl.constexpr):
    if N % ROWS == 0:
        return tl.load(x + rows).to(tl.float32)
    return tl.load(x + rows, mask=rows < N, other=0.0).to(tl.float32)


@triton.jit
def _store(out, rows, values, N: tl.constexpr, ROWS: tl.constexpr):
    if N % ROWS == 0:
        tl.store(out + rows, values.to(out.dtype.element_ty))
    else:
        tl.store(out + rows, values.to(out.dtype.element_ty), mask=rows < N)


@triton.jit
def norm_linear_kernel(
    out, residual, eps, norm_weight, weight, bias,
    T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    EARLY: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if PDL:
        gdc_launch_dependents()
    early = ()
    for tile in tl.static_range(EARLY):
        of_norm = _inputs(norm_weight, tile * BLOCK, K, BLOCK)
        early = early + ((_weights(weight, rows, tile * BLOCK, N, K, ROWS, BLOCK), of_norm),)
    if PDL:
        gdc_wait()

    sums = ()
    squares = ()
    for _ in tl.static_range(T):
        sums = sums + (tl.zeros([ROWS, BLOCK], tl.float32),)
        squares = squares + (tl.zeros([BLOCK], tl.float32),)
    for tile in tl.static_range(TILES):
        if tile < EARLY:
            weights = early[tile][0].to(tl.float32)
            of_norm = early[tile][1]
        else:
            weights = _weights(weight, rows, tile * BLOCK, N, K, ROWS, BLOCK).to(tl.float32)
            of_norm = _inputs(norm_weight, tile * BLOCK, K, BLOCK)
        more = ()
        more_squares = ()
        for token in tl.static_range(T):
            x = _inputs(residual + token * K, tile * BLOCK, K, BLOCK)
            more = more + (sums[token] + weights * (x * of_norm)[None, :],)
            more_squares = more_squares + (squares[token] + x * x,)
        sums = more
        squares = more_squares

    for token in tl.static_range(T):
        scale = tl.rsqrt(tl.sum(squares[token], 0) / K + eps)
        result = tl.sum(sums[token], 1) * scale
        if HAS_BIAS:
            result += _outputs(bias, rows, N, ROWS)
        _store(out + token * N, rows, result, N, ROWS)


@triton.jit
def norm_gate_up_kernel(
    out, residual, eps, norm_weight, weight, bias,
    T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    EARLY: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """N gate rows, then N up rows; a program owns both rows of its outputs."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    up_weight = weight + N * K
    if PDL:
        gdc_launch_dependents()
    early = ()
    for tile in tl.static_range(EARLY):
        of_gate = _weights(weight, rows, tile * BLOCK, N, K, ROWS, BLOCK)
        of_up = _weights(up_weight, rows, tile * BLOCK, N, K, ROWS, BLOCK)
        early = early + ((of_gate, of_up, _inputs(norm_weight, tile * BLOCK, K, BLOCK)),)
    if PDL:
        gdc_wait()

    gates = ()
    ups = ()
    squares = ()
    for _ in tl.static_range(T):
        gates = gates + (tl.zeros([ROWS, BLOCK], tl.float32),)
        ups = ups + (tl.zeros([ROWS, BLOCK], tl.float32),)
        squares = squares + (tl.zeros([BLOCK], tl.float32),)
    for tile in tl.static_range(TILES):
        if tile < EARLY:
            of_gate = early[tile][0].to(tl.float32)
            of_up = early[tile][1].to(tl.float32)
            of_norm = early[tile][2]
        else:
            of_gate = _weights(weight, rows, tile * BLOCK, N, K, ROWS, BLOCK).to(tl.float32)
            of_up = _weights(up_weight, rows, tile * BLOCK, N, K, ROWS, BLOCK).to(tl.float32)
            of_norm = _inputs(norm_weight, tile * BLOCK, K, BLOCK)
        more_gates = ()
        more_ups = ()
        more_squares = ()
        for token in tl.static_range(T):
            x = _inputs(residual + token * K, tile * BLOCK, K, BLOCK)
            more_gates = more_gates + (gates[token] + of_gate * (x * of_norm)[None, :],)
            more_ups = more_ups + (ups[token] + of_up * (x * of_norm)[None, :],)
            more_squares = more_squares + (squares[token] + x * x,)
        gates = more_gates
        ups = more_ups
        squares = more_squares

    for token in tl.static_range(T):
        scale = tl.rsqrt(tl.sum(squares[token], 0) / K + eps)
        gate = tl.sum(gates[token], 1) * scale
        up = tl.sum(ups[token], 1) * scale
        if HAS_BIAS:
            gate += _outputs(bias, rows, N, ROWS)
            up += _outputs(bias + N, rows, N, ROWS)
        _store(out + token * N, rows, gate / (1.0 + tl.exp(-gate)) * up, N, ROWS)


@triton.jit
def linear_add_kernel(
    residual, x, weight, bias,
    T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    EARLY: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if PDL:
        gdc_launch_dependents()
    early = ()
    for tile in tl.static_range(EARLY):
        early = early + (_weights(weight, rows, tile * BLOCK, N, K, ROWS, BLOCK),)
    if PDL:
        gdc_wait()

    sums = ()
    before = ()
    for token in tl.static_range(T):
        sums = sums + (tl.zeros([ROWS, BLOCK], tl.float32),)
        before = before + (_outputs(residual + token * N, rows, N, ROWS),)
    for tile in tl.static_range(TILES):
        if tile < EARLY:
            weights = early[tile].to(tl.float32)
        else:
            weights = _weights(weight, rows, tile * BLOCK, N, K, ROWS, BLOCK).to(tl.float32)
        more = ()
        for token in tl.static_range(T):
            of_token = _inputs(x + token * K, tile * BLOCK, K, BLOCK)
            more = more + (sums[token] + weights * of_token[None, :],)
        sums = more

    for token in tl.static_range(T):
        result = tl.sum(sums[token], 1)
        if HAS_BIAS:
            result += _outputs(bias, rows, N, ROWS)
        _store(residual + token * N, rows, before[token] + result, N, ROWS)


_REGISTERS_OF_WEIGHTS = 64
"""Of a thread, for the weights it has asked for; a row of the weight that fits them is one tile."""
_REGISTERS_OF_SUMS = 96
"""Of a thread, for what tokens add up where a row is several tiles."""


def tiles_of_row(
    num_inputs: int, rows: int, num_threads: int, num_tokens: int, item_bytes: int, most: int
) -> dict[str, int]:
    """How a program reads its rows, BLOCK inputs at a time: BLOCK, TILES and how many are asked for EARLY.

    A divisor of the row where a large one is a power of two, since masks cost; otherwise the last tile is masked.
    """

    def registers(block: int, kept_bytes: int) -> int:
        return rows * block * kept_bytes // (4 * num_threads)

    block = min(most, next_power_of_two(num_inputs))
    while block > 64 and registers(block, item_bytes) > _REGISTERS_OF_WEIGHTS:
        block //= 2
    if block < num_inputs:
        while block > 64 and registers(block, 4 * num_tokens) > _REGISTERS_OF_SUMS:
            block //= 2
    divisor = num_inputs & -num_inputs
    if block // 4 <= divisor < block:
        block = divisor
    num_tiles = -(-num_inputs // block)
    fits = registers(block * num_tiles, item_bytes) <= _REGISTERS_OF_WEIGHTS
    return {"BLOCK": block, "TILES": num_tiles, "EARLY": num_tiles if fits else 1}


class _FusedLinear(TritonKernel):
    """One configuration for weights of all sizes: which rows and warps suit one depends on its shape."""

    name = ""
    num_weights = 1
    """Rows of the weight that make one output."""

    def __init__(self, configuration: Configuration, architecture: str) -> None:
        self.configuration = configuration
        self._architecture = architecture
        self._pdl = starts_early(architecture, configuration)

    def _launch(
        self,
        kernel: Any,
        of_tokens: tuple[torch.Tensor, ...],
        of_model: tuple[Any, ...],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        """Of the tokens' tensors, then the model's. More tokens than go together take the weight in turns."""
        num_tokens = len(of_tokens[0])
        tensors = (*of_tokens, weight) if bias is None else (*of_tokens, weight, bias)
        assert num_tokens <= MAX_TOKENS and all(tensor.is_contiguous() for tensor in tensors)
        constants = {"HAS_BIAS": bias is not None, "PDL": self._pdl, **({"launch_pdl": True} if self._pdl else {})}
        arguments = (*of_model, weight, weight if bias is None else bias)
        for first in range(0, num_tokens, _TOGETHER):
            some = tuple(tensor[first : first + _TOGETHER] for tensor in of_tokens)
            self._launch_together(kernel, (*some, *arguments), weight, len(some[0]), constants)

    def _launch_together(
        self, kernel: Any, arguments: tuple[Any, ...], weight: torch.Tensor, num_tokens: int, constants: dict[str, Any]
    ) -> None:
        num_outputs, num_inputs = weight.shape[0] // self.num_weights, weight.shape[1]
        rows, num_warps = rows_and_warps(self.name, num_outputs, num_inputs, self.configuration)
        item_bytes, most = weight.element_size(), self.configuration["block_k"]

        def tiles() -> dict[str, int]:
            threads = 32 * num_warps
            return tiles_of_row(num_inputs, rows * self.num_weights, threads, num_tokens, item_bytes, most)

        if num_tokens * item_bytes > 2 and tiles()["TILES"] > 1:  # compilers ask for many tiles at once
            num_warps = max(num_warps, min(8, 2 * num_warps))
        self.launch(
            kernel,
            (-(-num_outputs // rows),),
            *arguments,
            T=num_tokens,
            N=num_outputs,
            K=num_inputs,
            ROWS=rows,
            **tiles(),
            **constants,
            num_warps=num_warps,
            **register_limit(self._architecture, num_warps),
        )


class TritonNormLinear(_FusedLinear):
    name = "norm_linear"

    def __call__(self, *arguments: Any) -> None:
        out, residual, norm_weight, weight, bias, eps = arguments
        assert out.shape == (len(residual), len(weight))
        self._launch(norm_linear_kernel, (out, residual), (eps, norm_weight), weight, bias)


class TritonNormGateUp(_FusedLinear):
    name = "norm_gate_up"
    num_weights = 2

    def __call__(self, *arguments: Any) -> None:
        out, residual, norm_weight, weight, bias, eps = arguments
        assert out.shape == (len(residual), len(weight) // 2)
        self._launch(norm_gate_up_kernel, (out, residual), (eps, norm_weight), weight, bias)


class TritonLinearAdd(_FusedLinear):
    name = "linear_add"

    def __call__(self, *arguments: Any) -> None:
        residual, x, weight, bias = arguments
        assert residual.shape == (len(x), len(weight))
        self._launch(linear_add_kernel, (residual, x), (), weight, bias)
