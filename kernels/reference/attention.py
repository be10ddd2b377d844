"""Attention over the paged cache, prefill chunks and decodes mixed.

T query tokens of all sequences, N sequences, R rows, H query heads, G key/value heads, D head size, B blocks, S slots
per block, M blocks per table row.
"""

import torch

from ..implementation import HostLengths


def paged_attention(
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
    """Causal attention of each sequence's queries over its cached keys and values.

    Sequence n owns queries query_starts[n] to query_starts[n + 1]; they are its last positions, so its first query
    stands at kv_lengths[n] minus their number. Its cache lies in the blocks of block_tables[rows[n]]. A query at
    position p sees positions max(0, p - window + 1) to p; window 0 means all. Consecutive groups of H / G query heads
    share a key/value head. Softmax in float32. With a soft cap c the scaled scores s become c * tanh(s / c); 0 means
    none. A sink is one more score of each head, for a position that has no value. `host` says of starts and lengths
    what the tensors say, or is None.

    An implementation may leave what belongs in `out` in a tensor of its own, and return that.
    """
    starts, lengths, rows = query_starts_N1.tolist(), kv_lengths_N.tolist(), rows_N.tolist()
    for sequence, length in enumerate(lengths):
        begin, end = starts[sequence], starts[sequence + 1]
        if begin == end:
            continue
        keys, values = _gathered(k_cache_BSGD, v_cache_BSGD, block_tables_RM[rows[sequence]], length)
        mask = visible(torch.arange(length - (end - begin), length, device=q_THD.device), length, window)
        out_THD[begin:end] = _attend(q_THD[begin:end], keys, values, mask, scale, soft_cap, sinks_H).to(out_THD.dtype)


def visible(positions_T: torch.Tensor, length: int, window: int) -> torch.Tensor:
    """Boolean `[T, length]`: which cached positions a query at each position sees."""
    distance = positions_T.unsqueeze(1) - torch.arange(length, device=positions_T.device).unsqueeze(0)
    seen = distance >= 0
    return seen & (distance < window) if window else seen


def _gathered(
    k_cache: torch.Tensor, v_cache: torch.Tensor, table_M: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = table_M[: -(-length // k_cache.shape[1])].long()
    return k_cache[blocks].flatten(0, 1)[:length], v_cache[blocks].flatten(0, 1)[:length]


def _attend(
    q_THD: torch.Tensor,
    k_LGD: torch.Tensor,
    v_LGD: torch.Tensor,
    mask_TL: torch.Tensor,
    scale: float,
    soft_cap: float,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    group = q_THD.shape[1] // k_LGD.shape[1]
    keys = k_LGD.float().repeat_interleave(group, dim=1)
    values = v_LGD.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,lhd->htl", q_THD.float(), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = softmax_with_sinks(scores.masked_fill(~mask_TL, float("-inf")), sinks_H)
    return torch.einsum("htl,lhd->thd", weights, values)


def softmax_with_sinks(scores_HTL: torch.Tensor, sinks_H: torch.Tensor | None) -> torch.Tensor:
    """Over the last dimension; with sinks the weights of a row sum to less than one. Leading dimensions may be more."""
    if sinks_H is None:
        return scores_HTL.softmax(-1)
    sinks = sinks_H.float()[:, None, None].expand(*scores_HTL.shape[:-1], 1)
    return torch.cat((scores_HTL, sinks), dim=-1).softmax(-1)[..., :-1]
