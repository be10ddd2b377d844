"""Reads one tool call: arguments as a JSON object, or an object that holds a name and arguments."""

import json
from collections.abc import Set
from typing import Any

from .json_value import JsonValue
from .scanner import Arguments, CallBegan, CallBroken, CallEnded, Parse, Scanner, Text

_ARGUMENTS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")


class CallReader:
    """Over one scanner; calls are of tools of these names only."""

    def __init__(self, scanner: Scanner, names: Set[str]) -> None:
        self.scanner = scanner
        self.names = names
        self._has_begun = False

    def object_call(self) -> Parse[bool]:
        """`{"name": ..., "arguments": {...}}`. False: it is none, and what stands since the mark was given as text."""
        self._has_begun = False
        if (yield from self._members()):
            yield CallEnded()
            return True
        yield from self.give_up()
        return False

    def bare_call(self, name: str) -> Parse[bool]:
        """The arguments of a call whose name is known. As `object_call`."""
        self._has_begun = False
        if name in self.names and (yield from self._stream_arguments(name)):
            yield CallEnded()
            return True
        yield from self.give_up()
        return False

    def give_up(self) -> Parse[None]:
        """What stands since the mark is text; but a call that a limit cut short stays as far as it came."""
        scanner = self.scanner
        if self._has_begun and scanner.was_cut and scanner.at == len(scanner.text):
            scanner.set_mark()
            return
        if self._has_begun:
            yield CallBroken()
            self._has_begun = False
        raw = scanner.since_mark()
        scanner.set_mark()
        if raw:
            yield Text(raw)

    def _members(self) -> Parse[bool]:
        scanner = self.scanner
        if (yield from scanner.skip_space()) != "{":
            return False
        scanner.at += 1
        name: str | None = None
        held: str | None = None  # arguments that came before the name
        seen: set[str] = set()
        while True:
            key = yield from self._decoded()
            if not isinstance(key, str) or key in seen or key not in ("name", *_ARGUMENTS, *_OTHER_KEYS):
                return False
            seen.add(key)
            if (yield from scanner.skip_space()) != ":":
                return False
            scanner.at += 1
            if key == "name":
                name = yield from self._decoded()
                if not isinstance(name, str) or name not in self.names:
                    return False
                if held is not None:
                    yield from self._emit(name, held)
            elif key in _ARGUMENTS and name is not None:
                if self._has_begun or not (yield from self._stream_arguments(name)):
                    return False
            elif key in _ARGUMENTS:
                held = yield from self._whole()
                if held is None or (held := _object_text(held)) is None:
                    return False
            elif (yield from self._whole()) is None:
                return False
            following = yield from scanner.skip_space()
            if following not in (",", "}") or not following:
                return False
            scanner.at += 1
            if following == "}":
                break
        if name is None:
            return False
        if not self._has_begun:
            yield from self._emit(name, "{}")
        return True

    def _stream_arguments(self, name: str) -> Parse[bool]:
        scanner = self.scanner
        if (yield from scanner.skip_space()) != "{":
            text = yield from self._whole()
            whole = None if text is None else _object_text(text)
            if whole is not None:
                yield from self._emit(name, whole)
            return whole is not None
        self._has_begun = True
        yield CallBegan(name)
        value = JsonValue()
        while True:
            text, scanner.at = value.take(scanner.text, scanner.at)
            if text:
                yield Arguments(text)
            if value.is_done:
                return True
            if value.is_broken or scanner.has_ended:
                return False
            yield None

    def _emit(self, name: str, arguments: str) -> Parse[None]:
        self._has_begun = True
        yield CallBegan(name)
        yield Arguments(arguments)

    def _whole(self) -> Parse[str | None]:
        """The text of the next JSON value; None: there is none."""
        scanner, value = self.scanner, JsonValue()
        yield from scanner.skip_space()
        pieces: list[str] = []
        while True:
            text, scanner.at = value.take(scanner.text, scanner.at)
            pieces.append(text)
            if value.is_done:
                return "".join(pieces)
            if value.is_broken or scanner.has_ended:
                return None
            yield None

    def _decoded(self) -> Parse[Any]:
        text = yield from self._whole()
        return None if text is None else json.loads(text)


def _object_text(text: str) -> str | None:
    """Arguments as the JSON text of an object: null and empty text are none, text is JSON once more."""
    value = json.loads(text)
    if isinstance(value, str):
        text = value
        try:
            value = json.loads(text) if text.strip() else None
        except ValueError:
            return None
    if value is None:
        return "{}"
    return text if isinstance(value, dict) else None
