"""Token ids to text, one at a time, never half a character."""

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from .tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """One sequence's text. The pieces of `add` and `flush` joined equal decoding all its ids at once."""

    @property
    def add(self) -> Callable[[int], str]:
        """The text that this id completes; empty while a character is incomplete."""

    def flush(self) -> str:
        """What an incomplete character leaves (a replacement character); nothing else follows."""


class NoText:
    """For whoever wants token ids only."""

    def __init__(self) -> None:
        self.add: Callable[[int], str] = lambda id: ""

    def flush(self) -> str:
        """Nothing."""
        return ""


class ByteTexts:
    """What each id shows: its bytes, and its text where the bytes are whole characters."""

    def __init__(self, table: list[bytes]) -> None:
        self.bytes = table
        self.whole = [_whole_characters(piece) for piece in table]
        self.size = len(table)


def _whole_characters(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


class ByteDetokenizer:
    """For byte-level vocabularies: a table of texts, and an incremental UTF-8 decoder where characters are cut."""

    __slots__ = ("_decoder", "_is_inside", "_size", "_texts", "_whole", "add")

    def __init__(self, texts: ByteTexts) -> None:
        self._texts = texts
        self._whole = texts.whole
        self._size = texts.size
        self._decoder = _utf8_decoder("replace")
        self._is_inside = False  # a character
        self.add = self._add

    def _add(self, id: int) -> str:
        if id >= self._size:
            return ""
        if not self._is_inside and (text := self._whole[id]) is not None:
            return text
        text = self._decoder.decode(self._texts.bytes[id])
        self._is_inside = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """What an incomplete character leaves."""
        self._is_inside = False
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For every other vocabulary: decodes a short window of ids and shows what it has more than before.

    Where a model produces bytes that are no text, the library's whole decoding may replace characters that an earlier
    piece has already shown; those stay as shown. (The library's own stream raises there.)
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(context)
        self._num_settled = len(self._window)  # ids of the window whose text has been shown
        self._settled_text = self._decoded(self._window)
        self.add = self._add

    def _add(self, id: int) -> str:
        self._window.append(id)
        text = self._decoded(self._window)
        if len(text) <= len(self._settled_text) or text.endswith("\ufffd"):
            return ""
        return self._settle(text)

    def flush(self) -> str:
        """What an incomplete character leaves."""
        return self._settle(self._decoded(self._window))

    def _settle(self, text: str) -> str:
        piece = text[len(self._settled_text) :]
        self._window = self._window[self._num_settled :]
        self._num_settled = len(self._window)
        self._settled_text = self._decoded(self._window)
        return piece

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""


class KeepingDetokenizer:
    """Shows some control tokens as their text, and leaves all else to another detokenizer."""

    __slots__ = ("_kept", "_others", "add")

    def __init__(self, others: Detokenizer, kept: Mapping[int, str]) -> None:
        self._others = others
        self._kept = kept
        self.add = self._add

    def _add(self, id: int) -> str:
        text = self._kept.get(id)
        return self._others.add(id) if text is None else self._others.flush() + text

    def flush(self) -> str:
        """What an incomplete character leaves."""
        return self._others.flush()


class DetokenizerFactory:
    """Makes detokenizers of one model; the tables are shared by all its sequences."""

    _CONTEXT = 8  # prompt tokens that decide how a continuation begins

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        table = tokenizer.bytes.table
        if tokenizer.bytes.is_exact:
            self._all = ByteTexts(table)
            self._shown = ByteTexts([b"" if id in tokenizer.control_ids else piece for id, piece in enumerate(table)])

    def start(
        self, *, skip_special_tokens: bool, continues: Sequence[int] = (), kept: Mapping[int, str] | None = None
    ) -> Detokenizer:
        """`continues`: the prompt whose text the output continues, where the vocabulary's spacing depends on it.

        `kept`: the texts of control tokens that are not skipped.
        """
        if skip_special_tokens and kept:
            return KeepingDetokenizer(self.start(skip_special_tokens=True, continues=continues), kept)
        if self._tokenizer.bytes.is_exact:
            return ByteDetokenizer(self._shown if skip_special_tokens else self._all)
        return WindowDetokenizer(self._tokenizer, skip_special_tokens, continues[-self._CONTEXT :])
