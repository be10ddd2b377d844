"""A model's sizes, read from a Hugging Face `config.json` in its old and new spellings. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ipc.conditions import Refusal


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a family adds to the common decoder."""

    name: str
    qkv_bias: bool | None = None
    """None: as `attention_bias` of the config says, which then covers the output projection too."""
    qk_norm: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family(name="llama"),
    "MistralForCausalLM": Family(name="mistral", qkv_bias=False),
    "Qwen2ForCausalLM": Family(name="qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": Family(name="qwen3", qk_norm=True),
}
_HEADLESS = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"}
"""The same families saved without their heads, as embedding models are."""

ROTARY_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary positions: type, base, and the numbers of a scaling (absent ones take the type's defaults)."""

    rope_type: str
    theta: float
    rotary_dim: int
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the native families. `windows` holds each layer's attention window, 0 for all positions."""

    architecture: str
    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rotary: RotaryConfig
    dtype: str
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]


def is_own_decoder(values: Mapping[str, Any]) -> bool:
    """Whether config.json names an architecture of these families."""
    return any(named in FAMILIES or named in _HEADLESS for named in values.get("architectures") or [])


def read_config(directory: Path) -> ModelConfig:
    """Raises Refusal when the directory holds no configuration or a model that is not supported."""
    return parse_config(read_values(directory))


def read_values(directory: Path) -> dict[str, Any]:
    """What config.json says. Raises Refusal."""
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Refusal(f"{directory} holds no config.json: name a directory with a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise Refusal(f"{path} cannot be read ({error}): download the model again") from None
    if not isinstance(values, dict):
        raise Refusal(f"{path} holds no JSON object: download the model again")
    return values


def parse_config(values: Mapping[str, Any]) -> ModelConfig:
    """Raises Refusal naming what is supported."""
    architecture = _architecture(values)
    is_headless = architecture in _HEADLESS
    family = FAMILIES[architecture.removesuffix("Model") + "ForCausalLM" if is_headless else architecture]
    _refuse_unsupported(values, architecture)
    hidden_size, num_heads = size_of(values, "hidden_size"), size_of(values, "num_attention_heads")
    head_dim = _optional_size(values, "head_dim") or hidden_size // num_heads
    num_layers = size_of(values, "num_hidden_layers")
    attention_bias = bool(values.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        family=family.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=size_of(values, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_optional_size(values, "num_key_value_heads") or num_heads,
        head_dim=head_dim,
        vocab_size=size_of(values, "vocab_size"),
        max_position_embeddings=_optional_size(values, "max_position_embeddings") or 2048,
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        rotary=_rotary(values, head_dim),
        dtype=dtype_of(values),
        tied=is_headless or bool(values.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=bool(values.get("mlp_bias", False)) and family.name == "llama",
        qk_norm=family.qk_norm,
        windows=_windows(values, family, num_layers),
    )


def _architecture(values: Mapping[str, Any]) -> str:
    named = values.get("architectures") or []
    for architecture in named:
        if architecture in FAMILIES or architecture in _HEADLESS:
            return str(architecture)
    raise Refusal(
        f"the model's architecture {', '.join(map(str, named)) or 'is not named'} is not supported; "
        f"supported are {', '.join(FAMILIES)}: choose a model of these"
    )


def _refuse_unsupported(values: Mapping[str, Any], architecture: str) -> None:
    activation = values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise Refusal(
            f"{architecture} with activation {activation} is not supported; supported is silu: choose another model"
        )
    quantization = values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise Refusal(f"weights quantised by {method} are not supported yet; take the unquantised model or a GGUF file")


def size_of(values: Mapping[str, Any], name: str) -> int:
    """A size that must be there. Raises Refusal."""
    size = _optional_size(values, name)
    if size is None:
        raise Refusal(f"config.json lacks {name}: download the model again")
    return size


def _optional_size(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise Refusal(f"config.json: {name} is {value!r}, which is no positive integer: download the model again")
    return value


def dtype_of(values: Mapping[str, Any]) -> str:
    """The checkpoint's dtype: new spelling `dtype`, old one `torch_dtype`; float32 where neither is given."""
    named = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    return {"half": "float16", "float": "float32"}.get(named, named)


def _rotary(values: Mapping[str, Any], head_dim: int) -> RotaryConfig:
    """New spelling: `rope_parameters` with rope_theta inside; old: `rope_theta` beside `rope_scaling` (`type` or
    `rope_type`).
    """
    scaling: Mapping[str, Any] = values.get("rope_parameters") or values.get("rope_scaling") or {}
    rope_type = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if rope_type not in ROTARY_TYPES:
        raise Refusal(
            f"rotary scaling {rope_type} is not supported; supported are {', '.join(ROTARY_TYPES)}: "
            "choose another model"
        )
    partial = scaling.get("partial_rotary_factor", values.get("partial_rotary_factor")) or 1.0
    if partial != 1.0:
        raise Refusal(f"a partial rotary factor of {partial} is not supported in this family: choose another model")
    factor = scaling.get("factor")
    if rope_type in ("linear", "llama3") and factor is None:
        raise Refusal(f"rotary scaling {rope_type} without its factor: download the model again")
    maximum = _optional_size(values, "max_position_embeddings") or 2048
    original = int(
        values.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings") or maximum
    )
    return RotaryConfig(
        rope_type=rope_type,
        theta=float(scaling.get("rope_theta") or values.get("rope_theta") or 10_000.0),
        rotary_dim=head_dim,
        factor=float(factor) if factor is not None else maximum / original,
        original_max_position_embeddings=original,
        low_freq_factor=_number(scaling, "low_freq_factor"),
        high_freq_factor=_number(scaling, "high_freq_factor"),
        beta_fast=_number(scaling, "beta_fast") or 32.0,
        beta_slow=_number(scaling, "beta_slow") or 1.0,
        attention_factor=_number(scaling, "attention_factor"),
        mscale=_number(scaling, "mscale"),
        mscale_all_dim=_number(scaling, "mscale_all_dim"),
        truncate=bool(scaling.get("truncate", True)),
    )


def _number(values: Mapping[str, Any], name: str) -> float | None:
    value = values.get(name)
    return None if value is None else float(value)


def _windows(values: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    """Mistral slides in every layer; Qwen in those that `layer_types` or `max_window_layers` names, if switched on."""
    window = _optional_size(values, "sliding_window")
    if window is None or family.name == "llama":
        return (0,) * num_layers
    if family.name == "mistral":
        return (window,) * num_layers
    if not values.get("use_sliding_window", False):
        return (0,) * num_layers
    types = values.get("layer_types")
    if types:
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)
    first = int(values.get("max_window_layers", 28))
    return tuple(window if layer >= first else 0 for layer in range(num_layers))
