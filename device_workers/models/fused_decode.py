"""Steps of one or two tokens, each of another sequence: five launches a layer instead of nine, residuals in float32.

T tokens, R rows whose logits are asked, D hidden size, V vocabulary. At this size a layer takes as long as its weights
take to read, and launches and roundings between products are what can be saved. This file does not embed, and does not
choose which step takes this path: the decoder does.

The kernels may start before the one ahead of them has ended, and then read weights, step inputs and older positions of
the cache early. That is right as long as whatever wrote those has ended when the first of them is launched: embedding,
which waits for everything before it, stands between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...kernels.implementation import Kernel, PlainWeight
from .config import ModelConfig
from .sharding import Shard

if TYPE_CHECKING:
    from .decoder import DecoderWeights, LayerWeights, StepTensors

MAX_FUSED_TOKENS = 2
"""Above, products by matrix units are faster."""
_SMALL_LAYER = 1 << 25
"""Numbers in a layer's weights. Of a larger one, two tokens are as fast by matrix units too (8B model, H200)."""


@dataclass(frozen=True, kw_only=True)
class FusedKernels:
    """The operations of a fused layer."""

    norm_linear: Kernel
    norm_gate_up: Kernel
    linear_add: Kernel
    decode_attention: Kernel


class FusedDecode:
    """The layers and the head on one rank that has the whole model; buffers for the few tokens it takes."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        weights: DecoderWeights,
        kernels: FusedKernels,
        cos_sin: torch.Tensor,
        device: torch.device,
    ) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._cos_sin = cos_sin
        attended = shard.num_heads * config.head_dim

        def buffer(num_channels: int) -> torch.Tensor:
            return torch.zeros(MAX_FUSED_TOKENS, num_channels, dtype=torch.float32, device=device)

        self._residual = buffer(config.hidden_size)
        self._qkv = buffer(attended + 2 * shard.num_kv_heads * config.head_dim)
        self._attended = buffer(attended)
        self._activated = buffer(shard.intermediate_size)

    @staticmethod
    def can_read(weights: DecoderWeights) -> bool:
        """Whether all weights are as the checkpoint has them."""
        return all(
            isinstance(weight, PlainWeight)
            for weight in (
                weights.head,
                *(part for layer in weights.layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)),
            )
        )

    @property
    def max_tokens(self) -> int:
        """Steps of more take the ordinary path."""
        layer = self._weights.layers[0]
        parts = (layer.qkv, layer.output, layer.gate_up, layer.down)
        is_small = sum(_plain(part).weight_NK.numel() for part in parts) <= _SMALL_LAYER
        return MAX_FUSED_TOKENS if is_small else 1

    def residual(self, num_tokens: int) -> torch.Tensor:
        """What embeddings are written to, and what `forward` leaves: a view of the first tokens."""
        return self._residual[:num_tokens]

    def forward(
        self,
        batch: StepTensors,
        cache: tuple[tuple[torch.Tensor, torch.Tensor], ...],
        on_layer: Callable[[], None],
    ) -> torch.Tensor:
        """From the embeddings in `residual` to the last hidden state there."""
        kernels, eps, num_tokens = self._kernels, self._config.rms_norm_eps, batch.token_ids.shape[0]
        residual, activated = self._residual[:num_tokens], self._activated[:num_tokens]
        for index, layer in enumerate(self._weights.layers):
            self._attend(layer, batch, cache[index], self._config.windows[index])
            kernels.norm_gate_up(activated, residual, layer.post_norm, *_plain(layer.gate_up), eps)
            kernels.linear_add(residual, activated, *_plain(layer.down))
            on_layer()
        return residual

    def _attend(
        self, layer: LayerWeights, batch: StepTensors, cache: tuple[torch.Tensor, torch.Tensor], window: int
    ) -> None:
        kernels, eps, num_tokens = self._kernels, self._config.rms_norm_eps, batch.token_ids.shape[0]
        residual, qkv, attended = self._residual[:num_tokens], self._qkv[:num_tokens], self._attended[:num_tokens]
        kernels.norm_linear(qkv, residual, layer.input_norm, *_plain(layer.qkv), eps)
        kernels.decode_attention(
            attended,
            qkv,
            batch.positions,
            batch.slots,
            self._cos_sin,
            *cache,
            layer.q_norm,
            layer.k_norm,
            eps,
            batch.block_tables,
            batch.rows,
            self._config.head_dim**-0.5,
            window,
        )
        kernels.linear_add(residual, attended, *_plain(layer.output))

    def logits(self, out_RV: torch.Tensor, residual_RD: torch.Tensor) -> None:
        """Of the hidden states that `forward` left."""
        weights = self._weights
        self._kernels.norm_linear(
            out_RV, residual_RD, weights.final_norm, *_plain(weights.head), self._config.rms_norm_eps
        )


def _plain(weight: object) -> PlainWeight:
    assert isinstance(weight, PlainWeight)
    return weight
