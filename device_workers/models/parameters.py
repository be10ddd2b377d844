"""The checkpoint tensors of a decoder, by name and shape. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from .config import ModelConfig
from .sharding import Shard

IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and that follow from the config."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One tensor of the checkpoint: its name and full shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def layer_name(layer: int, part: str) -> str:
    return f"model.layers.{layer}.{part}"


def parameters(config: ModelConfig) -> dict[str, Parameter]:
    """Every tensor the model needs, in reading order."""
    needed = [Parameter(name=EMBEDDING, shape=(config.vocab_size, config.hidden_size))]
    for layer in range(config.num_layers):
        needed += [
            Parameter(name=layer_name(layer, part), shape=shape) for part, shape in _layer_shapes(config).items()
        ]
    needed.append(Parameter(name=FINAL_NORM, shape=(config.hidden_size,)))
    if not config.tied:
        needed.append(Parameter(name=HEAD, shape=(config.vocab_size, config.hidden_size)))
    return {parameter.name: parameter for parameter in needed}


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }
    if config.qkv_bias:
        shapes |= {
            "self_attn.q_proj.bias": (q_size,),
            "self_attn.k_proj.bias": (kv_size,),
            "self_attn.v_proj.bias": (kv_size,),
        }
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    if config.mlp_bias:
        shapes |= {
            "mlp.gate_proj.bias": (intermediate,),
            "mlp.up_proj.bias": (intermediate,),
            "mlp.down_proj.bias": (hidden,),
        }
    return shapes


def num_rank_parameters(config: ModelConfig, shard: Shard) -> int:
    """Elements that one rank holds: matrices are divided, key/value heads as `Shard` says, the rest is whole. A tied
    head counts again, because `linear` kernels keep matrices in a layout of their own.
    """
    kv_share = shard.num_kv_heads / config.num_kv_heads
    total = 0.0
    for name, parameter in parameters(config).items():
        if "k_proj" in name or "v_proj" in name:
            share = kv_share
        else:
            share = 1 / shard.num_ranks if len(parameter.shape) == 2 else 1.0
        total += parameter.num_elements * share
    head = config.vocab_size * config.hidden_size / shard.num_ranks if config.tied else 0
    return round(total + head)


def num_parameters(config: ModelConfig) -> int:
    return sum(parameter.num_elements for parameter in parameters(config).values())
