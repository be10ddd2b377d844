"""Encoders of the BERT and RoBERTa families: every token sees all of its text, positions are learned, nothing is kept.

T tokens of a step, S texts, D hidden size, I intermediate channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...ipc.facts import PoolingKind
from ...kernels.implementation import LinearKernel
from ..weights.source import WeightSource
from .encoder_config import IGNORED_PREFIXES, EncoderConfig, encoder_parameters
from .encoding import EqualTexts, attend, pool_first, pool_last, pool_mean

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "relu": torch.nn.functional.relu,
}
POOLS = {PoolingKind.MEAN: pool_mean, PoolingKind.CLS: pool_first, PoolingKind.LAST: pool_last}


@dataclass(frozen=True)
class Norm:
    """A layer norm's weights, `[D]` each."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class EncoderLayer:
    """One layer, its matrices packed. Query, key and value are one product."""

    qkv: object
    output: object
    attention_norm: Norm
    up: object
    down: object
    output_norm: Norm


@dataclass(frozen=True, kw_only=True)
class EncoderWeights:
    """Everything that was read. `positions` hold the vector of the only token type too: no text has a second part."""

    words: torch.Tensor
    positions: torch.Tensor
    norm: Norm
    layers: tuple[EncoderLayer, ...]
    num_bytes: int


@dataclass(frozen=True)
class EncoderInputs:
    """A step's whole texts, one after the other: `[T]` ids, `[T]` positions within each text, `[S]` lengths."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    counts: torch.Tensor
    groups: list[EqualTexts]


class Encoder:
    """From tokens to vectors. `linear` is a kernel chosen at boot; the rest is plain PyTorch."""

    def __init__(self, config: EncoderConfig, weights: EncoderWeights, linear: LinearKernel) -> None:
        self._config = config
        self._weights = weights
        self._linear = linear
        self._activate = _ACTIVATIONS[config.activation]
        self._pool = POOLS[config.pooling.kind]

    def forward(self, inputs: EncoderInputs, on_layer: Callable[[], None]) -> torch.Tensor:
        """`[T, D]`, the last hidden states. `on_layer` is called after each layer."""
        weights, positions = self._weights, inputs.positions + self._config.first_position
        embedded_TD = torch.nn.functional.embedding(inputs.token_ids, weights.words) + weights.positions[positions]
        hidden_TD = self._normed(embedded_TD, weights.norm)
        for layer in weights.layers:
            hidden_TD = self._layer(hidden_TD, layer, inputs.groups)
            on_layer()
        return hidden_TD

    def pool(self, hidden_TD: torch.Tensor, inputs: EncoderInputs) -> torch.Tensor:
        """Float32 `[S, D]`, not normalised."""
        return self._pool(hidden_TD, inputs.counts)

    def _layer(self, hidden_TD: torch.Tensor, layer: EncoderLayer, groups: list[EqualTexts]) -> torch.Tensor:
        mixed_TD = torch.empty_like(hidden_TD)
        attend(mixed_TD, self._product(hidden_TD, layer.qkv, 3 * hidden_TD.shape[1]), self._config.num_heads, groups)
        hidden_TD = self._normed(self._product(mixed_TD, layer.output) + hidden_TD, layer.attention_norm)
        raised_TI = self._activate(self._product(hidden_TD, layer.up, self._config.intermediate_size))
        return self._normed(self._product(raised_TI, layer.down) + hidden_TD, layer.output_norm)

    def _product(self, x: torch.Tensor, packed: object, num_outputs: int | None = None) -> torch.Tensor:
        out = x.new_empty((len(x), num_outputs or self._config.hidden_size))
        self._linear(out, x, packed)
        return out

    def _normed(self, x_TD: torch.Tensor, norm: Norm) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x_TD, x_TD.shape[1:], norm.weight, norm.bias, self._config.norm_eps)


class EncoderReader:
    """Reads a checkpoint, converts it to the run's dtype and packs the matrices."""

    def __init__(
        self,
        config: EncoderConfig,
        source: WeightSource,
        linear: LinearKernel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = config
        self._source = source
        self._linear = linear
        self._dtype = dtype
        self._device = device
        self._parameters = encoder_parameters(config)
        self._num_bytes = 0

    def read(self) -> EncoderWeights:
        """Raises Refusal when names or shapes do not match the config."""
        self._source.check(self._parameters, IGNORED_PREFIXES)
        words = self._kept(self._plain("embeddings.word_embeddings.weight"))
        types = self._plain("embeddings.token_type_embeddings.weight")
        positions = self._kept(self._plain("embeddings.position_embeddings.weight") + types[0])
        norm = self._norm("embeddings.LayerNorm")
        layers = tuple(self._layer(f"encoder.layer.{index}") for index in range(self._config.num_layers))
        return EncoderWeights(words=words, positions=positions, norm=norm, layers=layers, num_bytes=self._num_bytes)

    def _layer(self, name: str) -> EncoderLayer:
        attention = f"{name}.attention"
        return EncoderLayer(
            qkv=self._packed(*(f"{attention}.self.{part}" for part in ("query", "key", "value"))),
            output=self._packed(f"{attention}.output.dense"),
            attention_norm=self._norm(f"{attention}.output.LayerNorm"),
            up=self._packed(f"{name}.intermediate.dense"),
            down=self._packed(f"{name}.output.dense"),
            output_norm=self._norm(f"{name}.output.LayerNorm"),
        )

    def _packed(self, *names: str) -> object:
        """Matrices with the same input, as one."""
        weight = torch.cat([self._plain(f"{name}.weight") for name in names])
        packed = self._linear.pack(weight, torch.cat([self._plain(f"{name}.bias") for name in names]))
        self._num_bytes += packed.num_bytes
        return packed

    def _norm(self, name: str) -> Norm:
        return Norm(self._kept(self._plain(f"{name}.weight")), self._kept(self._plain(f"{name}.bias")))

    def _plain(self, name: str) -> torch.Tensor:
        return self._source.read(self._parameters[name]).to(self._device, self._dtype)

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copied out of the mapped file, so that the file may change or vanish."""
        self._num_bytes += tensor.nbytes
        return tensor.clone()
