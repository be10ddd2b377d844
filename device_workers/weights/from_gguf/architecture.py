"""What the supported architectures call their parts in GGUF and in Hugging Face, and the config made from metadata."""

import re
from typing import Any

import numpy as np
from msgspec import Struct

from .rope import rope_parameters
from .source import Refused, Source


class Architecture(Struct, frozen=True):
    """One architecture: names, and whether llama.cpp reordered the rows of its query and key weights for rotary."""

    name: str
    model_class: str
    permutes_rows: bool = False
    has_qkv_bias: bool = False


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("llama", "LlamaForCausalLM", permutes_rows=True),
        Architecture("qwen2", "Qwen2ForCausalLM", has_qkv_bias=True),
        Architecture("qwen3", "Qwen3ForCausalLM"),
    )
}

PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"  # not a weight: it becomes the config's rotary scaling
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<|end|>", "</s>", "<EOT>")
CONTROL = 3  # llama.cpp's token type


def architecture_of(source: Source) -> Architecture:
    name = source.need("general.architecture")
    if name not in ARCHITECTURES or source.get(f"{name}.expert_count", 0):
        experts = " with experts" if name in ARCHITECTURES else ""
        raise Refused(
            f"{source.paths[0].name}: the architecture {name!r}{experts} is not supported in GGUF. "
            f"Supported without experts: {', '.join(sorted(ARCHITECTURES))}. Use a model of one of these."
        )
    return ARCHITECTURES[name]


def hugging_face_name(tensor_name: str) -> str | None:
    """The tensor's name in a Hugging Face checkpoint; None for one that becomes part of the config."""
    if tensor_name == ROPE_FACTORS:
        return None
    match = TENSOR_NAME.fullmatch(tensor_name)
    if match is None or match["part"] not in PARTS:
        raise Refused(f"The tensor {tensor_name!r} belongs to no supported architecture. Use a model of another kind.")
    layer = f"model.layers.{match['layer']}." if match["layer"] is not None else ""
    return f"{layer}{PARTS[match['part']]}.{match['kind']}"


def heads_to_reorder(architecture: Architecture, tensor_name: str, source: Source) -> int:
    """Number of heads whose rows llama.cpp interleaved in this tensor; zero where the rows are in order."""
    if not architecture.permutes_rows:
        return 0
    name = architecture.name
    match tensor_name.rsplit(".", 2)[-2]:
        case "attn_q":
            return int(source.need(f"{name}.attention.head_count"))
        case "attn_k":
            return _num_kv_heads(source, name)
        case _:
            return 0


def config_of(source: Source, architecture: Architecture, dtype: str) -> dict[str, Any]:
    """config.json, with both spellings of the keys that transformers renamed."""
    name = architecture.name
    tensors = {tensor.name: tensor for tensor in source.tensors()}
    if "token_embd.weight" not in tensors:
        raise Refused(f"{source.paths[0].name} holds no token embeddings. Name the model's main file.")
    num_heads = int(source.need(f"{name}.attention.head_count"))
    hidden_size = int(source.need(f"{name}.embedding_length"))
    head_dim = int(source.get(f"{name}.attention.key_length", hidden_size // num_heads))
    rope = rope_parameters(source, name, head_dim, tensors.get(ROPE_FACTORS))
    biased = "blk.0.attn_q.bias" in tensors
    config: dict[str, Any] = {
        "architectures": [architecture.model_class],
        "model_type": name,
        "hidden_size": hidden_size,
        "head_dim": head_dim,
        "intermediate_size": int(source.need(f"{name}.feed_forward_length")),
        "num_hidden_layers": int(source.need(f"{name}.block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _num_kv_heads(source, name),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_act": "silu",
        "max_position_embeddings": int(source.need(f"{name}.context_length")),
        "rms_norm_eps": _short(source.need(f"{name}.attention.layer_norm_rms_epsilon")),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None
        if rope["rope_type"] == "default"
        else {k: v for k, v in rope.items() if k != "rope_theta"},
        "rope_parameters": rope,
        "attention_bias": biased,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": dtype,
        "dtype": dtype,
        **special_ids(source),
    }
    if architecture.has_qkv_bias:
        del config["attention_bias"]  # implied by the class, which has no such key
        if not biased:
            raise Refused(f"{source.paths[0].name}: a {name} model without query biases. Fetch the file again.")
    return config


def special_ids(source: Source) -> dict[str, int]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: source.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: int(token) for name, token in found.items() if token is not None}


def end_token_ids(source: Source) -> list[int]:
    """Every token that ends a text: those the metadata names, then control tokens that are known to."""
    named = [source.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    types = source.get("tokenizer.ggml.token_type", [])
    tokens = source.get("tokenizer.ggml.tokens", [])
    known = [
        i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == CONTROL and token in END_TOKENS
    ]
    return list(dict.fromkeys(int(token) for token in [*named, *known] if token is not None))


def _num_kv_heads(source: Source, name: str) -> int:
    return int(source.get(f"{name}.attention.head_count_kv", source.need(f"{name}.attention.head_count")))


def _short(value: float) -> float:
    """The shortest decimal that a float32 of the metadata may have been: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
