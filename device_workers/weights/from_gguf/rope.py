"""Rotary scaling from GGUF metadata, in the words of a Hugging Face config.

llama.cpp writes linear and yarn scaling as metadata, and llama3 scaling only as the tensor of its resulting factors.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .source import Refused, Source, Tensor

# Llama 3.1 and later publish these; only the factor differs between sizes.
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, ORIGINAL_CONTEXT = 1.0, 4.0, 8192


def rope_parameters(source: Source, name: str, head_dim: int, factors: Tensor | None) -> dict[str, Any]:
    """`rope_parameters` of the config: rope_theta, rope_type and what the type needs."""
    theta = float(source.get(f"{name}.rope.freq_base", 10000.0))
    rotary = int(source.get(f"{name}.rope.dimension_count", head_dim))
    if rotary != head_dim:
        raise Refused(f"Rotary over {rotary} of {head_dim} dimensions of a head is not supported. Use another model.")
    if factors is not None:
        return {"rope_type": "llama3", "rope_theta": theta, **_llama3(factors, theta, head_dim)}
    kind = source.get(f"{name}.rope.scaling.type", "linear" if source.has(f"{name}.rope.scale_linear") else "none")
    factor = float(source.get(f"{name}.rope.scaling.factor", source.get(f"{name}.rope.scale_linear", 1.0)))
    match kind:
        case "none":
            return {"rope_type": "default", "rope_theta": theta}
        case "linear" if factor == 1.0:
            return {"rope_type": "default", "rope_theta": theta}
        case "linear":
            return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
        case "yarn":
            return {"rope_type": "yarn", "rope_theta": theta, **_yarn(source, name, factor)}
        case _:
            raise Refused(f"Rotary scaling {kind!r} is not supported: linear, yarn and llama3 are. Use another model.")


def _yarn(source: Source, name: str, factor: float) -> dict[str, Any]:
    prefix = f"{name}.rope.scaling"
    original = source.get(f"{prefix}.original_context_length")
    if original is None:
        original = int(int(source.need(f"{name}.context_length")) / factor)
    parameters: dict[str, Any] = {"factor": factor, "original_max_position_embeddings": int(original)}
    for key in ("beta_fast", "beta_slow"):
        if source.has(f"{prefix}.yarn_{key}"):
            parameters[key] = float(source.get(f"{prefix}.yarn_{key}"))
    attention = source.get(f"{prefix}.attn_factor", source.get(f"{prefix}.yarn_attn_factor"))
    if attention is not None:  # llama.cpp multiplies it with what yarn prescribes; a config states the product
        parameters["attention_factor"] = float(attention) * (0.1 * math.log(factor) + 1.0)
    return parameters


def _llama3(factors: Tensor, theta: float, head_dim: int) -> dict[str, Any]:
    found = factors.float32(0, factors.shape[0])
    parameters = {
        "factor": float(found.max()),
        "low_freq_factor": LOW_FREQ_FACTOR,
        "high_freq_factor": HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    }
    expected = llama3_factors(theta, head_dim, parameters["factor"])
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-3):
        raise Refused(
            "The rotary factors of this file are not those of llama3 scaling. "
            "Serve the original safetensors model instead."
        )
    return parameters


def llama3_factors(theta: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    """By what each frequency is divided under llama3 scaling. [head_dim / 2]"""
    frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    rotations = ORIGINAL_CONTEXT * frequencies / (2 * math.pi)  # of each frequency within the original context
    smooth = np.clip((rotations - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR), 0.0, 1.0)
    result: NDArray[np.float64] = 1.0 / ((1.0 - smooth) / factor + smooth)
    return result
