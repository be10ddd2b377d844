"""Tiny random models of families that have no code of ours, saved as Hugging Face directories."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    CohereConfig,
    DebertaV2Config,
    DeepseekV3Config,
    DistilBertConfig,
    ElectraConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    MixtralConfig,
    ModernBertConfig,
    MPNetConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from .tiny_models import SIZES

_HEADS = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
_GPT = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 300,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 96,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [2.0] * 8,
}
WINDOW = 12

DECODERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": lambda: GPT2Config(**_GPT, scale_attn_by_inverse_layer_idx=True),
    "gpt_neox": lambda: GPTNeoXConfig(**_HEADS),
    "opt": lambda: OPTConfig(
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=300,
        max_position_embeddings=256,
        word_embed_proj_dim=32,
    ),
    "phi3_window": lambda: Phi3Config(**SIZES, sliding_window=WINDOW),
    "phi3_longrope": lambda: Phi3Config(**SIZES, rope_parameters=_LONG, original_max_position_embeddings=96),
    "gemma2": lambda: Gemma2Config(
        **SIZES, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=2.0, final_logit_softcapping=5.0
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 3}, head_dim=16, sliding_window=WINDOW, sliding_window_pattern=2
    ),
    "olmo2": lambda: Olmo2Config(**SIZES),
    "cohere": lambda: CohereConfig(**SIZES, logit_scale=0.5),
    "granite": lambda: GraniteConfig(**SIZES, attention_multiplier=0.3, logits_scaling=2.0),
    "starcoder2_window": lambda: Starcoder2Config(**SIZES, sliding_window=WINDOW),
    "gptj": lambda: GPTJConfig(**_GPT, rotary_dim=8),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES, head_dim=16, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2, rope_parameters=None
    ),
    "deepseek_v3": lambda: deepseek(v_head_dim=16),
}

ENCODERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "distilbert": lambda: DistilBertConfig(
        dim=48, hidden_dim=80, n_layers=2, n_heads=4, vocab_size=200, max_position_embeddings=66
    ),
    "modernbert": lambda: ModernBertConfig(
        **_ENCODER | {"max_position_embeddings": 64}, local_attention=8, cls_token_id=0, sep_token_id=2
    ),
    "mpnet": lambda: MPNetConfig(**_ENCODER),
    "electra": lambda: ElectraConfig(**_ENCODER, embedding_size=24),
    "deberta_v2": lambda: DebertaV2Config(
        **_ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"], position_biased_input=False
    ),
}
_ENCODER: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 200,
    "max_position_embeddings": 66,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


def deepseek(v_head_dim: int) -> PreTrainedConfig:
    """Latent attention, with values of so many channels a head; keys have 16."""
    return DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        n_routed_experts=8,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=v_head_dim,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    )


def save_decoder(config: PreTrainedConfig, directory: Path) -> torch.nn.Module:
    """Random weights large enough that attention, windows and caps matter. Returns the reference in float32."""
    return _save(AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager"), directory)


def save_module_encoder(name: str, directory: Path) -> torch.nn.Module:
    """Without a head."""
    return _save(AutoModel.from_config(ENCODERS[name](), dtype=torch.float32, attn_implementation="eager"), directory)


def _save(model: Any, directory: Path) -> torch.nn.Module:
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower().rpartition(".")[0] and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.15)
    model.eval().save_pretrained(directory)
    return model  # type: ignore[no-any-return]
