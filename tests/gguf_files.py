"""Small GGUF files for tests: models of each supported architecture with random weights and a little tokenizer."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, CONTEXT = 64, 2, 4, 2, 16, 96, 512
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
TOKENS = ["<unk>", "<s>", "</s>", "<tool>", *LETTERS, "Ġ", "th", "the", "Ġthe"]
MERGES = ["t h", "th e", "Ġ the"]
TYPES = [2, 3, 3, 4, *[1] * (len(TOKENS) - 4)]


def permuted(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """llama.cpp's order of query and key rows: the halves of each head interleaved."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def random_weights(architecture: str, *, tied: bool = True, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Hugging Face names to weights of a tiny model."""
    generator = np.random.default_rng(seed)

    def draw(*shape: int) -> NDArray[np.float32]:
        return (generator.standard_normal(shape) * 0.1).astype(np.float32)

    weights = {"model.embed_tokens.weight": draw(len(TOKENS), HIDDEN), "model.norm.weight": draw(HIDDEN)}
    if not tied:
        weights["lm_head.weight"] = draw(len(TOKENS), HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", HEADS * HEAD_DIM), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
            weights[f"{prefix}.self_attn.{name}_proj.weight"] = draw(rows, HIDDEN)
            if architecture == "qwen2":
                weights[f"{prefix}.self_attn.{name}_proj.bias"] = draw(rows)
            if architecture == "qwen3" and name != "v":
                weights[f"{prefix}.self_attn.{name}_norm.weight"] = draw(HEAD_DIM)
        weights[f"{prefix}.self_attn.o_proj.weight"] = draw(HIDDEN, HEADS * HEAD_DIM)
        weights[f"{prefix}.mlp.gate_proj.weight"] = draw(INTERMEDIATE, HIDDEN)
        weights[f"{prefix}.mlp.up_proj.weight"] = draw(INTERMEDIATE, HIDDEN)
        weights[f"{prefix}.mlp.down_proj.weight"] = draw(HIDDEN, INTERMEDIATE)
        weights[f"{prefix}.input_layernorm.weight"] = draw(HIDDEN)
        weights[f"{prefix}.post_attention_layernorm.weight"] = draw(HIDDEN)
    return weights


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def write_gguf(
    path: Path,
    architecture: str,
    weights: dict[str, NDArray[np.float32]],
    *,
    kind: str = "F32",
    tokenizer: dict[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
    rope_factors: NDArray[np.float32] | None = None,
    parts: int = 1,
    omit: tuple[str, ...] = (),
) -> Path:
    """Writes the model and returns the path to name: that of the first part where there are several."""
    count = len(weights) + (rope_factors is not None)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=0 if parts == 1 else -(-count // parts))
    settings = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": INTERMEDIATE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    } | (metadata or {})
    for key, value in settings.items():
        if key not in omit:
            _add(writer, key if "." in key and key.split(".")[0] == "general" else f"{architecture}.{key}", value)
    for key, value in (tokenizer or byte_level_tokenizer()).items():
        _add(writer, f"tokenizer.{key}", value)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    for name, weight in weights.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2]) if architecture == "llama" else None
        value = weight if heads is None else permuted(weight, heads)
        tensor_type = gguf.GGMLQuantizationType[kind if value.ndim > 1 else "F32"]
        writer.add_tensor(gguf_name(name), gguf.quantize(value, tensor_type), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05d}.gguf")


def byte_level_tokenizer(pre: str = "smollm") -> dict[str, Any]:
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": TOKENS,
        "ggml.token_type": TYPES,
        "ggml.merges": MERGES,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise AssertionError(f"{key}: {value!r}")
