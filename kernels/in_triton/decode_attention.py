"""Attention of a step that has one token of each sequence, from projections to attended heads, in one kernel.

T tokens, H query heads, G key/value heads, GROUP = H / G query heads that share one, D head size (DP: padded to a power
of two), HALF the channels of each half that rotate, S slots per block, KEYS cached positions taken at once.

The programs of one token and one key/value head share its cached positions among them: at least KEYS to each, so that
of a short context few programs have any and the others end at once. The last one to arrive adds the parts up. The
token's own key and value do not come from the cache; the first program writes them there.

A few tokens, or several, leave the device waiting for memory, so the next keys and values are asked for before the last
are used (EARLY); with PDL the first of them before the kernel ahead has ended: they, block tables, positions and slots
were there before the step began. More tokens, a crowd, are done in tiles of fewer warps, in the compiler's order, which
is 14 percent faster for 256 tokens of a 0.6B model (H200, whole decode steps).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...ipc.facts import DeviceProfile, Problem
from .configurations import (
    WIDE_BYTES,
    Configuration,
    dot_precision,
    keys_of_head,
    register_limit,
    starts_early,
    warps_of_head,
)
from .launching import TritonKernel, next_power_of_two

_LOG2_E = 1.4426950408889634
_PART_REGISTERS = 64
"""Of a thread, for the parts that it has asked for."""
_NOTHING = tl.constexpr(-1.0e30)  # below every score


@triton.jit
def _cached(cache, table, start, end, strides, group, D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr,
            KEYS: tl.constexpr, TURNED: tl.constexpr):  # fmt: skip
    """Of the positions from `start`: `[KEYS, DP]`, or `[DP, KEYS]`; zeros from `end` on, whatever the slots hold."""
    positions = start + tl.arange(0, KEYS)
    channels = tl.arange(0, DP)
    inside = positions < end
    block = tl.load(table + positions // S, mask=inside, other=0).to(tl.int64)
    at = cache + block * strides[0] + (positions % S) * strides[1] + group * strides[2]
    if TURNED:
        mask = inside[None, :] if D == DP else inside[None, :] & (channels < D)[:, None]
        found = tl.load(at[None, :] + channels[:, None], mask=mask, other=0.0)
    else:
        mask = inside[:, None] if D == DP else inside[:, None] & (channels < D)[None, :]
        found = tl.load(at[:, None] + channels[None, :], mask=mask, other=0.0)
    return found


@triton.jit
def _channels(DP: tl.constexpr, HALF: tl.constexpr):
    """Every channel, and the one that it is turned against: of the other half, or itself."""
    channels = tl.arange(0, DP)
    others = tl.where(channels < HALF, channels + HALF, tl.where(channels < 2 * HALF, channels - HALF, channels))
    return channels, others


@triton.jit
def _normed(heads, scale, weights, dtype: tl.constexpr):
    """Rounded as the projections are, before and after the weight."""
    return ((heads * scale).to(dtype).to(tl.float32) * weights).to(dtype).to(tl.float32)


@triton.jit
def _add_up(
    out, parts, most_of_parts, total_of_parts, place, num_parts,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The heads of one place from their parts, all of which are asked for at once."""
    splits = tl.arange(0, SPLITS)
    channels = tl.arange(0, DP)
    real = channels < D
    for first in tl.static_range(0, GROUP, HEADS):
        heads = first + tl.arange(0, HEADS)
        there = (heads < GROUP)[:, None] & (splits < num_parts)[None, :]
        at = (place * SPLITS + splits[None, :]) * GROUP + heads[:, None]
        parts_at = parts + at[:, :, None] * D + channels[None, None, :]
        acc = tl.load(parts_at, mask=there[:, :, None] & real[None, None, :], other=0.0, cache_modifier=".cg")
        most = tl.load(most_of_parts + at, mask=there, other=_NOTHING, cache_modifier=".cg")
        total = tl.load(total_of_parts + at, mask=there, other=0.0, cache_modifier=".cg")
        weight = tl.exp2(most - tl.max(most, 1)[:, None])
        whole = tl.sum(acc * weight[:, :, None], 1) / tl.sum(total * weight, 1)[:, None]
        out_at = out + (place * GROUP + heads)[:, None] * D + channels[None, :]
        tl.store(out_at, whole.to(out.dtype.element_ty), mask=(heads < GROUP)[:, None] & real[None, :])


@triton.jit(do_not_specialize=["window"])
def decode_attention_kernel(
    out, qkv, positions, slots, cos_sin, keys, values, q_norm, k_norm, eps, tables, rows_of_table, scale, window,
    parts, most_of_parts, total_of_parts, num_arrived, cos_sin_stride, table_stride,
    k_block_stride, k_slot_stride, k_head_stride, v_block_stride, v_slot_stride, v_head_stride,
    G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr,
    S: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T x G, SPLITS). Parts are added up HEADS heads at a time."""
    place = tl.program_id(0)
    token = place // G
    group = place % G
    split = tl.program_id(1)
    position = tl.load(positions + token)
    begin = tl.zeros([], tl.int32)
    if HAS_WINDOW:
        begin = tl.maximum(position - window + 1, 0)
    share = tl.maximum(tl.cdiv(tl.cdiv(position - begin, SPLITS), KEYS), 1) * KEYS
    num_parts = tl.maximum(tl.cdiv(position - begin, share), 1)
    if split >= num_parts:
        return
    begin += split * share
    end = tl.minimum(begin + share, position)

    table = tables + tl.load(rows_of_table + token).to(tl.int64) * table_stride
    k_strides = (k_block_stride, k_slot_stride, k_head_stride)
    v_strides = (v_block_stride, v_slot_stride, v_head_stride)
    if EARLY:
        k = _cached(keys, table, begin, end, k_strides, group, D, DP, S, KEYS, True)
        v = _cached(values, table, begin, end, v_strides, group, D, DP, S, KEYS, False)
    slot = tl.load(slots + token).to(tl.int64)
    channels, others = _channels(DP, HALF)
    real = channels < D
    turns = channels < 2 * HALF
    angles = cos_sin + position.to(tl.int64) * cos_sin_stride + tl.where(channels < HALF, channels, others)
    cos = tl.load(angles, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(angles + HALF, mask=turns, other=0.0).to(tl.float32)
    sin = tl.where(channels < HALF, -sin, sin)
    if HAS_Q_NORM:
        q_weights = tl.load(q_norm + channels, mask=real, other=0.0).to(tl.float32)
        other_q_weights = tl.load(q_norm + others, mask=real, other=0.0).to(tl.float32)
    if HAS_K_NORM:
        k_weights = tl.load(k_norm + channels, mask=real, other=0.0).to(tl.float32)
        other_k_weights = tl.load(k_norm + others, mask=real, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    rounded: tl.constexpr = qkv.dtype.element_ty
    cached: tl.constexpr = keys.dtype.element_ty
    rows = tl.arange(0, ROWS)
    has_query = (rows < GROUP)[:, None]
    projected = qkv + token * ((GROUP + 2) * G * D)
    at = projected + (group * GROUP + rows)[:, None] * D
    query = tl.load(at + channels[None, :], mask=has_query & real[None, :], other=0.0).to(tl.float32)
    other_query = tl.load(at + others[None, :], mask=has_query & real[None, :], other=0.0).to(tl.float32)
    own_key = tl.load(projected + (GROUP * G + group) * D + channels, mask=real, other=0.0).to(tl.float32)
    other_key = tl.load(projected + (GROUP * G + group) * D + others, mask=real, other=0.0).to(tl.float32)
    own_value = tl.load(projected + (GROUP * G + G + group) * D + channels, mask=real, other=0.0).to(cached)
    if HAS_Q_NORM:
        q_scale = tl.rsqrt(tl.sum(query * query, 1) / D + eps)[:, None]
        query = _normed(query, q_scale, q_weights[None, :], rounded)
        other_query = _normed(other_query, q_scale, other_q_weights[None, :], rounded)
    if HAS_K_NORM:
        k_scale = tl.rsqrt(tl.sum(own_key * own_key, 0) / D + eps)
        own_key = _normed(own_key, k_scale, k_weights, rounded)
        other_key = _normed(other_key, k_scale, other_k_weights, rounded)
    query = (query * cos[None, :] + other_query * sin[None, :]).to(cached)
    own_key = (own_key * cos + other_key * sin).to(rounded).to(cached)

    is_first = split == 0
    is_written = real & is_first & (slot >= 0)
    slot = tl.maximum(slot, 0)
    k_at = keys + (slot // S) * k_block_stride + (slot % S) * k_slot_stride + group * k_head_stride
    v_at = values + (slot // S) * v_block_stride + (slot % S) * v_slot_stride + group * v_head_stride
    tl.store(k_at + channels, own_key, mask=is_written)
    tl.store(v_at + channels, own_value, mask=is_written)

    own_score = tl.sum(query.to(tl.float32) * own_key.to(tl.float32)[None, :], 1) * scale
    has_own = is_first & (rows >= 0)
    most = tl.where(has_own, own_score, _NOTHING)
    total = tl.where(has_own, 1.0, 0.0)
    acc = tl.where(has_own[:, None], own_value.to(tl.float32)[None, :], 0.0)
    for start in range(begin, end, KEYS):
        if not EARLY:
            k = _cached(keys, table, start, end, k_strides, group, D, DP, S, KEYS, True)
            v = _cached(values, table, start, end, v_strides, group, D, DP, S, KEYS, False)
        scores = tl.dot(query, k, input_precision=PRECISION) * scale
        seen = start + tl.arange(0, KEYS) < end
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrunk = tl.exp2(most - higher)
        total = total * shrunk + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrunk[:, None], input_precision=PRECISION)
        most = higher
        if EARLY:
            k = _cached(keys, table, start + KEYS, end, k_strides, group, D, DP, S, KEYS, True)
            v = _cached(values, table, start + KEYS, end, v_strides, group, D, DP, S, KEYS, False)

    is_real = has_query & real[None, :]
    out_at = out + (token * G * GROUP + group * GROUP + rows)[:, None] * D + channels[None, :]
    if num_parts == 1:
        tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_real)
    else:
        part = (place * SPLITS + split) * GROUP + rows
        tl.store(most_of_parts + part, most, mask=rows < GROUP)
        tl.store(total_of_parts + part, total, mask=rows < GROUP)
        tl.store(parts + part[:, None] * D + channels[None, :], acc, mask=is_real)
        tl.debug_barrier()
        if tl.atomic_add(num_arrived + place, 1, sem="acq_rel") == num_parts - 1:
            _add_up(
                out, parts, most_of_parts, total_of_parts, place, num_parts,
                GROUP, D, DP, SPLITS, HEADS,
            )  # fmt: skip
            tl.store(num_arrived + place, 0)


class TritonDecodeAttention(TritonKernel):
    """Scratch memory holds the parts of all tokens, and how many of each are there: none, between calls."""

    def __init__(self, configuration: Configuration, profile: DeviceProfile, problem: Problem, device: str) -> None:
        self._architecture = architecture = profile.capability.architecture
        self._padded = next_power_of_two(problem.head_dim)
        self._group = problem.num_heads // problem.num_kv_heads
        head_bytes = self._padded * (4 if problem.dtype == "float32" else 2)
        is_wide = head_bytes >= WIDE_BYTES
        self._tiles = [
            (configuration["few_tokens"], self._tile(configuration, "", head_bytes, problem.dtype)),
            (configuration["several_tokens"], self._tile(configuration, "several_", head_bytes, problem.dtype)),
        ]
        self._crowd = self._tile(configuration, "crowd_", head_bytes, problem.dtype)
        self._max_splits = min(16, configuration["max_splits"]) if is_wide else configuration["max_splits"]
        self._precision = dot_precision(architecture)
        self._pdl = starts_early(architecture, configuration)
        num_parts = self._max_splits * problem.num_heads  # tokens divide the splits among them
        sizes = (num_parts * problem.head_dim, num_parts, num_parts)
        self._scratch = tuple(torch.empty(size, dtype=torch.float32, device=device) for size in sizes)
        places = self._max_splits * problem.num_kv_heads
        self._num_arrived = torch.zeros(places, dtype=torch.int32, device=device)
        self.workspace_bytes = sum(tensor.nbytes for tensor in (*self._scratch, self._num_arrived))

    def _tile(self, configuration: Configuration, prefix: str, head_bytes: int, dtype: str) -> dict[str, int]:
        keys, warps = configuration[f"{prefix}keys"], configuration[f"{prefix}warps"]
        is_wide = head_bytes >= WIDE_BYTES
        num_warps = warps_of_head(warps, head_bytes)
        return {
            "KEYS": keys_of_head(min(64, keys) if is_wide else keys, head_bytes, dtype),
            "num_warps": num_warps,
            "num_stages": 1 if is_wide else configuration[f"{prefix}stages"],
            **register_limit(self._architecture, num_warps),
        }

    def __call__(self, *arguments: Any) -> None:
        out, qkv, positions, slots, cos_sin, k_cache, v_cache, q_norm, k_norm, eps, tables, rows, scale, window = (
            arguments
        )
        num_tokens, (block_size, num_kv_heads, head_dim) = len(out), k_cache.shape[1:]
        num_splits = 1 << (max(1, self._max_splits // max(1, num_tokens)).bit_length() - 1)
        tile = next((tile for most_tokens, tile in self._tiles if num_tokens <= most_tokens), self._crowd)
        heads_at_once = max(1, _PART_REGISTERS * 32 * tile["num_warps"] // (num_splits * self._padded))
        assert out.is_contiguous() and qkv.is_contiguous()
        if num_splits > 1:
            num_parts = num_tokens * num_kv_heads * num_splits * self._group
            assert num_parts <= self._scratch[1].numel() and num_parts * head_dim <= self._scratch[0].numel()
            assert num_tokens * num_kv_heads <= self._num_arrived.numel()
        if not num_tokens:
            return
        assert k_cache.stride(3) == v_cache.stride(3) == cos_sin.stride(1) == tables.stride(1) == 1
        self.launch(
            decode_attention_kernel,
            (num_tokens * num_kv_heads, num_splits),
            *(out, qkv, positions, slots, cos_sin, k_cache, v_cache),
            *(out if q_norm is None else q_norm, out if k_norm is None else k_norm, eps),
            *(tables, rows, scale * _LOG2_E, window, *self._scratch, self._num_arrived),
            *(cos_sin.stride(0), tables.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3]),
            G=num_kv_heads,
            GROUP=self._group,
            ROWS=max(16, next_power_of_two(self._group)),
            D=head_dim,
            DP=self._padded,
            HALF=cos_sin.shape[1] // 2,
            S=block_size,
            SPLITS=num_splits,
            HEADS=min(next_power_of_two(self._group), heads_at_once),
            HAS_Q_NORM=q_norm is not None,
            HAS_K_NORM=k_norm is not None,
            HAS_WINDOW=window > 0,
            PRECISION=self._precision,
            EARLY=tile is not self._crowd,
            PDL=self._pdl,
            **tile,
            **({"launch_pdl": True} if self._pdl else {}),
        )
