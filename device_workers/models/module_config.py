"""What is known of a model that transformers' modelling code computes, before its weights are read. Torch-free.

`module_trace` finds it out; this file decides which models go that way, and what the engine must know of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ipc.conditions import Refusal
from ...ipc.facts import Decision, ModelFacts, PoolingFacts, PoolingKind, Problem
from ...ipc.worker_messages import Settled
from .config import is_own_decoder
from .embedding_files import EmbeddingFiles
from .encoder_config import is_own_encoder
from .facts import ITEM_BYTES

MODEL_CODES = ("auto", "own", "transformers")
MODULE_KERNELS = ("paged_attention", "greedy_sample", "sample", "apply_penalties", "token_logprobs")
"""What serving such a decoder needs: the rest of its forward pass is the module's."""
_NUM_TOKEN_INPUTS, _NUM_ROW_INPUTS = 3, 17
_NUM_SCORE_COPIES = 2
"""Logits of a row in float32, as the module made them and as they are sampled from."""


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """How one attention module of a decoder attends. `name` is the module's in the body; window and cap 0: none."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    soft_cap: float
    has_sinks: bool


@dataclass(frozen=True, kw_only=True)
class ModuleConfig:
    """A model of any family. A decoder has `layers` with attention of ours; an encoder has none, and `pooling`.

    `channels` counts what a token needs of activations, in elements. `limit_reason` says why `max_tokens` is less than
    the model's positions.
    """

    architecture: str
    version: str
    reason: str
    dtype: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    max_tokens: int
    limit_reason: str | None
    num_parameters: int
    channels: int
    layers: tuple[LayerAttention, ...] = ()
    files: EmbeddingFiles | None = None

    @property
    def is_encoder(self) -> bool:
        return not self.layers

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].num_kv_heads if self.layers else self.num_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].head_dim if self.layers else self.hidden_size // self.num_heads

    @property
    def score_demands(self) -> dict[str, bool]:
        """What a kernel problem says of attention beyond the usual."""
        return {
            "caps_scores": any(layer.soft_cap for layer in self.layers),
            "has_sinks": any(layer.has_sinks for layer in self.layers),
        }

    @property
    def pooling(self) -> PoolingFacts | None:
        """None of a decoder; as the files say; else the mean, as sentence-transformers makes of a bare model."""
        if not self.is_encoder:
            return None
        return PoolingFacts(
            kind=self.files.kind if self.files is not None else PoolingKind.MEAN,
            num_dimensions=self.hidden_size,
            normalizes=self.files is not None and self.files.normalizes,
            is_encoder=True,
        )

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Whose code computes the model, what it cannot have, and how an encoder pools."""
        code = Decision(name="model_code", value=f"transformers {self.version}", reason=self.reason)
        pooling = self.pooling
        if pooling is None:
            return (code, Decision(name="graphs", value="eager", reason=NO_GRAPHS))
        value = f"{pooling.kind.value}, {'normalised' if pooling.normalizes else 'as it is'}"
        source = self.files.source if self.files is not None else "the model's folder has no modules.json"
        return (code, Decision(name="pooling", value=value, reason=source))


NO_GRAPHS = "transformers' modelling code is not recorded"


def why_module(values: Mapping[str, Any], model_code: str) -> str | None:
    """Why transformers' code computes the model that config.json describes; None: ours does. Raises Refusal."""
    if model_code not in MODEL_CODES:
        raise Refusal(f"--model-code {model_code} is not known; take one of {', '.join(MODEL_CODES)}")
    if model_code == "transformers":
        return "asked for by --model-code"
    if model_code == "own" or is_own_decoder(values) or is_own_encoder(values):
        return None
    return f"there is no code of ours for {', '.join(map(str, values.get('architectures') or [])) or 'it'}"


def check_values(values: Mapping[str, Any]) -> None:
    """What no modelling code makes good. Raises Refusal naming the field and the cure."""
    quantization = values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise Refusal(f"weights quantised by {method} are not supported yet; take the unquantised model")
    for name in ("vision_config", "audio_config", "speech_config", "text_config"):
        if values.get(name):
            raise Refusal(
                f"config.json has {name}: a model of several parts is not supported; take a model of text only"
            )
    if values.get("is_encoder_decoder"):
        raise Refusal(
            "config.json has is_encoder_decoder: models with cross attention are not supported; take a decoder or an "
            "encoder alone"
        )


def module_facts(config: ModuleConfig, *, dtype: str, kv_dtype: str, max_model_len: int | None) -> ModelFacts:
    """Raises Refusal for a length beyond the model's or a cache dtype that does not exist yet."""
    if kv_dtype not in ("auto", dtype) and not config.is_encoder:
        raise Refusal(f"--kv-dtype {kv_dtype} is not supported with {dtype} yet; take auto")
    limit = config.max_tokens
    if max_model_len is not None and max_model_len > limit:
        why = f" ({config.limit_reason})" if config.limit_reason else ""
        raise Refusal(
            f"--max-model-len {max_model_len} is more than the model's {limit} tokens{why}; take at most {limit}"
        )
    item_bytes = ITEM_BYTES[dtype]
    row_channels = config.hidden_size if config.is_encoder else _NUM_SCORE_COPIES * config.vocab_size
    return ModelFacts(
        architecture=config.architecture,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len or limit,
        dtype=dtype,
        kv_dtype=dtype,
        num_parameters=config.num_parameters,
        tensor_parallel_sizes=(1,),
        weight_bytes=config.num_parameters * item_bytes,
        kv_bytes_per_token=2 * len(config.layers) * config.num_kv_heads * config.head_dim * item_bytes,
        step_bytes_per_token=config.channels * item_bytes + 4 * _NUM_TOKEN_INPUTS,
        step_bytes_per_row=4 * row_channels + 4 * _NUM_ROW_INPUTS,
        pooling=config.pooling,
    )


def activation_bytes(model: ModelFacts, num_tokens: int, num_rows: int) -> int:
    """Of a step, as `module_facts` counts them, without its inputs."""
    token_bytes = model.step_bytes_per_token - 4 * _NUM_TOKEN_INPUTS
    return num_tokens * token_bytes + num_rows * (model.step_bytes_per_row - 4 * _NUM_ROW_INPUTS)


def module_problem(config: ModuleConfig, model: ModelFacts, settled: Settled) -> Problem:
    """What is asked of every kernel. Raises Refusal."""
    if settled.batch_invariant:
        raise Refusal(
            "--batch-invariant: products of transformers' modelling code depend on how many rows there are; leave it "
            "out"
        )
    return Problem(
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        head_dim=config.head_dim,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        block_size=settled.block_size,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_tokens=settled.max_batched_tokens,
        max_rows=settled.max_num_seqs,
        attention_strategy=settled.attention_strategy,
        **config.score_demands,
    )


def read_module(directory: Path, values: Mapping[str, Any], reason: str, num_ranks: int) -> ModuleConfig:
    """Everything but the weights, by running the module on tensors without memory. Imports torch and transformers.

    Raises Refusal for a model that cannot be served so, and where transformers is not installed.
    """
    if num_ranks > 1:
        raise Refusal(
            "a model computed by transformers' modelling code is not spread over devices: leave --tensor-parallel out"
        )
    check_values(values)
    try:
        import transformers  # noqa: F401
    except ImportError:
        named = ", ".join(map(str, values.get("architectures") or [])) or "this model"
        raise Refusal(
            f"{named} is computed by transformers' modelling code, which is not installed: "
            "pip install 'trimaran[models]'"
        ) from None
    from .module_trace import trace_module

    return trace_module(directory, values, reason)
