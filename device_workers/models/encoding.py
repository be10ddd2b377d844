"""What an encoder computes beside its matrix products, in plain PyTorch: there are no kernels for these yet.

T tokens of a step, S texts, D hidden size, H heads, d head size. Texts lie one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class EqualTexts:
    """The texts of one length in a step: `places` `[n, length]` are their tokens; None: they are all of the step."""

    length: int
    num_texts: int
    places: torch.Tensor | None


def group_by_length(counts_S: Array, device: torch.device) -> list[EqualTexts]:
    """Texts of equal length together: without padding nothing is computed in vain, and no text sees another's length.

    The lengths of a step are few even where they all differ: n of them need n * n / 2 tokens.
    """
    begins_S = np.cumsum(counts_S) - counts_S
    lengths = np.unique(counts_S)
    if len(lengths) == 1:
        return [EqualTexts(int(lengths[0]), len(counts_S), None)]
    groups = []
    for length in lengths.tolist():
        places = begins_S[counts_S == length][:, None] + np.arange(length)
        groups.append(EqualTexts(length, len(places), torch.from_numpy(places).to(device)))
    return groups


def attend(out_TD: torch.Tensor, qkv_T3D: torch.Tensor, num_heads: int, groups: list[EqualTexts]) -> None:
    """Every token of a text sees all of its text, before and behind it."""
    for group in groups:
        qkv = qkv_T3D if group.places is None else qkv_T3D[group.places]
        q, k, v = qkv.view(group.num_texts, group.length, 3, num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if group.places is None:
            out_TD.copy_(mixed.flatten(0, 1))
        else:
            out_TD[group.places] = mixed


def pool_mean(hidden_TD: torch.Tensor, counts_S: torch.Tensor) -> torch.Tensor:
    """Float32 `[S, D]`: the mean over each text's tokens, summed in float32."""
    texts_T = torch.repeat_interleave(torch.arange(len(counts_S), device=hidden_TD.device), counts_S)
    sums_SD = hidden_TD.new_zeros((len(counts_S), hidden_TD.shape[1]), dtype=torch.float32)
    sums_SD.index_add_(0, texts_T, hidden_TD.float())
    return sums_SD / counts_S[:, None]


def pool_first(hidden_TD: torch.Tensor, counts_S: torch.Tensor) -> torch.Tensor:
    """Float32 `[S, D]`: each text's first token."""
    return hidden_TD[torch.cumsum(counts_S, 0) - counts_S].float()


def pool_last(hidden_TD: torch.Tensor, counts_S: torch.Tensor) -> torch.Tensor:
    """Float32 `[S, D]`: each text's last token."""
    return hidden_TD[torch.cumsum(counts_S, 0) - 1].float()
