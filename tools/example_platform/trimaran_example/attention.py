"""Attention over the paged cache, on shadows: what the device runs when its kernel is launched.

T query tokens, N sequences, R rows, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import torch


def attend(
    out_THD: torch.Tensor,
    q_THD: torch.Tensor,
    keys_BSGD: torch.Tensor,
    values_BSGD: torch.Tensor,
    tables_RM: torch.Tensor,
    rows_N: torch.Tensor,
    starts_N1: torch.Tensor,
    lengths_N: torch.Tensor,
    scale: float,
    window: int,
    host: object = None,
) -> None:
    """Causal; a query sees itself and what stands before it, at most `window` positions unless that is 0."""
    block_size = keys_BSGD.shape[1]
    group = q_THD.shape[1] // keys_BSGD.shape[2]
    for n, length in enumerate(lengths_N.tolist()):
        begin, end = starts_N1[n : n + 2].tolist()
        if begin == end:
            continue
        positions = torch.arange(length)
        slots = tables_RM[rows_N[n], positions // block_size].long() * block_size + positions % block_size
        keys, values = (cache.flatten(0, 1)[slots].float() for cache in (keys_BSGD, values_BSGD))
        distance = torch.arange(length - end + begin, length)[:, None] - positions
        unseen = (distance < 0) | ((distance >= window) if window else False)
        grouped = q_THD[begin:end].float().unflatten(1, (-1, group))
        scores = torch.einsum("tgid,lgd->gitl", grouped, keys).mul(scale).masked_fill(unseen, float("-inf"))
        mixed = torch.einsum("gitl,lgd->tgid", scores.softmax(-1), values)
        out_THD[begin:end] = mixed.flatten(1, 2).to(out_THD.dtype)
