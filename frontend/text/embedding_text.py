"""How an embedding model wants its texts: case, named prompts, length, and which cuts of its vectors have a meaning.

Read from the files that sentence-transformers writes, and from config.json.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from .tokenizer import Tokenizer, read_json


class EmbeddingText(Struct, frozen=True, kw_only=True):
    """`prompts` by name go before a text; `default_prompt` does where a request names none. `matryoshka`: the sizes
    that vectors may be cut to, empty for any, None for no cut.
    """

    lowers: bool = False
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    matryoshka: tuple[int, ...] | None = None

    @classmethod
    def load(cls, directory: Path, *, matryoshka: bool = False) -> "EmbeddingText":
        """Whatever is there; nothing where there is nothing. `matryoshka`: the operator vouches for any cut."""
        config = read_json(directory / "config.json")
        named = read_json(directory / "config_sentence_transformers.json")
        prompts = {name: text for name, text in _mapping(named.get("prompts")).items() if isinstance(text, str)}
        default = named.get("default_prompt_name")
        return cls(
            lowers=read_json(directory / "sentence_bert_config.json").get("do_lower_case") is True,
            prompts=prompts,
            default_prompt=prompts.get(default, "") if isinstance(default, str) else "",
            matryoshka=() if matryoshka else _matryoshka(config),
        )

    def encode(self, tokenizer: Tokenizer, text: str, *, prompt: str, max_tokens: int | None) -> list[int]:
        """Ids of prompt and text with the tokenizer's own ends. `max_tokens` cuts the text behind; the ends stay."""
        whole = prompt + text
        if self.lowers:
            whole = whole.lower()
        ids = tokenizer.encode(whole, add_special_tokens=True)
        if max_tokens is None or len(ids) <= max_tokens:
            return ids
        return cut_inside(ids, tokenizer.encode(whole, add_special_tokens=False), max_tokens)


def cut_inside(ids: list[int], content: Sequence[int], max_tokens: int) -> list[int]:
    """The ids without the last of the content, so that what a tokenizer adds at both ends stays."""
    num_added = len(ids) - len(content)
    for before in range(num_added + 1):
        if ids[before : before + len(content)] == content:
            kept = max(max_tokens - num_added, 0)
            return [*ids[: before + kept], *ids[before + len(content) :]][:max_tokens]
    return ids[:max_tokens]


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _matryoshka(config: dict[str, Any]) -> tuple[int, ...] | None:
    sizes = config.get("matryoshka_dimensions")
    if isinstance(sizes, list):
        return tuple(size for size in sizes if isinstance(size, int) and not isinstance(size, bool))
    return () if config.get("is_matryoshka") is True else None
