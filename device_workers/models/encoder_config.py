"""An encoder's sizes and how it pools, read from its folder. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ipc.conditions import Refusal
from ...ipc.facts import Decision, ModelFacts, PoolingFacts, PoolingKind, Problem
from ...ipc.worker_messages import Settled
from .config import dtype_of, read_values, size_of
from .embedding_files import EmbeddingFiles, read_embedding_files
from .facts import ITEM_BYTES
from .parameters import Parameter

_FAMILIES = {"BertModel": 0, "RobertaModel": 2, "XLMRobertaModel": 2}
"""Position of a text's first token: RoBERTa's positions begin after that of its padding."""
_ACTIVATIONS = ("gelu", "relu")
IGNORED_PREFIXES = ("embeddings.position_ids", "pooler.", "cls.", "lm_head.")
"""Checkpoint tensors that follow from the config, or that no vector is made with."""
ENCODER_KERNELS = ("linear",)
_NUM_TOKEN_INPUTS, _NUM_ROW_INPUTS = 3, 4


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """A BERT-style encoder with absolute positions. `files` None: the checkpoint does not say how it pools."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    vocab_size: int
    num_types: int
    num_positions: int
    first_position: int
    norm_eps: float
    activation: str
    dtype: str
    files: EmbeddingFiles | None
    is_encoder = True

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def max_tokens(self) -> int:
        """Of one text: the positions, or fewer where the files say so."""
        positions = self.num_positions - self.first_position
        named = self.files.max_tokens if self.files is not None else None
        return positions if named is None else min(named, positions)

    @property
    def pooling(self) -> PoolingFacts:
        """As the files say; else the mean, which is what sentence-transformers makes of a bare model."""
        return PoolingFacts(
            kind=self.files.kind if self.files is not None else PoolingKind.MEAN,
            num_dimensions=self.hidden_size,
            normalizes=self.files is not None and self.files.normalizes,
            is_encoder=True,
        )

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """How it pools, and who says so."""
        facts = self.pooling
        value = f"{facts.kind.value}, {'normalised' if facts.normalizes else 'as it is'}"
        reason = self.files.source if self.files is not None else "the model's folder has no modules.json"
        return (Decision(name="pooling", value=value, reason=reason),)


def is_own_encoder(values: Mapping[str, Any]) -> bool:
    """Whether config.json names an architecture of these families."""
    return any(named in _FAMILIES for named in values.get("architectures") or [])


def read_encoder(directory: Path) -> EncoderConfig | None:
    """None where the folder holds no encoder that is known here. Raises Refusal for one that is not supported."""
    path = directory / "config.json"
    if not path.is_file():
        return None
    values = read_values(directory)
    architecture = next((name for name in values.get("architectures") or [] if name in _FAMILIES), None)
    return None if architecture is None else _parse(values, architecture, read_embedding_files(directory))


def _parse(values: Mapping[str, Any], architecture: str, files: EmbeddingFiles | None) -> EncoderConfig:
    activation = str(values.get("hidden_act", "gelu"))
    if activation not in _ACTIVATIONS:
        raise Refusal(
            f"{architecture} with activation {activation} is not supported; supported are {', '.join(_ACTIVATIONS)}: "
            "choose another model"
        )
    positions = values.get("position_embedding_type", "absolute")
    if positions != "absolute" or values.get("is_decoder"):
        what = "as a decoder" if values.get("is_decoder") else f"with {positions} positions"
        raise Refusal(f"{architecture} {what} is not supported; choose another model")
    return EncoderConfig(
        architecture=architecture,
        num_layers=size_of(values, "num_hidden_layers"),
        hidden_size=size_of(values, "hidden_size"),
        intermediate_size=size_of(values, "intermediate_size"),
        num_heads=size_of(values, "num_attention_heads"),
        vocab_size=size_of(values, "vocab_size"),
        num_types=size_of(values, "type_vocab_size"),
        num_positions=size_of(values, "max_position_embeddings"),
        first_position=_FAMILIES[architecture],
        norm_eps=float(values.get("layer_norm_eps", 1e-12)),
        activation=activation,
        dtype=dtype_of(values),
        files=files,
    )


def encoder_parameters(config: EncoderConfig) -> dict[str, Parameter]:
    """Every tensor the encoder needs, in reading order."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.num_positions, hidden),
        "embeddings.token_type_embeddings.weight": (config.num_types, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    linears = {
        "attention.self.query": (hidden, hidden),
        "attention.self.key": (hidden, hidden),
        "attention.self.value": (hidden, hidden),
        "attention.output.dense": (hidden, hidden),
        "intermediate.dense": (intermediate, hidden),
        "output.dense": (hidden, intermediate),
    }
    for layer in range(config.num_layers):
        for part, shape in linears.items():
            shapes[f"encoder.layer.{layer}.{part}.weight"] = shape
            shapes[f"encoder.layer.{layer}.{part}.bias"] = shape[:1]
        for part in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"encoder.layer.{layer}.{part}.weight"] = shapes[f"encoder.layer.{layer}.{part}.bias"] = (hidden,)
    return {name: Parameter(name=name, shape=shape) for name, shape in shapes.items()}


def encoder_facts(config: EncoderConfig, *, dtype: str, max_model_len: int | None) -> ModelFacts:
    """No KV bytes: an encoder keeps nothing between steps. Raises Refusal for a length beyond the model's."""
    limit = config.max_tokens
    if max_model_len is not None and max_model_len > limit:
        raise Refusal(f"--max-model-len {max_model_len} is more than the model's {limit} tokens; take at most {limit}")
    num_parameters = sum(parameter.num_elements for parameter in encoder_parameters(config).values())
    item_bytes = ITEM_BYTES[dtype]
    channels = 8 * config.hidden_size + 2 * config.intermediate_size
    return ModelFacts(
        architecture=config.architecture,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len or limit,
        dtype=dtype,
        kv_dtype=dtype,
        num_parameters=num_parameters,
        tensor_parallel_sizes=(1,),
        weight_bytes=num_parameters * item_bytes,
        kv_bytes_per_token=0,
        step_bytes_per_token=channels * item_bytes + 4 * _NUM_TOKEN_INPUTS,
        step_bytes_per_row=4 * config.hidden_size + 4 * _NUM_ROW_INPUTS,
        pooling=config.pooling,
    )


def encoder_problem(config: EncoderConfig, model: ModelFacts, settled: Settled) -> Problem:
    """What is asked of every kernel."""
    return Problem(
        dtype=model.dtype,
        head_dim=config.head_dim,
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_tokens=settled.max_batched_tokens,
        max_rows=settled.max_num_seqs,
    )
