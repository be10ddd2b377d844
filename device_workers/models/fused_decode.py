"""Steps of few tokens, each of another sequence: five launches a layer instead of nine, residuals in float32.

T tokens, R rows whose logits are asked, D hidden size, V vocabulary. At this size a layer takes as long as its weights
take to read, and launches and roundings between products are what can be saved. Up to FEW_TOKENS, everything between
products is float32. More take matrix units, which want the model's dtype: what products read is in it then, that of the
residual a copy. This file does not embed, and does not choose which step takes this path: the decoder does.

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

FEW_TOKENS = 2
"""Above, products by matrix units are faster."""
SMALL_LAYER = 1 << 25
"""Numbers in a layer's weights. Below, launches are most of what a step takes, whatever its tokens."""
MAX_TOKENS_OF_SMALL_LAYERS = 2
MAX_TOKENS_OF_LARGE_LAYERS = 1
"""Of an 8B model on an H200, the vendor's products of 32 tokens are as fast."""


def max_fused_tokens(weights: DecoderWeights) -> int:
    """Steps of more take the ordinary path. What matrix units multiply before it is normed needs the range of bfloat16,
    and float32 they do not multiply in one pass.
    """
    if weights.embedding.dtype != torch.bfloat16:
        return FEW_TOKENS
    num_weights = max(
        sum(_plain(part).weight_NK.numel() for part in (layer.qkv, layer.output, layer.gate_up, layer.down))
        for layer in weights.layers
    )
    return MAX_TOKENS_OF_SMALL_LAYERS if num_weights <= SMALL_LAYER else MAX_TOKENS_OF_LARGE_LAYERS


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
        self.max_tokens = max_fused_tokens(weights)
        attended = shard.num_heads * config.head_dim
        sizes = (attended + 2 * shard.num_kv_heads * config.head_dim, attended, shard.intermediate_size)

        def buffer(num_tokens: int, num_channels: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_tokens, num_channels, dtype=dtype, device=device)

        self._residual = buffer(self.max_tokens, config.hidden_size, torch.float32)
        self._between_few = tuple(buffer(FEW_TOKENS, size, torch.float32) for size in sizes)
        dtype, num_more = weights.embedding.dtype, self.max_tokens if self.max_tokens > FEW_TOKENS else 0
        self._rounded = buffer(num_more, config.hidden_size, dtype)
        self._between = tuple(buffer(num_more, size, dtype) for size in sizes)

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
        num_tokens = batch.token_ids.shape[0]
        residual, is_few = self._residual[:num_tokens], num_tokens <= FEW_TOKENS
        qkv, attended, activated = (tensor[:num_tokens] for tensor in (self._between_few if is_few else self._between))
        x = residual if is_few else self._rounded[:num_tokens]
        rounded = () if is_few else (x,)
        if not is_few:
            x.copy_(residual)
        kernels, eps = self._kernels, self._config.rms_norm_eps
        for index, layer in enumerate(self._weights.layers):
            kernels.norm_linear(qkv, x, layer.input_norm, *_plain(layer.qkv), eps)
            self._attend(attended, qkv, layer, batch, cache[index], self._config.windows[index])
            kernels.linear_add(residual, attended, *_plain(layer.output), *rounded)
            kernels.norm_gate_up(activated, x, layer.post_norm, *_plain(layer.gate_up), eps)
            kernels.linear_add(residual, activated, *_plain(layer.down), *rounded)
            on_layer()
        return residual

    def _attend(
        self,
        attended: torch.Tensor,
        qkv: torch.Tensor,
        layer: LayerWeights,
        batch: StepTensors,
        cache: tuple[torch.Tensor, torch.Tensor],
        window: int,
    ) -> None:
        self._kernels.decode_attention(
            attended,
            qkv,
            batch.positions,
            batch.slots,
            self._cos_sin,
            *cache,
            layer.q_norm,
            layer.k_norm,
            self._config.rms_norm_eps,
            batch.block_tables,
            batch.rows,
            self._config.head_dim**-0.5,
            window,
        )

    def logits(self, out_RV: torch.Tensor, residual_RD: torch.Tensor) -> None:
        """Of the hidden states that `forward` left."""
        weights, num_rows = self._weights, residual_RD.shape[0]
        x = residual_RD
        if num_rows > FEW_TOKENS:
            x = self._rounded[:num_rows]
            x.copy_(residual_RD)
        self._kernels.norm_linear(out_RV, x, weights.final_norm, *_plain(weights.head), self._config.rms_norm_eps)


def _plain(weight: object) -> PlainWeight:
    assert isinstance(weight, PlainWeight)
    return weight
