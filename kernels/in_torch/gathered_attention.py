"""Paged attention by gathering the cache into dense tensors and calling PyTorch's attention.

T query tokens, N sequences, H query heads, G key/value heads, D head size, L longest cached length.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..implementation import HostLengths
from ..reference.attention import visible


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
) -> None:
    """All decodes in one masked batch, prefill chunks one by one. Meaning: `reference.attention.paged_attention`."""
    num_queries_N = query_starts_N1[1:] - query_starts_N1[:-1]
    decode_N = (num_queries_N == 1).nonzero().flatten()
    if decode_N.numel():
        tokens = query_starts_N1[decode_N].long()
        tables, lengths = block_tables_RM[rows_N[decode_N]], kv_lengths_N[decode_N]
        out_THD[tokens] = _decode(q_THD[tokens], k_cache_BSGD, v_cache_BSGD, tables, lengths, scale, window)
    for n in (num_queries_N > 1).nonzero().flatten().tolist():
        begin, end = int(query_starts_N1[n]), int(query_starts_N1[n + 1])
        table, length = block_tables_RM[rows_N[n]], int(kv_lengths_N[n])
        out_THD[begin:end] = _prefill(q_THD[begin:end], k_cache_BSGD, v_cache_BSGD, table, length, scale, window)


def _decode(
    q_NHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables_NM: torch.Tensor,
    lengths_N: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    block_size = k_cache.shape[1]
    longest = int(lengths_N.max())
    num_blocks = -(-longest // block_size)
    positions_N = torch.arange(num_blocks, device=tables_NM.device) * block_size < lengths_N.unsqueeze(1)
    blocks = torch.where(positions_N, tables_NM[:, :num_blocks], 0).long()
    keys = k_cache[blocks].flatten(1, 2).transpose(1, 2)
    values = v_cache[blocks].flatten(1, 2).transpose(1, 2)
    mask_NL = visible(lengths_N - 1, keys.shape[2], window)
    # Slots past the end may hold anything, even a NaN, which neither a mask nor a zero weight takes away.
    unseen = ~mask_NL[:, None, :, None]
    keys, values = keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0)
    group = q_NHD.shape[1] // k_cache.shape[2]
    q = q_NHD.view(q_NHD.shape[0], -1, group, q_NHD.shape[2])
    return scaled_dot_product_attention(q, keys, values, attn_mask=mask_NL[:, None, None, :], scale=scale).flatten(1, 2)


def _prefill(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table_M: torch.Tensor,
    length: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    blocks = table_M[: -(-length // k_cache.shape[1])].long()
    keys = k_cache[blocks].flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0)
    values = v_cache[blocks].flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0)
    num_tokens = q_THD.shape[0]
    mask = visible(torch.arange(length - num_tokens, length, device=q_THD.device), length, window)
    q = q_THD.transpose(0, 1).unsqueeze(0)
    grouped = q_THD.shape[1] != k_cache.shape[2]
    out = scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out.squeeze(0).transpose(0, 1)
