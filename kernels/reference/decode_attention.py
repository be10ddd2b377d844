"""Attention of a step that has one token of each sequence, from its query, key and value as they are projected.

T tokens and sequences, H query heads, G key/value heads, D head size, R rotary size, P positions, B blocks, S slots per
block, M blocks per table row, N rows of the table.
"""

import torch

from .attention import paged_attention
from .rotary import rotary_and_kv_write


def decode_attention(
    out_TO: torch.Tensor,
    qkv_TE: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    cos_sin_PR: torch.Tensor,
    k_cache_BSGD: torch.Tensor,
    v_cache_BSGD: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
    block_tables_NM: torch.Tensor,
    rows_T: torch.Tensor,
    scale: float,
    window: int,
) -> None:
    """`rotary_and_kv_write`, then `paged_attention` of each token over the positions up to its own (O = H D).

    Token t is at positions[t] of the sequence whose blocks are block_tables[rows[t]]. Its own key and value are those
    of qkv, rounded to the cache's dtype, whether its slot is written or (negative) not; older ones come from the cache.
    """
    num_tokens, (num_kv_heads, head_dim) = len(qkv_TE), k_cache_BSGD.shape[2:]
    q_THD = qkv_TE.new_empty(num_tokens, out_TO.shape[1] // head_dim, head_dim)
    own_keys, own_values = (
        cache.new_empty(num_tokens, 1, num_kv_heads, head_dim) for cache in (k_cache_BSGD, v_cache_BSGD)
    )
    own_slots = torch.arange(num_tokens, device=qkv_TE.device, dtype=slots_T.dtype)
    rotary_and_kv_write(
        q_THD, qkv_TE, positions_T, own_slots, cos_sin_PR, own_keys, own_values, q_norm_D, k_norm_D, eps
    )
    one = torch.tensor([0, 1], device=qkv_TE.device, dtype=torch.int32)
    first_block = torch.zeros(1, 1, device=qkv_TE.device, dtype=torch.int32)
    for token, (position, row) in enumerate(zip(positions_T.tolist(), rows_T.tolist(), strict=True)):
        keys = _before(k_cache_BSGD, block_tables_NM[row], position, own_keys[token])
        values = _before(v_cache_BSGD, block_tables_NM[row], position, own_values[token])
        lengths = one[1:] * (position + 1)
        out_HD = out_TO[token].view(1, -1, head_dim)
        paged_attention(
            out_HD, q_THD[token : token + 1], keys, values, first_block, one[:1], one, lengths, scale, window
        )
    written_T = slots_T >= 0
    slots = slots_T[written_T].long()
    k_cache_BSGD.flatten(0, 1)[slots] = own_keys[written_T, 0]
    v_cache_BSGD.flatten(0, 1)[slots] = own_values[written_T, 0]


def _before(cache_BSGD: torch.Tensor, table_M: torch.Tensor, position: int, own_1GD: torch.Tensor) -> torch.Tensor:
    """A sequence's cached keys or values up to a position, and its own there, as a cache of one block."""
    blocks = table_M[: -(-position // cache_BSGD.shape[1])].long()
    return torch.cat((cache_BSGD[blocks].flatten(0, 1)[:position], own_1GD)).unsqueeze(0)
