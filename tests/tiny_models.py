"""Tiny random models of every native family and rotary variant, saved as Hugging Face directories."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_SCALED = YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}


def variants() -> dict[str, PreTrainedConfig]:
    """Every native family and rotary variant, by name."""
    return {
        "llama": LlamaConfig(**SIZES),
        "llama_tied": LlamaConfig(**SIZES | {"tie_word_embeddings": True}),
        "llama_biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
        "llama_multi_query": LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
        "llama_llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
        "llama_linear": LlamaConfig(**SIZES, rope_parameters=LINEAR),
        "llama_yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
        "llama_yarn_scaled": LlamaConfig(**SIZES, rope_parameters=YARN_SCALED),
        "mistral": MistralConfig(**SIZES, sliding_window=None),
        "mistral_window": MistralConfig(**SIZES, sliding_window=24),
        "qwen2": Qwen2Config(**SIZES),
        "qwen2_yarn": Qwen2Config(**SIZES, rope_parameters=YARN),
        "qwen2_window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=20, max_window_layers=1),
        "qwen3": Qwen3Config(**SIZES, head_dim=32),
        "qwen3_biases": Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
    }


def with_head_dim(head_dim: int) -> PreTrainedConfig:
    return LlamaConfig(**SIZES, head_dim=head_dim)


def save(config: PreTrainedConfig, directory: Path, *, shard_bytes: str = "5GB") -> torch.nn.Module:
    """Random weights large enough that attention and biases matter. Returns the reference in float32."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.15)
    model.save_pretrained(directory, max_shard_size=shard_bytes)
    return model


def save_tokenizer(directory: Path) -> None:
    """A token per byte and names for the other ids of the tiny vocabulary, for tests through a frontend."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rest = [f"<{index}>" for index in range(len(alphabet), SIZES["vocab_size"])]
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(alphabet + rest)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
