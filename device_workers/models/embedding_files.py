"""How a checkpoint says that it makes vectors: the files that sentence-transformers writes beside a model. Torch-free.

`modules.json` lists the steps from text to vector, each with its folder; the pooling folder says which hidden states
count; `sentence_bert_config.json` may bound the length below what the positions allow.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ipc.conditions import Refusal
from ...ipc.facts import PoolingFacts, PoolingKind

_MODES = {
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
    "pooling_mode_cls_token": PoolingKind.CLS,
    "pooling_mode_lasttoken": PoolingKind.LAST,
}
_NAMES = {"mean": PoolingKind.MEAN, "cls": PoolingKind.CLS, "lasttoken": PoolingKind.LAST}
_STEPS = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, kw_only=True)
class EmbeddingFiles:
    """What they say. `max_tokens` None: as many as the model has positions."""

    kind: PoolingKind
    normalizes: bool
    max_tokens: int | None
    source: str


def read_embedding_files(directory: Path) -> EmbeddingFiles | None:
    """None where the checkpoint has none. Raises Refusal for steps that are not supported."""
    path = directory / "modules.json"
    if not path.is_file():
        return None
    modules = _read(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise Refusal(f"{path} holds no list of modules: download the model again")
    folders = {str(module.get("type", "")).rpartition(".")[2]: str(module.get("path", "")) for module in modules}
    unknown = [name for name in folders if name not in _STEPS]
    if unknown:
        raise Refusal(
            f"{path} wants {', '.join(unknown)} after the model, which is not supported; supported are "
            f"{', '.join(_STEPS)}: choose another embedding model"
        )
    source = f"{folders['Pooling']}/config.json" if "Pooling" in folders else path.name
    kind = _kind(directory / source) if "Pooling" in folders else PoolingKind.MEAN
    return EmbeddingFiles(
        kind=kind, normalizes="Normalize" in folders, max_tokens=_max_tokens(directory), source=source
    )


def pooling_of(files: EmbeddingFiles | None, num_dimensions: int) -> PoolingFacts | None:
    """Of a decoder: one that was trained to make vectors makes no sensible tokens. Raises Refusal for a pooling that
    prompts computed in parts do not have.
    """
    if files is None:
        return None
    if files.kind is not PoolingKind.LAST:
        raise Refusal(
            f"{files.source} wants the {files.kind.value} of a decoder's hidden states; supported is lasttoken: choose "
            "another embedding model"
        )
    return PoolingFacts(kind=files.kind, num_dimensions=num_dimensions, normalizes=files.normalizes, is_encoder=False)


def _kind(path: Path) -> PoolingKind:
    values = _read(path)
    if not isinstance(values, dict):
        raise Refusal(f"{path} holds no JSON object: download the model again")
    if values.get("include_prompt") is False:
        raise Refusal(f"{path} leaves prompts out of the pooling, which is not supported: choose another model")
    named = values.get("pooling_mode")
    modes = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
    kind = _NAMES.get(str(named)) if named is not None else _MODES.get(modes[0]) if len(modes) == 1 else None
    if kind is None:
        told = named if named is not None else ", ".join(modes) or "no mode"
        raise Refusal(f"{path} wants {told}; supported is one of {', '.join(_NAMES)}: choose another embedding model")
    return kind


def _max_tokens(directory: Path) -> int | None:
    path = directory / "sentence_bert_config.json"
    values = _read(path) if path.is_file() else {}
    length = values.get("max_seq_length") if isinstance(values, dict) else None
    if length is None:
        return None
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise Refusal(f"{path}: max_seq_length is {length!r}, which is no positive integer: download the model again")
    return length


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Refusal(f"{path} is missing, though modules.json names it: download the model again") from None
    except (OSError, ValueError) as error:
        raise Refusal(f"{path} cannot be read ({error}): download the model again") from None
