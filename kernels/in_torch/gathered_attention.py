"""Paged attention by gathering the cache into dense tensors and calling PyTorch's attention.

T query tokens, N sequences, H query heads, G key/value heads, D head size, L longest cached length.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..implementation import HostLengths
from ..reference.attention import softmax_with_sinks, visible


class Scoring(NamedTuple):
    """What becomes of queries times keys."""

    scale: float
    window: int
    soft_cap: float
    sinks_H: torch.Tensor | None


def gathered_attention(
    out_THD: torch.Tensor,
    q_THD: torch.Tensor,
    k_cache_BSGD: torch.Tensor,
    v_cache_BSGD: torch.Tensor,
    block_tables_RM: torch.Tensor,
    rows_N: torch.Tensor,
    query_starts_N1: torch.Tensor,
    kv_lengths_N: torch.Tensor,
    scale: float,
    window: int,
    host: HostLengths | None = None,
    soft_cap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """All decodes in one masked batch, prefill chunks one by one. Meaning: `reference.attention.paged_attention`."""
    scoring = Scoring(scale, window, soft_cap, sinks_H)
    num_queries_N = query_starts_N1[1:] - query_starts_N1[:-1]
    decode_N = (num_queries_N == 1).nonzero().flatten()
    if decode_N.numel():
        tokens = query_starts_N1[decode_N].long()
        tables, lengths = block_tables_RM[rows_N[decode_N]], kv_lengths_N[decode_N]
        out_THD[tokens] = _decode(q_THD[tokens], k_cache_BSGD, v_cache_BSGD, tables, lengths, scoring)
    for n in (num_queries_N > 1).nonzero().flatten().tolist():
        begin, end = int(query_starts_N1[n]), int(query_starts_N1[n + 1])
        table, length = block_tables_RM[rows_N[n]], int(kv_lengths_N[n])
        out_THD[begin:end] = _prefill(q_THD[begin:end], k_cache_BSGD, v_cache_BSGD, table, length, scoring)


def _decode(
    q_NHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables_NM: torch.Tensor,
    lengths_N: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    block_size = k_cache.shape[1]
    longest = int(lengths_N.max())
    num_blocks = -(-longest // block_size)
    positions_N = torch.arange(num_blocks, device=tables_NM.device) * block_size < lengths_N.unsqueeze(1)
    blocks = torch.where(positions_N, tables_NM[:, :num_blocks], 0).long()
    keys = k_cache[blocks].flatten(1, 2).transpose(1, 2)
    values = v_cache[blocks].flatten(1, 2).transpose(1, 2)
    mask_NL = visible(lengths_N - 1, keys.shape[2], scoring.window)
    # Slots past the end may hold anything, even a NaN, which neither a mask nor a zero weight takes away.
    unseen = ~mask_NL[:, None, :, None]
    keys, values = keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0)
    group = q_NHD.shape[1] // k_cache.shape[2]
    q = q_NHD.view(q_NHD.shape[0], -1, group, q_NHD.shape[2])
    mask = mask_NL[:, None, None, :]
    if scoring.soft_cap or scoring.sinks_H is not None:
        q = q_NHD.unsqueeze(2)
        return _scored(q, keys, values, mask, scoring).squeeze(2)
    return scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scoring.scale).flatten(1, 2)


def _prefill(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table_M: torch.Tensor,
    length: int,
    scoring: Scoring,
) -> torch.Tensor:
    blocks = table_M[: -(-length // k_cache.shape[1])].long()
    keys = k_cache[blocks].flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0)
    values = v_cache[blocks].flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0)
    num_tokens = q_THD.shape[0]
    mask = visible(torch.arange(length - num_tokens, length, device=q_THD.device), length, scoring.window)
    q = q_THD.transpose(0, 1).unsqueeze(0)
    if scoring.soft_cap or scoring.sinks_H is not None:
        return _scored(q, keys, values, mask, scoring).squeeze(0).transpose(0, 1)
    grouped = q_THD.shape[1] != k_cache.shape[2]
    out = scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scoring.scale, enable_gqa=grouped)
    return out.squeeze(0).transpose(0, 1)


def _scored(
    q_NHTD: torch.Tensor, k_NGLD: torch.Tensor, v_NGLD: torch.Tensor, mask: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """`[N, H, T, D]`, by scores written out: PyTorch's attention has neither soft caps nor sinks."""
    group = q_NHTD.shape[1] // k_NGLD.shape[1]
    keys, values = (cached.float().repeat_interleave(group, dim=1) for cached in (k_NGLD, v_NGLD))
    scores = q_NHTD.float() @ keys.transpose(2, 3) * scoring.scale
    if scoring.soft_cap:
        scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
    weights = softmax_with_sinks(scores.masked_fill(~mask, float("-inf")), scoring.sinks_H)
    return (weights @ values).to(q_NHTD.dtype)
