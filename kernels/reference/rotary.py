"""Rotary positions and the write of keys and values into the paged cache.

T tokens, H query heads, G key/value heads, D head size, R rotary size (R <= D, the first R channels rotate),
P positions, B blocks, S slots per block. A slot is block * S + offset; a negative slot is not written.
"""

import torch

from .rms_norm import rms_norm


def rotary_and_kv_write(
    q_THD: torch.Tensor,
    qkv_TE: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    cos_sin_PR: torch.Tensor,
    k_cache_BSGD: torch.Tensor,
    v_cache_BSGD: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
) -> None:
    """Split qkv (E = (H + 2G) D) into heads, normalise q and k per head where norms are given, rotate both, write the
    rotated queries to q and the keys and values to their slots of the cache. cos_sin holds cosines, then sines
    (float32).
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads = k_cache_BSGD.shape[2]
    sizes = [num_heads, num_kv_heads, num_kv_heads]
    q_in, k_in, v_in = torch.split(qkv_TE.view(num_tokens, -1, head_dim), sizes, dim=1)
    q_in, k_in = _normed(q_in, q_norm_D, eps), _normed(k_in, k_norm_D, eps)
    cos_TR, sin_TR = cos_sin_PR[positions_T.long()].chunk(2, dim=-1)
    q_THD.copy_(_rotated(q_in, cos_TR, sin_TR))
    written_T = slots_T >= 0
    slots = slots_T[written_T].long()
    k_cache_BSGD.flatten(0, 1)[slots] = _rotated(k_in, cos_TR, sin_TR)[written_T].to(k_cache_BSGD.dtype)
    v_cache_BSGD.flatten(0, 1)[slots] = v_in[written_T].to(v_cache_BSGD.dtype)


def _normed(x_THD: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight_D is None:
        return x_THD
    out_THD = torch.empty_like(x_THD, memory_format=torch.contiguous_format)
    rms_norm(out_THD, x_THD, weight_D, eps)
    return out_THD


def _rotated(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """Halves rotated against each other, as in the Hugging Face layout; computed in float32."""
    half = cos_TR.shape[-1]
    x_float = x_THD.float()
    first, second, rest = x_float[..., :half], x_float[..., half : 2 * half], x_float[..., 2 * half :]
    cos, sin = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x_THD.dtype)
