"""Folders with a model's shape and no weights: config.json and a synthetic byte-level tokenizer, vocabulary in full."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QWEN3_600M: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA31_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128009,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
SHAPES = {"m1": QWEN3_600M, "m2": LLAMA31_8B}
NAMES = {"m1": "Qwen3-0.6B", "m2": "Llama-3.1-8B"}

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SPACE = "\u0120"  # how byte-level vocabularies write a leading space


@dataclass(frozen=True)
class Work:
    """What the products and the cache of a model come to, in bfloat16. `layer`: numbers in a layer's query, key and
    value weights, and in its others; `head` in the head's.
    """

    num_layers: int
    layer: tuple[int, int]
    head: int
    query_channels: int
    kv_channels: int

    @property
    def weight_bytes(self) -> int:
        """Read by a decode."""
        return 2 * (self.num_layers * sum(self.layer) + self.head)

    def cache_bytes(self, sequences: int, length: int) -> int:
        """Keys and values that a decode of so many sequences reads."""
        return 2 * 2 * self.num_layers * self.kv_channels * sequences * length

    def linear_operations(self, tokens: int) -> int:
        """Of a prompt's part, two for each product; behind its keys and values the last layer has one token."""
        qkv, others = self.layer
        last = qkv * tokens + others + self.head
        return 2 * ((self.num_layers - 1) * (qkv + others) * tokens + last)

    def attention_operations(self, tokens: int, length: int) -> int:
        """The same, where a token sees what is before it: two products of its channels with each position."""
        seen = tokens * length + tokens * (tokens + 1) // 2
        return 4 * self.query_channels * ((self.num_layers - 1) * seen + length + tokens)


def work_of(config: Mapping[str, Any]) -> Work:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = (config[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    return Work(
        num_layers=config["num_hidden_layers"],
        layer=(hidden * (query + 2 * kv), query * hidden + 3 * hidden * inner),
        head=hidden * config["vocab_size"],
        query_channels=query,
        kv_channels=kv,
    )


def write_model(folder: Path, shape: Mapping[str, Any]) -> Path:
    """Write the folder, unless it already holds this shape."""
    config = json.dumps(shape)
    if not ((folder / "config.json").is_file() and (folder / "config.json").read_text() == config):
        folder.mkdir(parents=True, exist_ok=True)
        _write_tokenizer(folder, shape["vocab_size"])
        (folder / "config.json").write_text(config)
    return folder


def prompt_ids(folder: Path) -> tuple[int, int]:
    """The first token id that prompts may hold, and the one after the last."""
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    return (1000, 120_000) if size > 120_000 else (size // 4, size)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for number in range(vocab_size - len(vocab)):
        vocab[(_SPACE if number % 2 else "") + _word(number)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 40960}))


def _word(number: int) -> str:
    """Four letters, different for each number below 26^4."""
    letters = ""
    for _ in range(4):
        number, place = divmod(number, len(_LETTERS))
        letters += _LETTERS[place]
    return letters
