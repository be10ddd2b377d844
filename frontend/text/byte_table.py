"""What each token id contributes to a text, as bytes."""

import re
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_characters() -> dict[str, int]:
    """The printable stand-ins that byte-level vocabularies use for bytes: Latin-1 where printable, else 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return characters | {chr(256 + index): byte for index, byte in enumerate(others)}


class ByteTable:
    """Bytes by token id. `is_exact`: joining them and decoding UTF-8 equals decoding the ids (byte-level vocabularies).

    Elsewhere the bytes are right for a token inside a text, and serve log-probabilities only.
    """

    def __init__(self, table: list[bytes], is_exact: bool) -> None:
        self.table = table
        self.is_exact = is_exact

    @classmethod
    def build(cls, fast: FastTokenizer, source: dict[str, Any], size: int) -> "ByteTable":
        """From the vocabulary of a tokenizer.json."""
        is_exact = _is_byte_level(source.get("decoder"))
        added = {id: token.content for id, token in fast.get_added_tokens_decoder().items()}
        convert = _from_byte_level if is_exact else _from_pieces
        table = [b""] * size
        for text, id in fast.get_vocab(with_added_tokens=True).items():
            table[id] = convert(text) if is_exact or id not in added else text.encode()
        return cls(table, is_exact)

    def of(self, id: int) -> bytes:
        """Empty for an id that the vocabulary does not have."""
        return self.table[id] if 0 <= id < len(self.table) else b""


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder.get("type") == "Sequence":
        return bool(decoder["decoders"]) and all(_is_byte_level(part) for part in decoder["decoders"])
    return decoder.get("type") == "ByteLevel"


_CHARACTERS = _byte_characters()


def _from_byte_level(text: str) -> bytes:
    try:
        return bytes([_CHARACTERS[character] for character in text])
    except KeyError:  # not written in stand-ins: an added token, taken literally
        return text.encode()


def _from_pieces(text: str) -> bytes:
    if match := _BYTE_PIECE.fullmatch(text):
        return bytes([int(match[1], 16)])
    if text.startswith("##"):
        return text[2:].encode()
    return text.replace("\u2581", " ").encode()
