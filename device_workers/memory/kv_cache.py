"""The paged key/value cache: per layer one tensor of keys and one of values.

B blocks, S slots per block, G key/value heads held by this rank, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class KvLayout:
    """Sizes of one rank's cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size


class KvCache:
    """Keys and values `[B, S, G, D]` of each layer. Every page is touched at once, so that memory use does not grow
    later.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        shape = (num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
        self.layout = layout
        self.num_blocks = num_blocks
        self.layers = tuple(
            (_touched(shape, layout.dtype, device), _touched(shape, layout.dtype, device))
            for _ in range(layout.num_layers)
        )

    @property
    def num_bytes(self) -> int:
        return self.layout.bytes_per_block * self.num_blocks


def _touched(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device).zero_()
