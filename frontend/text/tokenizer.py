"""The model's tokenizer: text to ids, and what each id is as text.

Owns one loaded tokenizer.json and the beginning-of-sequence rule. Chat templates, incremental decoding and threads of
execution (encoding.py) live elsewhere.
"""

import json
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as FastTokenizer

from ...ipc.conditions import Refusal
from .byte_table import ByteTable

_TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>")


class SpecialTexts(msgspec.Struct, frozen=True):
    """The named special tokens of tokenizer_config.json (`bos_token`, ...), as text for templates."""

    by_name: dict[str, str]

    @property
    def bos(self) -> str | None:
        """Beginning of sequence."""
        return self.by_name.get("bos_token")

    @property
    def eos(self) -> str | None:
        """End of sequence."""
        return self.by_name.get("eos_token")


class Tokenizer:
    """Encodes as the reference library does; thread-safe.

    Two variants of the same vocabulary exist: the ordinary one, and (made when first needed) a *guarded* one in which
    every control token is known by an unguessable name instead of its own text, so that its text is only text.
    """

    def __init__(self, fast: FastTokenizer, source: dict[str, Any], config: dict[str, Any]) -> None:
        self._fast = fast
        self._guarded: FastTokenizer | None = None
        self.special_texts = SpecialTexts(_special_texts(config))
        self.vocab_size: int = max(fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = fast.get_added_tokens_decoder()
        self.control_texts = {token.content: id for id, token in added.items() if token.special}
        self.control_ids = frozenset(self.control_texts.values())
        self._normalizes_controls = fast.normalizer is not None and any(
            token.normalized for token in added.values() if token.special
        )
        nonce = _digits()
        self._guard_names = {text: f"<{nonce}.{id}>" for text, id in self.control_texts.items()}
        self.break_mark = _digits()
        self._control_pattern = _any_of(self.control_texts)
        self._adds_bos = _optional_bool(config.get("add_bos_token"))
        self._adds_eos = _optional_bool(config.get("add_eos_token"))
        self.bos_id = self._id_of(self.special_texts.bos)
        self.eos_id = self._id_of(self.special_texts.eos)
        self.bytes = ByteTable.build(fast, source, self.vocab_size)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read tokenizer.json and tokenizer_config.json. Raises Refusal."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise Refusal(
                f"{directory} has no tokenizer.json; save the model's fast tokenizer there "
                "(transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        try:
            text = path.read_text(encoding="utf-8")
            fast = FastTokenizer.from_str(text)
            source = json.loads(text)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise Refusal(f"{path} cannot be read: {error}; fetch the model again") from error
        fast.no_padding()
        fast.no_truncation()
        return cls(fast, source, read_json(directory / "tokenizer_config.json"))

    @property
    def fast(self) -> FastTokenizer:
        """The library's object, for incremental decoding."""
        return self._fast

    def end_ids(self) -> tuple[int, ...]:
        """Ids that end any text of this vocabulary: the named end token, and the end-of-text marker if it has one."""
        found = [self.eos_id, *(self.control_texts.get(text) for text in _TEXT_ENDS)]
        return tuple(dict.fromkeys(id for id in found if id is not None))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text in which control-token text means control tokens. At most one BOS at the start."""
        ids = self._ids(self._fast, text, add_special_tokens)
        if not add_special_tokens:
            return ids
        return self._settle_ends(ids, text)

    def encode_rendered(self, rendered: str) -> list[int]:
        """Ids of a rendered chat. Control-token text that `break_controls` broke stays text."""
        if self.break_mark not in rendered and not self._normalizes_controls:
            return self._ids(self._fast, rendered, False)
        guarded = self._control_pattern.sub(lambda match: self._guard_names[match[0]], rendered)
        return self._ids(self._guarded_fast(), guarded.replace(self.break_mark, ""), False)

    def break_controls(self, text: str) -> str:
        """The text with a mark inside every control-token text, which `encode_rendered` takes for plain text."""
        if not any(control in text for control in self.control_texts):
            return text
        return self._control_pattern.sub(lambda match: match[0][0] + self.break_mark + match[0][1:], text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of all ids at once."""
        decoded: str = self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return decoded

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Each id's own text, replacement characters where it holds part of a character."""
        return [self.bytes.of(id).decode("utf-8", "replace") for id in ids]

    def _ids(self, fast: FastTokenizer, text: str, add_special_tokens: bool) -> list[int]:
        # encode_batch releases the interpreter lock, encode holds it; for short texts encode costs less.
        if len(text) < 4096:
            ids: list[int] = fast.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def _settle_ends(self, ids: list[int], text: str) -> list[int]:
        bos, eos = self.bos_id, self.eos_id
        if self._adds_bos is False and bos is not None and ids[:1] == [bos] and not self._starts_with_bos(text):
            ids = ids[1:]
        if self._adds_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        if self._adds_eos is False and eos is not None and ids[-1:] == [eos] and not text.endswith(self._eos_text()):
            ids = ids[:-1]
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return ids

    def _starts_with_bos(self, text: str) -> bool:
        return self.special_texts.bos is not None and text.startswith(self.special_texts.bos)

    def _eos_text(self) -> str:
        return self.special_texts.eos or "\0"

    def _id_of(self, text: str | None) -> int | None:
        return None if text is None else self._fast.token_to_id(text)

    def _guarded_fast(self) -> FastTokenizer:
        if self._guarded is None:
            self._guarded = FastTokenizer.from_str(
                json.dumps(_renamed(json.loads(self._fast.to_str()), self._guard_names))
            )
            self._guarded.no_padding()
            self._guarded.no_truncation()
        return self._guarded


def _digits() -> str:
    """A text nobody can guess, in digits, so that it survives changes of case and any escaping."""
    return str(secrets.randbelow(9 * 10**29) + 10**29)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is none. Raises Refusal for a broken one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Refusal(f"{path} is not JSON: {error}; fetch the model again") from error
    if not isinstance(value, dict):
        raise Refusal(f"{path} does not hold a JSON object; fetch the model again")
    return value


def _special_texts(config: dict[str, Any]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name, value in config.items():
        if not name.endswith("_token"):
            continue
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            texts[name] = content
    return texts


def _optional_bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _any_of(texts: dict[str, int]) -> re.Pattern[str]:
    longest_first = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _renamed(source: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """tokenizer.json with the control tokens known by other names, under the same ids."""
    added = [{**token, "content": names.get(token["content"], token["content"])} for token in source["added_tokens"]]
    model = dict(source["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): id for text, id in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    unknown = model.get("unk_token")
    if isinstance(unknown, str):
        model["unk_token"] = names.get(unknown, unknown)
    return {**source, "added_tokens": added, "model": model, "post_processor": None}
