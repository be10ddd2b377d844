"""Finds the end of one JSON value in text that is still coming, and the first character that is no JSON."""

import json
import re

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\]*')  # inside a string
_CONTROL = re.compile(r"[\x00-\x1f]")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD = re.compile(r"[-+.\w]*", re.ASCII)
_WHOLE_WORD = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_LONGEST_WORD = 400  # characters of a number
_DEEPEST = 128  # readers of JSON recurse


def _escape(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


class JsonScanner:
    """`scan` takes as much as is certainly part of the value: strings piece by piece, numbers and names whole.

    White space before the value is taken too. What was taken is the beginning of some JSON text, but for control
    characters inside strings, which models write as they are: `escaped` has them as JSON wants them.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._open: list[str] = []  # the closing brackets that are due, the innermost last
        self._expects = "value"  # value, first item, key, first key, colon, more
        self._in_string = False
        self._taken: list[str] = []

    def escaped(self) -> str:
        """What was taken since the last call, as JSON."""
        text = "".join(self._taken)
        self._taken.clear()
        return text

    def scan(self, text: str, at: int) -> int:
        """Where what was taken ends. The rest is to be given again, with more behind it."""
        while not (self.is_done or self.is_broken):
            begin, was_in_string = at, self._in_string
            at = self._string(text, at) if self._in_string else self._token(text, at)
            if at == begin:
                break
            taken = text[begin:at]
            self._taken.append(_CONTROL.sub(_escape, taken) if was_in_string else taken)
        return at

    def _string(self, text: str, at: int) -> int:
        found = _PLAIN.match(text, at)
        assert found is not None
        at = found.end()
        if at == len(text):
            return at
        if text[at] == '"':
            self._in_string = False
            if self._expects in ("key", "first key"):
                self._expects = "colon"
            else:
                self._value_ended()
            return at + 1
        escape = _ESCAPE.match(text, at)
        if escape is not None:
            return escape.end()
        self.is_broken = _ESCAPE_BEGUN.fullmatch(text, at) is None
        return at

    def _token(self, text: str, at: int) -> int:
        found = _SPACE.match(text, at)
        assert found is not None
        at = found.end()
        if at == len(text):
            return at
        character = text[at]
        if character == '"' and self._expects not in ("colon", "more"):
            self._in_string = True
            return at + 1
        if character in "{[" and self._expects in ("value", "first item"):
            return self._opened(character, at)
        if character in "}]":
            return self._closed(character, at)
        if character == ":" and self._expects == "colon":
            self._expects = "value"
            return at + 1
        if character == "," and self._expects == "more":
            self._expects = "key" if self._open[-1] == "}" else "value"
            return at + 1
        if self._expects in ("value", "first item"):
            return self._word(text, at)
        self.is_broken = True
        return at

    def _opened(self, character: str, at: int) -> int:
        if len(self._open) == _DEEPEST:
            self.is_broken = True
            return at
        self._open.append("}" if character == "{" else "]")
        self._expects = "first key" if character == "{" else "first item"
        return at + 1

    def _closed(self, character: str, at: int) -> int:
        may_close = self._expects == "more" or self._expects == ("first key" if character == "}" else "first item")
        if not may_close or not self._open or self._open[-1] != character:
            self.is_broken = True
            return at
        self._open.pop()
        self._value_ended()
        return at + 1

    def _word(self, text: str, at: int) -> int:
        found = _WORD.match(text, at)
        assert found is not None
        end = found.end()
        if end == len(text) and end - at <= _LONGEST_WORD:
            return at  # it may go on
        if end - at > _LONGEST_WORD or _WHOLE_WORD.fullmatch(text, at, end) is None:
            self.is_broken = True
            return at
        self._value_ended()
        return end

    def _value_ended(self) -> None:
        self._expects = "more"
        self.is_done = not self._open
