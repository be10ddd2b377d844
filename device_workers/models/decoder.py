"""The decoder of the Llama, Mistral, Qwen2 and Qwen3 families: one definition, parametrised by its config.

T tokens of a step, R rows whose logits are asked, D hidden size, H query heads and G key/value heads of this rank,
d head size, I intermediate channels of this rank, V vocabulary. Every operation is a kernel chosen at boot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ...kernels.implementation import Communicator, HostLengths, Kernel, LinearKernel
from ..weights.source import WeightSource
from .config import ModelConfig
from .fused_decode import FusedDecode, FusedKernels
from .parameters import EMBEDDING, FINAL_NORM, HEAD, Parameter, layer_name, parameters
from .rotary import make_cos_sin
from .sharding import Shard


@dataclass(frozen=True, kw_only=True)
class DecoderKernels:
    """The operations of a forward pass."""

    embed: Kernel
    rms_norm: Kernel
    fused_add_rms_norm: Kernel
    linear: LinearKernel
    rotary_and_kv_write: Kernel
    paged_attention: Kernel
    silu_and_mul: Kernel

    @property
    def all(self) -> tuple[Kernel, ...]:
        return (
            self.embed,
            self.rms_norm,
            self.fused_add_rms_norm,
            self.linear,
            self.rotary_and_kv_write,
            self.paged_attention,
            self.silu_and_mul,
        )


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer, packed for this rank. Query, key and value are one product; so are gate and up."""

    input_norm: torch.Tensor
    qkv: object
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: object
    post_norm: torch.Tensor
    gate_up: object
    down: object


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """All of one rank's weights. `num_bytes` as packed."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: object
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepTensors:
    """What a forward pass reads of a batch. Sequences own consecutive runs of tokens (see the paged attention
    kernel); `rows` says which block table is each one's. `is_decode`: one token of each. `only_last`: hidden states of
    each sequence's last token are all that is wanted. `host`: the same starts and lengths, where a pass is of one step;
    a recorded one has none.
    """

    token_ids: torch.Tensor
    last_tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    rows: torch.Tensor
    query_starts: torch.Tensor
    kv_lengths: torch.Tensor
    is_decode: bool = False
    only_last: bool = False
    host: HostLengths | None = None


class Activations:
    """Buffers of a forward pass, made once for the largest step and reused by every layer."""

    reserved_bytes = 0

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        *,
        max_tokens: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        heads, kv_heads, head_dim = shard.num_heads, shard.num_kv_heads, config.head_dim
        hidden = (max_tokens, config.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {
            "residual": hidden,
            "normed": hidden,
            "delta": hidden,
            "qkv": (max_tokens, (heads + 2 * kv_heads) * head_dim),
            "q": (max_tokens, heads, head_dim),
            "attended": (max_tokens, heads, head_dim),
            "gate_up": (max_tokens, 2 * shard.intermediate_size),
            "activated": (max_tokens, shard.intermediate_size),
        }
        self._all = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        vocab_size = shard.vocab_end - shard.vocab_begin
        self.logits_RV = torch.zeros(max_rows, vocab_size, dtype=torch.float32, device=device)
        self.dtype = dtype
        self.max_rows = max_rows
        self.num_bytes = sum(tensor.nbytes for tensor in self._all.values()) + self.logits_RV.nbytes

    def first(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """Views of the first tokens."""
        return {name: tensor[:num_tokens] for name, tensor in self._all.items()}

    def hidden(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a forward pass leaves: views `(residual, delta)` of the first tokens."""
        return self._all["residual"][:num_tokens], self._all["delta"][:num_tokens]


class Decoder:
    """The model on one rank. `forward` writes the cache and the activations; nothing is allocated per layer.

    With `fused` kernels, decodes of a few tokens take a path of their own: their hidden states have no delta.
    """

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        weights: DecoderWeights,
        kernels: DecoderKernels,
        activations: Activations,
        max_positions: int,
        communicator: Communicator | None,
        device: torch.device,
        fused: FusedKernels | None = None,
        decode_attention: Kernel | None = None,
    ) -> None:
        self.config = config
        self.shard = shard
        self._weights = weights
        self._kernels = kernels
        self._activations = activations
        self._cos_sin = make_cos_sin(config.rotary, max_positions).to(device)
        self._communicator = communicator
        self._one_each = torch.arange(activations.max_rows + 1, dtype=torch.int32, device=device)
        self._fused: FusedDecode | None = None
        if fused is not None and communicator is None and FusedDecode.can_read(weights):
            self._fused = FusedDecode(config, shard, weights, fused, self._cos_sin, device)
        self._max_fused_tokens = 0 if self._fused is None else self._fused.max_tokens
        self.fuses_decodes = self._fused is not None
        """May be set to False: later passes then take the ordinary path."""
        self.decode_attention = decode_attention
        """What decodes take instead of rotary positions, write and attention one by one; may be set to None."""

    def _path(self, num_tokens: int, *, is_decode: bool) -> FusedDecode | None:
        """The fused path, if steps like this take it."""
        takes = self.fuses_decodes and is_decode and 1 <= num_tokens <= self._max_fused_tokens
        return self._fused if takes else None

    def hidden(self, num_tokens: int, *, is_decode: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where `forward` leaves the hidden states of a step: for replays of a recorded one."""
        fused = self._path(num_tokens, is_decode=is_decode)
        return self._activations.hidden(num_tokens) if fused is None else (fused.residual(num_tokens), None)

    def forward(
        self,
        batch: StepTensors,
        cache: tuple[tuple[torch.Tensor, torch.Tensor], ...],
        on_layer: Callable[[], None],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run all layers. Returns `(residual [T, D], delta [T, D])`, whose sum is the last hidden state of each token,
        or with `batch.only_last` of each sequence's last one; no delta where the path has none.
        """
        fused = self._path(batch.token_ids.shape[0], is_decode=batch.is_decode)
        if fused is None:
            return self._forward(batch, cache, on_layer)
        self._embed(fused.residual(batch.token_ids.shape[0]), batch)
        return fused.forward(batch, cache, on_layer), None

    def _embed(self, out_TD: torch.Tensor, batch: StepTensors) -> None:
        self._kernels.embed(out_TD, batch.token_ids, batch.last_tokens, self._weights.embedding, self.shard.vocab_begin)

    def _forward(
        self,
        batch: StepTensors,
        cache: tuple[tuple[torch.Tensor, torch.Tensor], ...],
        on_layer: Callable[[], None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kernels, eps = self._kernels, self.config.rms_norm_eps
        act = self._activations.first(batch.token_ids.shape[0])
        residual, normed, delta = act["residual"], act["normed"], act["delta"]
        self._embed(residual, batch)
        self._sum_over_ranks(residual)
        for index, layer in enumerate(self._weights.layers):
            if index == 0:
                kernels.rms_norm(normed, residual, layer.input_norm, eps)
            else:
                kernels.fused_add_rms_norm(normed, residual, delta, layer.input_norm, eps)
            if batch.only_last and index == self.config.num_layers - 1:
                act = self._attend_to_last(layer, act, batch, cache[index], self.config.windows[index])
                residual, normed, delta = act["residual"], act["normed"], act["delta"]
            else:
                self._attend(layer, act, batch, cache[index], self.config.windows[index])
            kernels.fused_add_rms_norm(normed, residual, delta, layer.post_norm, eps)
            kernels.linear(act["gate_up"], normed, layer.gate_up)
            kernels.silu_and_mul(act["activated"], act["gate_up"])
            kernels.linear(delta, act["activated"], layer.down)
            self._sum_over_ranks(delta)
            on_layer()
        return residual, delta

    def _attend(
        self,
        layer: LayerWeights,
        act: dict[str, torch.Tensor],
        batch: StepTensors,
        cache: tuple[torch.Tensor, torch.Tensor],
        window: int,
    ) -> None:
        self._kernels.linear(act["qkv"], act["normed"], layer.qkv)
        if batch.is_decode and self.decode_attention is not None:
            self._attend_to_decodes(self.decode_attention, layer, act, batch, cache, window)
            attended = act["attended"]
        else:
            self._write(layer, act, batch, cache)
            attended = self._attend_over_cache(act, batch, cache, window)
        self._project(layer, act, attended)

    def _project(self, layer: LayerWeights, act: dict[str, torch.Tensor], attended: torch.Tensor) -> None:
        self._kernels.linear(act["delta"], attended.flatten(1), layer.output)
        self._sum_over_ranks(act["delta"])

    def _attend_to_last(
        self,
        layer: LayerWeights,
        act: dict[str, torch.Tensor],
        batch: StepTensors,
        cache: tuple[torch.Tensor, torch.Tensor],
        window: int,
    ) -> dict[str, torch.Tensor]:
        """Keys and values of every token, but attention of each sequence's last one alone. Returns activations of one
        token a sequence. A sequence without tokens, as padding has them, takes any: nobody reads what becomes of it.
        """
        self._kernels.linear(act["qkv"], act["normed"], layer.qkv)
        self._write(layer, act, batch, cache)
        num_sequences = batch.kv_lengths.shape[0]
        last = (batch.query_starts[1:] - 1).clamp(min=0)
        few = self._activations.first(num_sequences)
        few["residual"], few["q"] = act["residual"][last], act["q"][last]
        one_each = replace(batch, query_starts=self._one_each[: num_sequences + 1], host=None)
        self._project(layer, few, self._attend_over_cache(few, one_each, cache, window))
        return few

    def _attend_to_decodes(
        self,
        decode_attention: Kernel,
        layer: LayerWeights,
        act: dict[str, torch.Tensor],
        batch: StepTensors,
        cache: tuple[torch.Tensor, torch.Tensor],
        window: int,
    ) -> None:
        decode_attention(
            act["attended"].flatten(1),
            act["qkv"],
            batch.positions,
            batch.slots,
            self._cos_sin,
            *cache,
            layer.q_norm,
            layer.k_norm,
            self.config.rms_norm_eps,
            batch.block_tables,
            batch.rows,
            self.config.head_dim**-0.5,
            window,
        )

    def _write(
        self,
        layer: LayerWeights,
        act: dict[str, torch.Tensor],
        batch: StepTensors,
        cache: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Queries with their positions, and keys and values into the cache."""
        self._kernels.rotary_and_kv_write(
            act["q"],
            act["qkv"],
            batch.positions,
            batch.slots,
            self._cos_sin,
            *cache,
            layer.q_norm,
            layer.k_norm,
            self.config.rms_norm_eps,
        )

    def _attend_over_cache(
        self,
        act: dict[str, torch.Tensor],
        batch: StepTensors,
        cache: tuple[torch.Tensor, torch.Tensor],
        window: int,
    ) -> torch.Tensor:
        """Returns the attended heads, in the buffer for them or where the kernel left them."""
        own = self._kernels.paged_attention(
            act["attended"],
            act["q"],
            *cache,
            batch.block_tables,
            batch.rows,
            batch.query_starts,
            batch.kv_lengths,
            self.config.head_dim**-0.5,
            window,
            batch.host,
        )
        return act["attended"] if own is None else own

    def logits(self, residual_RD: torch.Tensor, delta_RD: torch.Tensor | None) -> torch.Tensor:
        """Float32 `[R, V]` of the hidden states `residual + delta`, the same on every rank; valid until the next call.

        Overwrites `residual_RD`. R is at most the number of rows the activations were made for.
        """
        if delta_RD is None:
            assert self._fused is not None
            logits_RV = self._activations.logits_RV[: residual_RD.shape[0]]
            self._fused.logits(logits_RV, residual_RD)
            return logits_RV
        normed = torch.empty_like(delta_RD)
        self._kernels.fused_add_rms_norm(
            normed, residual_RD, delta_RD, self._weights.final_norm, self.config.rms_norm_eps
        )
        local = self._activations.logits_RV[: normed.shape[0]]
        self._kernels.linear(local, normed, self._weights.head)
        return local if self._communicator is None else self._gathered(local)

    def last_hidden(self, residual_RD: torch.Tensor, delta_RD: torch.Tensor | None) -> torch.Tensor:
        """Float32 `[R, D]`: the hidden states `residual + delta` after the last norm. Overwrites `residual_RD`."""
        normed = torch.empty_like(residual_RD)
        norm, eps = self._weights.final_norm, self.config.rms_norm_eps
        if delta_RD is None:
            self._kernels.rms_norm(normed, residual_RD, norm, eps)
        else:
            self._kernels.fused_add_rms_norm(normed, residual_RD, delta_RD, norm, eps)
        return normed.float()

    def _gathered(self, local_RV: torch.Tensor) -> torch.Tensor:
        """Every rank's part of the vocabulary, side by side."""
        num_rows, shard = local_RV.shape[0], self.shard
        part = local_RV.new_full((num_rows, shard.vocab_part), float("-inf"))
        part[:, : local_RV.shape[1]] = local_RV
        gathered = local_RV.new_empty(shard.num_ranks, num_rows, shard.vocab_part)
        assert self._communicator is not None
        self._communicator.all_gather(gathered, part)
        return gathered.transpose(0, 1).flatten(1)[:, : self.config.vocab_size].contiguous()

    def _sum_over_ranks(self, tensor: torch.Tensor) -> None:
        if self._communicator is not None:
            self._communicator.all_reduce(tensor)


class WeightReader:
    """Reads one rank's parts of a checkpoint, converts them to the run's dtype and packs the matrices."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        source: WeightSource,
        linear: LinearKernel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = config
        self._shard = shard
        self._source = source
        self._linear = linear
        self._dtype = dtype
        self._device = device
        self._parameters = parameters(config)
        self._num_bytes = 0

    def read(self) -> DecoderWeights:
        """Raises Refusal when names or shapes do not match the config."""
        self._source.check(self._parameters)
        shard, tied = self._shard, self._config.tied
        vocabulary = (shard.vocab_begin, shard.vocab_end)
        embedding = self._kept(self._plain(EMBEDDING, rows=vocabulary))
        layers = tuple(self._layer(index) for index in range(self._config.num_layers))
        final_norm = self._kept(self._plain(FINAL_NORM))
        head = embedding if tied else self._plain(HEAD, rows=vocabulary)
        packed_head = self._packed(head, None)
        return DecoderWeights(
            embedding=embedding, layers=layers, final_norm=final_norm, head=packed_head, num_bytes=self._num_bytes
        )

    def _layer(self, index: int) -> LayerWeights:
        def named(part: str) -> str:
            return layer_name(index, part)

        config, shard = self._config, self._shard
        qk = config.qk_norm
        return LayerWeights(
            input_norm=self._kept(self._plain(named("input_layernorm.weight"))),
            qkv=self._qkv(named),
            q_norm=self._kept(self._plain(named("self_attn.q_norm.weight"))) if qk else None,
            k_norm=self._kept(self._plain(named("self_attn.k_norm.weight"))) if qk else None,
            output=self._split_inputs(named("self_attn.o_proj"), shard.num_heads * config.head_dim, config.output_bias),
            post_norm=self._kept(self._plain(named("post_attention_layernorm.weight"))),
            gate_up=self._gate_up(named),
            down=self._split_inputs(named("mlp.down_proj"), shard.intermediate_size, config.mlp_bias),
        )

    def _qkv(self, named: Callable[[str], str]) -> object:
        shard, head_dim = self._shard, self._config.head_dim
        q_rows = (shard.rank * shard.num_heads * head_dim, (shard.rank + 1) * shard.num_heads * head_dim)
        kv_rows = (shard.first_kv_head * head_dim, (shard.first_kv_head + shard.num_kv_heads) * head_dim)
        parts = {"self_attn.q_proj": q_rows, "self_attn.k_proj": kv_rows, "self_attn.v_proj": kv_rows}
        return self._joined({named(part): rows for part, rows in parts.items()}, self._config.qkv_bias)

    def _gate_up(self, named: Callable[[str], str]) -> object:
        size, rank = self._shard.intermediate_size, self._shard.rank
        rows = (rank * size, (rank + 1) * size)
        return self._joined({named("mlp.gate_proj"): rows, named("mlp.up_proj"): rows}, self._config.mlp_bias)

    def _joined(self, parts: dict[str, tuple[int, int]], has_bias: bool) -> object:
        """Several matrices with the same input as one, their outputs divided among ranks."""
        weight = torch.cat([self._plain(f"{name}.weight", rows=rows) for name, rows in parts.items()])
        bias = torch.cat([self._plain(f"{name}.bias", rows=rows) for name, rows in parts.items()]) if has_bias else None
        return self._packed(weight, bias)

    def _split_inputs(self, name: str, size: int, has_bias: bool) -> object:
        """A matrix whose inputs are divided among ranks; the sum over ranks holds the bias once."""
        rank = self._shard.rank
        weight = self._plain(f"{name}.weight", columns=(rank * size, (rank + 1) * size))
        bias = self._plain(f"{name}.bias") if has_bias and rank == 0 else None
        return self._packed(weight, bias)

    def _plain(
        self, name: str, *, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> torch.Tensor:
        parameter: Parameter = self._parameters[name]
        return self._source.read(parameter, rows=rows, columns=columns).to(self._device, self._dtype)

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that stays as it is: copied out of the mapped file, so that the file may change or vanish."""
        self._num_bytes += tensor.nbytes
        return tensor.clone()

    def _packed(self, weight: torch.Tensor, bias: torch.Tensor | None) -> object:
        packed = self._linear.pack(weight.contiguous(), bias)
        self._num_bytes += packed.num_bytes
        return packed
