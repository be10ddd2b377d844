"""Follows one JSON value as it arrives: where it ends, and whether it is JSON at all."""

import re

_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = frozenset(("true", "false", "null"))
_SPACE = " \t\n\r"
_SCALAR = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_MAX_DEPTH = 256


class JsonValue:
    """Feed it by `take` until `is_done` or `is_broken`. A number ends at the character after it.

    Control characters that models write into strings as they are come out escaped, as JSON wants them.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._open: list[str] = []
        self._expects = "value"
        self._scalar = ""
        self._hex_left = 0

    def take(self, text: str, at: int) -> tuple[str, int]:
        """The value's part of `text` from `at` on, and where that ends; a broken one ends at what breaks it."""
        pieces: list[str] = []
        while at < len(text) and not (self.is_done or self.is_broken):
            if self._expects == "string" and (run := _RUN.match(text, at)) is not None:
                pieces.append(run[0])
                at = run.end()
                continue
            took = self._step(text[at])
            if took is not None:
                pieces.append(took)
                at += 1
        return "".join(pieces), at

    def _step(self, character: str) -> str | None:
        """What the character adds; None: it is not part of the value, or ends a number and is read again."""
        match self._expects:
            case "string" | "key string":
                return self._in_string(character)
            case "escape" | "key escape":
                return self._escaped(character)
            case "scalar":
                return self._in_scalar(character)
        if character in _SPACE:
            return character
        return self._structural(character)

    def _in_string(self, character: str) -> str:
        is_key = self._expects == "key string"
        if character == '"':
            if is_key:
                self._expects = "colon"
            else:
                self._value_ended()
        elif character == "\\":
            self._expects = "key escape" if is_key else "escape"
        elif character < " ":
            return f"\\u{ord(character):04x}"
        return character

    def _escaped(self, character: str) -> str | None:
        string = "key string" if self._expects == "key escape" else "string"
        if self._hex_left:
            self._hex_left -= 1
            if character not in "0123456789abcdefABCDEF":
                return self._break()
            if not self._hex_left:
                self._expects = string
        elif character == "u":
            self._hex_left = 4
        elif character in '"\\/bfnrt':
            self._expects = string
        else:
            return self._break()
        return character

    def _in_scalar(self, character: str) -> str | None:
        if character in _SCALAR:
            self._scalar += character
            return character
        if self._scalar in _WORDS or _NUMBER.fullmatch(self._scalar):
            self._value_ended()
            return None
        return self._break()

    def _structural(self, character: str) -> str | None:
        expects, inside = self._expects, self._open[-1] if self._open else ""
        if (expects in ("value", "value or end") and character in '{["') or (
            character in _SCALAR and "value" in expects
        ):
            return self._begin(character)
        if expects in ("key", "key or end") and character == '"':
            self._expects = "key string"
        elif expects == "colon" and character == ":":
            self._expects = "value"
        elif expects == "comma or end" and character == ",":
            self._expects = "key" if inside == "{" else "value"
        elif expects.endswith("or end") and character == ("}" if inside == "{" else "]"):
            self._open.pop()
            self._value_ended()
        else:
            return self._break()
        return character

    def _begin(self, character: str) -> str | None:
        if character == '"':
            self._expects = "string"
        elif character in "{[":
            if len(self._open) == _MAX_DEPTH:
                return self._break()
            self._open.append(character)
            self._expects = "key or end" if character == "{" else "value or end"
        else:
            self._expects, self._scalar = "scalar", character
        return character

    def _value_ended(self) -> None:
        if self._open:
            self._expects = "comma or end"
        else:
            self.is_done = True

    def _break(self) -> str | None:
        self.is_broken = True
        return None
