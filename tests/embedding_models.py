"""Tiny random encoders in the form of sentence-transformers, texts to embed, and the reference's vectors."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, PreTrainedConfig, RobertaConfig, XLMRobertaConfig

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 200,
    "max_position_embeddings": 66,
    "pad_token_id": 1,
}
ENCODERS = {"bert": BertConfig, "roberta": RobertaConfig, "xlm_roberta": XLMRobertaConfig}
MODES = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken"}


def save_encoder(name: str, directory: Path, **changes: Any) -> torch.nn.Module:
    """Random weights large enough that every part matters. Returns the reference in float32."""
    return save_headless(ENCODERS[name](**SIZES | changes), directory)


def save_headless(config: PreTrainedConfig, directory: Path) -> torch.nn.Module:
    """A model that ends with its hidden states, as embedding models are saved."""
    torch.manual_seed(5)
    model = AutoModel.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.lower().endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.15)
    model.save_pretrained(directory)
    return model


def save_pooling(
    directory: Path, mode: str, *, normalizes: bool = False, max_tokens: int | None = None, prompts: Any = None
) -> None:
    """The files of sentence-transformers beside a model."""
    steps = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    modules = [
        {"idx": index, "path": "" if index == 0 else f"{index}_{step}", "type": f"sentence_transformers.models.{step}"}
        for index, step in enumerate(steps)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(
        json.dumps({name: name == MODES[mode] for name in MODES.values()})
    )
    if max_tokens is not None:
        (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens}))
    if prompts is not None:
        (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))


def reference_vector(model: torch.nn.Module, token_ids: Sequence[int], mode: str) -> np.ndarray:
    """Of one text, alone, float32, not normalised."""
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([list(token_ids)])).last_hidden_state[0]
    pooled = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[mode]
    return np.asarray(pooled.float().numpy())


def unit(vectors: np.ndarray) -> np.ndarray:
    """To length 1, each row."""
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))


class MiniReference:
    """The packaged model by transformers: mean of the last hidden states, normalised."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self.model = AutoModel.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()

    def token_ids(self, text: str, max_tokens: int | None = None) -> list[int]:
        ids: list[int] = self.tokenizer(text, truncation=max_tokens is not None, max_length=max_tokens)["input_ids"]
        return ids

    def vector(self, text: str, max_tokens: int | None = None) -> np.ndarray:
        return unit(reference_vector(self.model, self.token_ids(text, max_tokens), "mean"))


PAIRS = (
    ("A man is playing a guitar on stage.", "Someone performs guitar music for an audience."),
    ("The stock market fell sharply today.", "Shares dropped a lot on the exchange this afternoon."),
    ("How do I reset my password?", "I forgot my login credentials and need a new password."),
)


def fifty_texts() -> list[str]:
    """Short and long ones, in several scripts, with odd spacing."""
    base = [
        *(text for pair in PAIRS for text in pair),
        "x",
        "  leading and trailing blanks  ",
        "Zażółć gęślą jaźń",
        "日本語の文章です。",
        "emoji 🚀 and 👩‍👩‍👧",
        "def f(x): return x * 2",
        "line one\nline two\n\nline four",
        "[CLS] is a control token's text [SEP]",
    ]
    long = [" ".join(f"word{index % 97}" for index in range(length)) for length in (10, 33, 60)]
    others = [f"Sentence number {index} speaks of {'rivers ' * (index % 13)}and trees." for index in range(33)]
    return [*base, *long, *others][:50]
