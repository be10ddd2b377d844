"""Matrix products of a few tokens with what stands before and after them in a layer: norm, gated activation, residual.

T tokens, D channels of the residual, K inputs, N outputs.

One or two tokens, where a product takes as long as its weight takes to read: a program owns whole rows of the weight
and multiplies them in float32 on the ordinary units; there is nothing to add up among programs. A row is read in TILES
tiles of BLOCK inputs; the first EARLY of them are asked for before the kernel waits for the one ahead of it (PDL),
whose outputs it must not read till then.

More of them take matrix units (`*_dot`): a tile of the weight is the left factor, the tokens, padded to TOKENS, the
right one, of the weight's dtype. A norm's weight is multiplied before that and the scale of a token after all: what is
rounded is `x * norm_weight`, where a norm in the same dtype rounds `x * scale`, and its product with the weight.
Every program reads all inputs of the tokens: in float32 those of 32 tokens would be twice what is read of a small
model's weight, so `linear_add` can leave a copy of the residual in the model's dtype, that the norms then read. The
first AHEAD inputs of a program's rows are brought near before it waits (into the second-level cache, where registers
need not hold them); the loop has its loads in flight by itself.
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

from ...ipc.facts import DeviceCapability
from .configurations import LARGE_WEIGHT, Configuration, dot_blocks, register_limit, rows_and_warps, starts_early
from .launching import TritonKernel, next_power_of_two

_TOGETHER = 2
"""Tokens that one launch takes on ordinary units: the sums of more would not fit the registers."""
_DOT_TOGETHER = 64
_PARTIAL_SUMS = 1 << 18
_COUNTERS = 4096


@triton.jit
def _weights(
    weight, rows, first, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    IS_INSIDE: tl.constexpr = True,
):  # fmt: skip
    """Inputs from `first` on, of some rows: `[ROWS, BLOCK]`. They are read once, so the cache need not keep them."""
    inputs = first + tl.arange(0, BLOCK)
    at = weight + rows.to(tl.int64)[:, None] * K + inputs[None, :]
    if IS_INSIDE and N % ROWS == 0 and K % BLOCK == 0:
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


@triton.jit
def _bring_near(weight, rows, first, N: tl.constexpr, K: tl.constexpr, AHEAD: tl.constexpr):
    """Inputs from `first` on, of some rows, into the second-level cache: one address of each 128 bytes."""
    inputs = tl.minimum(first + 64 * tl.arange(0, AHEAD // 64), K - 1)
    at = weight + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K + inputs[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _inputs_of_tokens(x, tokens, num_tokens, first, K: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """`[BLOCK, TOKENS]`, zeros beyond the tokens there are."""
    inputs = first + tl.arange(0, BLOCK)
    mask = (tokens < num_tokens)[None, :]
    if not WHOLE:
        mask = mask & (inputs < K)[:, None]
    return tl.load(x + tokens[None, :] * K + inputs[:, None], mask=mask, other=0.0)


@triton.jit
def _to_be_normed(
    x, norm_weight, tokens, num_tokens, first, squares,
    K: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Tokens times the norm's weight, and their squares `[BLOCK / 8, TOKENS]` added to those before: eights of inputs
    that lie side by side are one thread's.
    """
    values = _inputs_of_tokens(x, tokens, num_tokens, first, K, BLOCK, K % BLOCK == 0).to(tl.float32)
    squares += tl.sum(tl.reshape(values * values, [BLOCK // 8, 8, TOKENS]), 1)
    return (values * _inputs(norm_weight, first, K, BLOCK)[:, None]).to(dtype), squares


@triton.jit
def _store_of_tokens(out, rows, tokens, num_tokens, values, N: tl.constexpr):
    mask = (rows < N)[:, None] & (tokens < num_tokens)[None, :]
    tl.store(out + tokens[None, :] * N + rows[:, None], values.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def norm_linear_dot_kernel(
    out, x, eps, norm_weight, weight, bias, num_tokens,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    AHEAD: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.arange(0, TOKENS)
    if PDL:
        gdc_launch_dependents()
        _bring_near(weight, rows, 0, N, K, AHEAD)
        gdc_wait()

    dots = tl.zeros([ROWS, TOKENS], tl.float32)
    squares = tl.zeros([BLOCK // 8, TOKENS], tl.float32)
    for first in range(0, K, BLOCK):
        weights = _weights(weight, rows, first, N, K, ROWS, BLOCK)
        values, squares = _to_be_normed(
            x, norm_weight, tokens, num_tokens, first, squares, K, BLOCK, TOKENS, weights.dtype
        )
        dots = tl.dot(weights, values, dots)

    dots *= tl.rsqrt(tl.sum(squares, 0) / K + eps)[None, :]
    if HAS_BIAS:
        dots += _outputs(bias, rows, N, ROWS)[:, None]
    _store_of_tokens(out, rows, tokens, num_tokens, dots, N)


@triton.jit(do_not_specialize=["num_tokens"])
def norm_gate_up_dot_kernel(
    out, x, eps, norm_weight, weight, bias, num_tokens,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    AHEAD: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """N gate rows, then N up rows; a program owns both rows of its outputs."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.arange(0, TOKENS)
    up_weight = weight + N * K
    if PDL:
        gdc_launch_dependents()
        _bring_near(weight, rows, 0, N, K, AHEAD)
        _bring_near(up_weight, rows, 0, N, K, AHEAD)
        gdc_wait()

    gates = tl.zeros([ROWS, TOKENS], tl.float32)
    ups = tl.zeros([ROWS, TOKENS], tl.float32)
    squares = tl.zeros([BLOCK // 8, TOKENS], tl.float32)
    for first in range(0, K, BLOCK):
        of_gate = _weights(weight, rows, first, N, K, ROWS, BLOCK)
        of_up = _weights(up_weight, rows, first, N, K, ROWS, BLOCK)
        values, squares = _to_be_normed(
            x, norm_weight, tokens, num_tokens, first, squares, K, BLOCK, TOKENS, of_gate.dtype
        )
        gates = tl.dot(of_gate, values, gates)
        ups = tl.dot(of_up, values, ups)

    scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)[None, :]
    gates *= scale
    ups *= scale
    if HAS_BIAS:
        gates += _outputs(bias, rows, N, ROWS)[:, None]
        ups += _outputs(bias + N, rows, N, ROWS)[:, None]
    _store_of_tokens(out, rows, tokens, num_tokens, gates / (1.0 + tl.exp(-gates)) * ups, N)


@triton.jit
def _add_to_residual(
    residual, rounded, bias, rows, tokens, num_tokens, dots,
    N: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_ROUNDED: tl.constexpr,
):  # fmt: skip
    if HAS_BIAS:
        dots += _outputs(bias, rows, N, ROWS)[:, None]
    mask = (rows < N)[:, None] & (tokens < num_tokens)[None, :]
    dots += tl.load(residual + tokens[None, :] * N + rows[:, None], mask=mask, other=0.0).to(tl.float32)
    _store_of_tokens(residual, rows, tokens, num_tokens, dots, N)
    if IS_ROUNDED:
        _store_of_tokens(rounded, rows, tokens, num_tokens, dots, N)


@triton.jit(do_not_specialize=["num_tokens"])
def linear_add_dot_kernel(
    residual, x, weight, bias, rounded, partial_sums, num_arrived, num_tokens,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    SHARE: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr, HAS_BIAS: tl.constexpr, IS_ROUNDED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (N / ROWS, SPLITS): SHARE inputs each. The last program to arrive adds up what all of a block's left, in
    their order, and leaves the counter as it was.
    """
    block = tl.program_id(0)
    split = tl.program_id(1)
    own = tl.arange(0, ROWS)
    rows = block * ROWS + own
    tokens = tl.arange(0, TOKENS)
    begin = split * SHARE
    if PDL:
        gdc_launch_dependents()
        _bring_near(weight, rows, begin, N, K, AHEAD)
        gdc_wait()

    dots = tl.zeros([ROWS, TOKENS], tl.float32)
    for first in range(begin, begin + SHARE, BLOCK):
        weights = _weights(weight, rows, first, N, K, ROWS, BLOCK, K == SHARE * SPLITS)
        values = _inputs_of_tokens(x, tokens, num_tokens, first, K, BLOCK, K == SHARE * SPLITS)
        dots = tl.dot(weights, values.to(weights.dtype), dots)

    if SPLITS == 1:
        _add_to_residual(residual, rounded, bias, rows, tokens, num_tokens, dots, N, ROWS, HAS_BIAS, IS_ROUNDED)
    else:
        places = own[:, None] * TOKENS + tokens[None, :]
        shares = partial_sums + block * SPLITS * ROWS * TOKENS
        tl.store(shares + split * ROWS * TOKENS + places, dots)
        tl.debug_barrier()
        arrived = tl.atomic_add(num_arrived + block, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            dots = tl.zeros([ROWS, TOKENS], tl.float32)
            for other in tl.static_range(SPLITS):
                dots += tl.load(shares + other * ROWS * TOKENS + places, cache_modifier=".cg")
            _add_to_residual(residual, rounded, bias, rows, tokens, num_tokens, dots, N, ROWS, HAS_BIAS, IS_ROUNDED)
            tl.store(num_arrived + block, 0)


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
    """One configuration for weights of all sizes: which blocks suit one depends on its shape."""

    name = ""
    num_weights = 1
    """Rows of the weight that make one output."""

    def __init__(self, configuration: Configuration, capability: DeviceCapability) -> None:
        self.configuration = configuration
        self._architecture = capability.architecture

    def _takes_dots(self, num_tokens: int, weight: torch.Tensor) -> bool:
        """Products of float32 no matrix unit makes in one pass."""
        return num_tokens > self.configuration["few_tokens"] and weight.element_size() == 2

    def _early_start(self, field: str) -> dict[str, Any]:
        starts = starts_early(self._architecture, self.configuration, field)
        return {"PDL": starts, **({"launch_pdl": True} if starts else {})}

    def _launch(
        self,
        kernel: Any,
        of_tokens: tuple[torch.Tensor, ...],
        of_model: tuple[Any, ...],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        """Of the tokens' tensors, then the model's. More tokens than go together take the weight in turns."""
        constants = {"HAS_BIAS": bias is not None, **self._early_start("pdl")}
        arguments = (*of_model, weight, weight if bias is None else bias)
        for first in range(0, len(of_tokens[0]), _TOGETHER):
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

    def _dot_constants(self, num_tokens: int, weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
        """Of a `*_dot` kernel for so many tokens, as the inputs of rows are not shared."""
        num_outputs, num_inputs = weight.shape[0] // self.num_weights, weight.shape[1]
        padded = max(16, next_power_of_two(num_tokens))
        blocks = dot_blocks(self.name, num_outputs, num_inputs, padded, self.num_weights, self.configuration)
        is_large = weight.numel() > LARGE_WEIGHT
        return {
            "N": num_outputs,
            "K": num_inputs,
            "ROWS": blocks.rows,
            "BLOCK": blocks.block_k,
            "TOKENS": padded,
            "AHEAD": max(64, next_power_of_two(min(num_inputs, blocks.block_k * blocks.num_stages))),
            "HAS_BIAS": bias is not None,
            **self._early_start("dot_large_pdl" if is_large else "dot_pdl"),
            "num_warps": blocks.num_warps,
            "num_stages": blocks.num_stages,
            **register_limit(self._architecture, blocks.num_warps),
        }


class _NormedLinear(_FusedLinear):
    kernel: Any = None
    dot_kernel: Any = None

    def __call__(self, *arguments: Any) -> None:
        out, x, norm_weight, weight, bias, eps = arguments
        assert out.shape == (len(x), len(weight) // self.num_weights)
        assert out.is_contiguous() and x.is_contiguous() and weight.is_contiguous()
        if not self._takes_dots(len(x), weight):
            self._launch(self.kernel, (out, x), (eps, norm_weight), weight, bias)
            return
        of_model = (eps, norm_weight, weight, weight if bias is None else bias)
        for first in range(0, len(x), _DOT_TOGETHER):
            some, of_some = (tensor[first : first + _DOT_TOGETHER] for tensor in (out, x))
            constants = self._dot_constants(len(some), weight, bias)
            grid = (-(-constants["N"] // constants["ROWS"]),)
            self.launch(self.dot_kernel, grid, some, of_some, *of_model, len(some), **constants)


class TritonNormLinear(_NormedLinear):
    name = "norm_linear"
    kernel = norm_linear_kernel
    dot_kernel = norm_linear_dot_kernel


class TritonNormGateUp(_NormedLinear):
    name = "norm_gate_up"
    num_weights = 2
    kernel = norm_gate_up_kernel
    dot_kernel = norm_gate_up_dot_kernel


class TritonLinearAdd(_FusedLinear):
    """Scratch memory holds the sums of programs that share the inputs of rows; they share no more than fits."""

    name = "linear_add"

    def __init__(self, configuration: Configuration, capability: DeviceCapability, device: str) -> None:
        super().__init__(configuration, capability)
        self._num_programs = configuration["dot_programs"] * (capability.num_multiprocessors or 128)
        self._partial_sums = torch.empty(_PARTIAL_SUMS, dtype=torch.float32, device=device)
        self._num_arrived = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
        self.workspace_bytes = self._partial_sums.nbytes + self._num_arrived.nbytes

    def __call__(self, *arguments: Any) -> None:
        residual, x, weight, bias, *rest = arguments
        rounded = rest[0] if rest else None
        assert residual.shape == (len(x), len(weight))
        assert residual.is_contiguous() and x.is_contiguous() and weight.is_contiguous()
        if not self._takes_dots(len(x), weight):
            self._launch(linear_add_kernel, (residual, x), (), weight, bias)
            if rounded is not None:
                rounded.copy_(residual)
            return
        assert rounded is None or (rounded.shape == residual.shape and rounded.is_contiguous())
        for first in range(0, len(x), _DOT_TOGETHER):
            some = slice(first, first + _DOT_TOGETHER)
            self._add(residual[some], x[some], None if rounded is None else rounded[some], weight, bias)

    def _add(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        rounded: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        constants = self._dot_constants(len(x), weight, bias)
        num_blocks, num_splits, share = self._shares(constants)
        constants["AHEAD"] = min(constants["AHEAD"], max(64, next_power_of_two(share)))
        self.launch(
            linear_add_dot_kernel,
            (num_blocks, num_splits),
            *(residual, x, weight, weight if bias is None else bias, residual if rounded is None else rounded),
            *(self._partial_sums, self._num_arrived, len(x)),
            SHARE=share,
            SPLITS=num_splits,
            IS_ROUNDED=rounded is not None,
            **constants,
        )

    def _shares(self, constants: dict[str, Any]) -> tuple[int, int, int]:
        """Blocks of rows, how many programs share the inputs of each, and the inputs of a share."""
        rows, block = constants["ROWS"], constants["BLOCK"]
        num_blocks, num_tiles = -(-constants["N"] // rows), -(-constants["K"] // block)
        fitting = _PARTIAL_SUMS // (num_blocks * rows * constants["TOKENS"]) if num_blocks <= _COUNTERS else 1
        num_splits = min(self._num_programs // num_blocks, num_tiles, fitting)
        num_splits = 1 << max(0, num_splits.bit_length() - 1)
        return num_blocks, num_splits, -(-num_tiles // num_splits) * block
