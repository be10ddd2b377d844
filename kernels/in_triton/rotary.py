"""Rotary positions and the write of keys and values into the paged cache. One program takes some heads of one token.

T tokens, H query heads, G key/value heads, D head size, R rotary size, S slots per block. The heads of qkv count
queries, then keys, then values. A head is read in three parts: both halves that rotate, and the rest (D - R).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .configurations import Configuration
from .launching import TritonKernel, next_power_of_two


@triton.jit
def _part(base, heads, first, channels, exists):
    offsets = heads[:, None] + first + channels[None, :]
    return tl.load(base + offsets, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def _weights(q_norm, k_norm, first, channels, inside, is_query, HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr):
    """Norm weights of each head; ones where there are none."""
    ones = tl.full([1, channels.shape[0]], 1.0, tl.float32)
    of_query = ones
    of_key = ones
    if HAS_Q_NORM:
        of_query = tl.load(q_norm + first + channels, mask=inside, other=0.0).to(tl.float32)[None, :]
    if HAS_K_NORM:
        of_key = tl.load(k_norm + first + channels, mask=inside, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_query[:, None], of_query, of_key)


@triton.jit
def _scaled(part, scale, weights, is_normed, dtype: tl.constexpr):
    normed = ((part * scale[:, None]).to(dtype).to(tl.float32) * weights).to(dtype).to(tl.float32)
    return tl.where(is_normed[:, None], normed, part)


@triton.jit
def _write(q, k_cache, v_cache, q_at, k_at, v_at, first, channels, part, to_query, to_key, to_value, inside,
           dtype: tl.constexpr):  # fmt: skip
    """One part of each head goes to exactly one place. Keys are rounded to the model's dtype before the cache's."""
    places = first + channels[None, :]
    rounded = part.to(dtype)
    tl.store(q + q_at[:, None] + places, rounded, mask=to_query[:, None] & inside)
    cached = rounded.to(k_cache.dtype.element_ty)
    tl.store(k_cache + k_at[:, None] + places, cached, mask=to_key[:, None] & inside)
    tl.store(v_cache + v_at[:, None] + places, cached, mask=to_value[:, None] & inside)


@triton.jit
def rotary_and_kv_write_kernel(
    q, qkv, positions, slots, cos_sin, k_cache, v_cache, q_norm, k_norm, eps,
    qkv_stride, q_token_stride, q_head_stride, cos_sin_stride,
    k_block_stride, k_slot_stride, k_head_stride, v_block_stride, v_slot_stride, v_head_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, S: tl.constexpr,
    HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    exists = heads < H + 2 * G
    is_query = heads < H
    is_key = (heads >= H) & (heads < H + G)
    is_value = (heads >= H + G) & exists
    channels = tl.arange(0, HALF_BLOCK)
    in_half = channels < HALF
    mask = exists[:, None] & in_half[None, :]
    dtype: tl.constexpr = qkv.dtype.element_ty

    row = qkv + token * qkv_stride
    first = _part(row, heads * D, 0, channels, mask)
    second = _part(row, heads * D, HALF, channels, mask)
    if REST_BLOCK > 0:
        others = tl.arange(0, REST_BLOCK)
        in_rest = others < D - 2 * HALF
        rest_mask = exists[:, None] & in_rest[None, :]
        rest = _part(row, heads * D, 2 * HALF, others, rest_mask)

    if HAS_Q_NORM or HAS_K_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST_BLOCK > 0:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / D + eps)
        is_normed = (is_query & HAS_Q_NORM) | (is_key & HAS_K_NORM)
        of_first = _weights(q_norm, k_norm, 0, channels, in_half, is_query, HAS_Q_NORM, HAS_K_NORM)
        of_second = _weights(q_norm, k_norm, HALF, channels, in_half, is_query, HAS_Q_NORM, HAS_K_NORM)
        first = _scaled(first, scale, of_first, is_normed, dtype)
        second = _scaled(second, scale, of_second, is_normed, dtype)
        if REST_BLOCK > 0:
            of_rest = _weights(q_norm, k_norm, 2 * HALF, others, in_rest, is_query, HAS_Q_NORM, HAS_K_NORM)
            rest = _scaled(rest, scale, of_rest, is_normed, dtype)

    angles = cos_sin + tl.load(positions + token).to(tl.int64) * cos_sin_stride + channels
    cos = tl.load(angles, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angles + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :]
    turns = (is_query | is_key)[:, None]
    turned_first = tl.where(turns, first * cos - second * sin, first)
    turned_second = tl.where(turns, second * cos + first * sin, second)

    slot = tl.load(slots + token).to(tl.int64)
    is_written = slot >= 0
    slot = tl.where(is_written, slot, 0)
    q_at = token * q_token_stride + heads * q_head_stride
    k_at = (slot // S) * k_block_stride + (slot % S) * k_slot_stride + (heads - H) * k_head_stride
    v_at = (slot // S) * v_block_stride + (slot % S) * v_slot_stride + (heads - H - G) * v_head_stride
    to_key = is_key & is_written
    to_value = is_value & is_written
    _write(q, k_cache, v_cache, q_at, k_at, v_at, 0, channels, turned_first, is_query, to_key, to_value,
           in_half[None, :], dtype)  # fmt: skip
    _write(q, k_cache, v_cache, q_at, k_at, v_at, HALF, channels, turned_second, is_query, to_key, to_value,
           in_half[None, :], dtype)  # fmt: skip
    if REST_BLOCK > 0:
        _write(q, k_cache, v_cache, q_at, k_at, v_at, 2 * HALF, others, rest, is_query, to_key, to_value,
               in_rest[None, :], dtype)  # fmt: skip


class TritonRotaryAndKvWrite(TritonKernel):
    def __init__(self, configuration: Configuration) -> None:
        self._heads, self._num_warps = configuration["heads"], configuration["num_warps"]

    def __call__(self, *arguments: Any) -> None:
        q, qkv, positions, slots, cos_sin, k_cache, v_cache, q_norm, k_norm, eps = arguments
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads, half = k_cache.shape[2], cos_sin.shape[1] // 2
        rest = head_dim - 2 * half
        tensors = (q, qkv, positions, slots, cos_sin, k_cache, v_cache)
        norms = (q if q_norm is None else q_norm, q if k_norm is None else k_norm)
        strides = (qkv.stride(0), q.stride(0), q.stride(1), cos_sin.stride(0), *_strides(k_cache), *_strides(v_cache))
        constants = {
            "H": num_heads,
            "G": num_kv_heads,
            "D": head_dim,
            "HALF": half,
            "S": k_cache.shape[1],
            "HEADS": self._heads,
            "HALF_BLOCK": next_power_of_two(half),
            "REST_BLOCK": next_power_of_two(rest) if rest else 0,
            "HAS_Q_NORM": q_norm is not None,
            "HAS_K_NORM": k_norm is not None,
        }
        grid = (num_tokens, -(-(num_heads + 2 * num_kv_heads) // self._heads))
        if num_tokens:
            kernel, num_warps = rotary_and_kv_write_kernel, self._num_warps
            self.launch(kernel, grid, *tensors, *norms, eps, *strides, **constants, num_warps=num_warps)


def _strides(cache: Any) -> tuple[int, int, int]:
    block, slot, head, channel = cache.stride()
    assert channel == 1
    return block, slot, head
