"""Matrix product with a weight as the checkpoint has it. M tokens, K inputs, N outputs; sums in float32.

Three ways, by M and the size of the weight: a program owns whole rows of the weight and multiplies without matrix
units (`gemv`, one or two tokens: all that counts is reading the weight once); matrix units with the weight as the left
factor and the tokens padded to 16 or 32 (`dot`), where several programs may share the inputs of a row; the vendor's
library for the rest. Which and in what blocks: `configurations`.

Calls follow one another on one stream: those that share the inputs of rows also share scratch memory and counters.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...ipc.facts import DeviceCapability
from ..compilations import is_rehearsing
from ..implementation import PlainWeight
from .configurations import Configuration, dot_of_weight, early_start, gemv_of_weight, linear_blocks
from .launching import TritonKernel, next_power_of_two

_PARTIAL_SUMS = 1 << 18
_COUNTERS = 4096
_MOST_TOKENS = 32
"""Of products that are not the library's."""


@triton.jit
def _tile(weight, offsets, is_inside, MASKED: tl.constexpr):
    """Read once and not again before the next step: the first to leave the cache."""
    if MASKED:
        return tl.load(weight + offsets, mask=is_inside, other=0.0, eviction_policy="evict_first")
    return tl.load(weight + offsets, eviction_policy="evict_first")


@triton.jit
def _inputs(x, ks, K: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(x + ks, mask=ks < K, other=0.0).to(tl.float32)[None, :]
    return tl.load(x + ks).to(tl.float32)[None, :]


@triton.jit
def _store_sums(out, sums, bias, rows, num_outputs, HAS_BIAS: tl.constexpr):
    total = tl.sum(sums, 1)
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=rows < num_outputs, other=0.0).to(tl.float32)
    tl.store(out + rows, total.to(out.dtype.element_ty), mask=rows < num_outputs)


@triton.jit(do_not_specialize=["num_outputs"])
def gemv_kernel(
    out, x, weight, bias, num_outputs,
    M: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WHOLE_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Grid (N / ROWS). One to four tokens, each with sums of its own."""
    first = tl.program_id(0) * ROWS
    own = tl.arange(0, ROWS)
    rows = first + own
    weight += first.to(tl.int64) * K
    sums0 = tl.zeros([ROWS, TILE], tl.float32)
    if M > 1:
        sums1 = tl.zeros([ROWS, TILE], tl.float32)
    if M > 2:
        sums2 = tl.zeros([ROWS, TILE], tl.float32)
    if M > 3:
        sums3 = tl.zeros([ROWS, TILE], tl.float32)
    for begin in tl.static_range(0, K, TILE):
        ks = begin + tl.arange(0, TILE)
        is_inside = (rows < num_outputs)[:, None] & (ks < K)[None, :]
        part = _tile(weight, own[:, None] * K + ks[None, :], is_inside, begin + TILE > K or not WHOLE_ROWS).to(
            tl.float32
        )
        sums0 += part * _inputs(x, ks, K, begin + TILE > K)
        if M > 1:
            sums1 += part * _inputs(x + K, ks, K, begin + TILE > K)
        if M > 2:
            sums2 += part * _inputs(x + 2 * K, ks, K, begin + TILE > K)
        if M > 3:
            sums3 += part * _inputs(x + 3 * K, ks, K, begin + TILE > K)
    _store_sums(out, sums0, bias, rows, num_outputs, HAS_BIAS)
    if M > 1:
        _store_sums(out + num_outputs, sums1, bias, rows, num_outputs, HAS_BIAS)
    if M > 2:
        _store_sums(out + 2 * num_outputs, sums2, bias, rows, num_outputs, HAS_BIAS)
    if M > 3:
        _store_sums(out + 3 * num_outputs, sums3, bias, rows, num_outputs, HAS_BIAS)


@triton.jit
def _store_dots(out, dots, bias, rows, tokens, num_tokens, num_outputs, HAS_BIAS: tl.constexpr):
    is_row = rows < num_outputs
    if HAS_BIAS:
        dots += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    places = tokens[None, :] * num_outputs + rows[:, None]
    is_inside = is_row[:, None] & (tokens < num_tokens)[None, :]
    tl.store(out + places, dots.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _inputs_of_tokens(x, ks, tokens, num_tokens, K: tl.constexpr, MASKED: tl.constexpr):
    is_there = (tokens < num_tokens)[None, :]
    if MASKED:
        is_there = is_there & (ks < K)[:, None]
    return tl.load(x + tokens[None, :] * K + ks[:, None], mask=is_there, other=0.0)


@triton.jit(do_not_specialize=["num_tokens", "num_outputs"])
def dot_kernel(
    out, x, weight, bias, partial_sums, num_arrived, num_tokens, num_outputs,
    K: tl.constexpr, TOKENS: tl.constexpr, SHARE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (N / ROWS, SPLITS): SHARE inputs each, the tokens padded to TOKENS. The last program to arrive adds up what
    all of a block's left, in their order, and leaves the counter as it was. The first EARLY tiles of the weight, which
    no kernel writes, are asked for before the kernel waits for the one ahead of it.
    """
    block = tl.program_id(0)
    split = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    own = tl.arange(0, ROWS)
    rows = block * ROWS + own
    tokens = tl.arange(0, TOKENS)
    weight += (block * ROWS).to(tl.int64) * K
    begin = split * SHARE
    early = ()
    for tile in tl.static_range(EARLY):
        ks = begin + tile * TILE + tl.arange(0, TILE)
        is_inside = (rows < num_outputs)[:, None] & (ks < K)[None, :]
        part = _tile(weight, own[:, None] * K + ks[None, :], is_inside, not WHOLE)
        early = early + (part,)  # type: ignore[assignment]  # noqa: RUF005 - compiled code knows addition alone
    if PDL:
        gdc_wait()
    dots = tl.zeros([ROWS, TOKENS], tl.float32)
    for tile in tl.static_range(EARLY):
        ks = begin + tile * TILE + tl.arange(0, TILE)
        dots = tl.dot(early[tile], _inputs_of_tokens(x, ks, tokens, num_tokens, K, not WHOLE), dots)
    for start in range(EARLY * TILE, SHARE, TILE):
        ks = begin + start + tl.arange(0, TILE)
        is_inside = (rows < num_outputs)[:, None] & (ks < K)[None, :]
        part = _tile(weight, own[:, None] * K + ks[None, :], is_inside, not WHOLE)
        dots = tl.dot(part, _inputs_of_tokens(x, ks, tokens, num_tokens, K, not WHOLE), dots)
    if SPLITS == 1:
        _store_dots(out, dots, bias, rows, tokens, num_tokens, num_outputs, HAS_BIAS)
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
            _store_dots(out, dots, bias, rows, tokens, num_tokens, num_outputs, HAS_BIAS)
            tl.store(num_arrived + block, 0)


def _widens(device: str) -> bool:
    """Whether this torch gives float32 products of narrower factors on the device, into a tensor that is there."""
    if device == "meta":
        return False
    factor, out = (torch.zeros(16, 16, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32))
    try:
        torch.mm(factor, factor, out_dtype=torch.float32, out=out)
    except (RuntimeError, TypeError):  # no such operator, or none for this device
        return False
    return True


class _Gemv(NamedTuple):
    """A launch of `gemv_kernel`, but for its tensors."""

    num_programs: int
    constants: dict[str, int]


class _Dot(NamedTuple):
    num_blocks: int
    num_splits: int
    constants: dict[str, int]


class TritonLinear(TritonKernel):
    """Scratch memory holds the sums of programs that share the inputs of rows; they share no more than fits."""

    def __init__(self, capability: DeviceCapability, device: str) -> None:
        self._blocks = linear_blocks(capability)
        self._architecture = capability.architecture
        self._num_programs = self._blocks["linear"]["programs"] * (capability.num_multiprocessors or 128)
        self._widens = _widens(device)
        self._partial_sums = torch.empty(_PARTIAL_SUMS, dtype=torch.float32, device=device)
        self._num_arrived = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
        self.workspace_bytes = self._partial_sums.nbytes + self._num_arrived.nbytes
        self._way = cache(self._way_of)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PlainWeight:
        return PlainWeight(weight, bias)

    def __call__(self, *arguments: Any) -> None:
        out, x, packed = arguments
        weight, bias = packed
        num_tokens = x.shape[0]
        if 0 < num_tokens <= _MOST_TOKENS and x.is_contiguous() and out.is_contiguous() and weight.is_contiguous():
            way = self._way(num_tokens, *weight.shape, weight.dtype, x.dtype, bias is not None)
            tensors = (out, x, weight, weight if bias is None else bias)
            if isinstance(way, _Gemv):
                self.launch(gemv_kernel, (way.num_programs,), *tensors, weight.shape[0], **way.constants)
                return
            if isinstance(way, _Dot):
                scratch = (self._partial_sums, self._num_arrived)
                grid = (way.num_blocks, way.num_splits)
                self.launch(dot_kernel, grid, *tensors, *scratch, num_tokens, weight.shape[0], **way.constants)
                return
        self._multiply(out, x, weight, bias)

    def _multiply(self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        if is_rehearsing():  # nothing of this is compiled
            return
        if out.dtype == x.dtype:
            if bias is None:
                torch.mm(x, weight.t(), out=out)
            else:
                torch.addmm(bias, x, weight.t(), out=out)
        elif self._widens and out.dtype == torch.float32:
            torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
            if bias is not None:
                out += bias
        else:
            out.copy_(torch.nn.functional.linear(x, weight, bias))

    def _way_of(
        self, num_tokens: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, x_dtype: torch.dtype,
        has_bias: bool,
    ) -> _Gemv | _Dot | None:  # fmt: skip
        if dtype != x_dtype:
            return None
        gemv = gemv_of_weight(self._blocks, num_tokens, num_outputs, num_inputs)
        if gemv is not None:
            tile = _tile_of(num_inputs, gemv["tile"] * 2 // dtype.itemsize)
            return _gemv(gemv, tile, num_tokens, num_outputs, num_inputs, has_bias)
        dot = dot_of_weight(self._blocks, num_tokens, num_outputs, num_inputs)
        if dot is None or dtype == torch.float32:  # whose products no matrix unit makes in one pass
            return None
        num_padded = 16 if num_tokens <= 16 else 32
        way = _dot(dot, self._num_programs, num_padded, num_outputs, num_inputs, has_bias)
        return way._replace(constants={**way.constants, **early_start(self._architecture, dot)})


def _tile_of(num_inputs: int, most: int) -> int:
    """The largest tile that divides the inputs; where none of at least 128 does, the largest, and the rest is cut."""
    fitting = (size for size in (2048, 1024, 512, 256, 128) if size <= most and num_inputs % size == 0)
    return next(fitting, min(most, next_power_of_two(num_inputs)))


def _gemv(
    blocks: Configuration, tile: int, num_tokens: int, num_outputs: int, num_inputs: int, has_bias: bool
) -> _Gemv:
    constants = {
        "M": num_tokens,
        "K": num_inputs,
        "ROWS": blocks["rows"],
        "TILE": tile,
        "WHOLE_ROWS": num_outputs % blocks["rows"] == 0,
        "HAS_BIAS": has_bias,
        "num_warps": blocks["num_warps"],
    }
    return _Gemv(-(-num_outputs // blocks["rows"]), constants)


def _dot(
    blocks: Configuration, num_programs: int, num_padded: int, num_outputs: int, num_inputs: int, has_bias: bool
) -> _Dot:
    rows, tile = blocks["rows"], max(16, _tile_of(num_inputs, blocks["tile"]))
    num_blocks, num_tiles = -(-num_outputs // rows), -(-num_inputs // tile)
    num_splits = min(num_programs // num_blocks, num_tiles, _PARTIAL_SUMS // (num_blocks * rows * num_padded))
    num_splits = 1 << max(0, num_splits.bit_length() - 1) if num_blocks <= _COUNTERS else 1
    tiles_of_share = -(-num_tiles // num_splits)
    constants = {
        "K": num_inputs,
        "TOKENS": num_padded,
        "SHARE": tiles_of_share * tile,
        "SPLITS": num_splits,
        "ROWS": rows,
        "TILE": tile,
        "WHOLE": num_outputs % rows == 0 and tiles_of_share * tile * num_splits == num_inputs,
        "HAS_BIAS": has_bias,
        "EARLY": min(blocks["early"], tiles_of_share),
        "num_warps": blocks["num_warps"],
        "num_stages": blocks["num_stages"],
    }
    return _Dot(num_blocks, num_splits, constants)
