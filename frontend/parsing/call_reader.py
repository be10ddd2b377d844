"""Reads tool calls written as JSON, giving out their arguments as they come."""

import json
from collections.abc import Collection
from enum import Enum
from typing import Any

from .events import CallArguments, CallBegun, CallBroken, CallEnded, Event
from .json_scanner import JsonScanner
from .source import Source, Steps

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", *_ARGUMENTS, "type", "function", "id")


class Outcome(Enum):
    """Of reading one call. NONE: nothing was given out, and nothing was taken. BROKEN: it was begun, and is none."""

    NONE = 0
    WHOLE = 1
    BROKEN = 2


class _Call:
    """What is known of the call that is being read."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.early_arguments: str | None = None  # they came before the name
        self.outcome = Outcome.NONE


class CallReader:
    """`names`: the tools there are; a call of another is no call. `owed`: closing tags of what was opened.

    A call is given out from the moment when its name and the `{` of its arguments are known. What breaks before that
    is left as text; what breaks later is taken back. `broken_at` is where such a call began.
    """

    def __init__(self, source: Source, names: Collection[str]) -> None:
        self.source = source
        self.events: list[Event] = []
        self.owed: list[str] = []
        self.num_begun = 0
        self.was_cut = False  # at its end: by a limit, not by the model
        self.broken_at: int | None = None
        self._names = names

    def knows(self, name: str) -> bool:
        """Whether there is such a tool."""
        return name in self._names

    def call_object(self, *, is_tagged: bool) -> Steps[Outcome]:
        """One call as an object with `name` and `arguments` or `parameters`.

        Without a tag before it the object might be an answer in JSON: it must have arguments, and no foreign keys.
        """
        begin, call = self.source.at, _Call()
        yield from self._members(call, is_tagged)
        self._leave(call.outcome, begin)
        return call.outcome

    def call_list(self, *, is_tagged: bool) -> Steps[None]:
        """Calls between brackets; what follows the last good one stays."""
        source = self.source
        begin = source.at
        yield from source.take("[")
        outcome = yield from self.call_object(is_tagged=is_tagged)
        if outcome is Outcome.NONE:
            source.at = begin
        while outcome is Outcome.WHOLE:
            begin = source.at
            yield from source.skip_space()
            if (yield from source.take("]")):
                return
            outcome = Outcome.NONE
            if (yield from source.take(",")):
                outcome = yield from self.call_object(is_tagged=is_tagged)
            self._leave(outcome, begin)

    def call_row(self, *, is_tagged: bool) -> Steps[None]:
        """Calls one behind the other, with or without a semicolon between them."""
        source = self.source
        outcome = yield from self.call_object(is_tagged=is_tagged)
        while outcome is Outcome.WHOLE:
            begin = source.at
            yield from source.skip_space()
            yield from source.take(";")
            outcome = yield from self.call_object(is_tagged=is_tagged)
            self._leave(outcome, begin)

    def _leave(self, outcome: Outcome, begin: int) -> None:
        """What was no good call stays, with what is between it and the one before."""
        if outcome is Outcome.NONE:
            self.source.at = begin
        elif self.broken_at is not None:
            self.broken_at = begin

    def arguments(self, name: str) -> Steps[Outcome]:
        """The arguments alone, of the tool with this name."""
        if not self.knows(name) or (yield from self.source.peek()) != "{":
            return Outcome.NONE
        self._begin(name)
        source, scanner = self.source, JsonScanner()
        begin = source.at
        while True:
            end = scanner.scan(source.text, source.at)
            if end > source.at:
                self.events.append(CallArguments(scanner.escaped()))
                source.at = end
            if scanner.is_done:
                self.events.append(CallEnded())
                return Outcome.WHOLE
            if scanner.is_broken or not (yield from source.more()):
                break
        if scanner.is_broken or not self.was_cut:
            self.events.append(CallBroken())
            self.broken_at = begin
        return Outcome.BROKEN

    def _members(self, call: _Call, is_tagged: bool) -> Steps[None]:
        source = self.source
        yield from source.skip_space()
        if not (yield from source.take("{")):
            return
        while True:
            yield from source.skip_space()
            key = yield from self._key()
            if key is None or not (is_tagged or key in _KEYS):
                return
            yield from source.skip_space()
            if not (yield from self._member(call, key, is_tagged)):
                return
            yield from source.skip_space()
            if not (yield from source.take(",")):
                break
        if (yield from source.take("}")) and is_tagged and call.name is not None and call.outcome is Outcome.NONE:
            self._give(call, "{}")

    def _key(self) -> Steps[str | None]:
        if (yield from self.source.peek()) != '"':
            return None
        text = yield from self.source.take_json()
        if text is None:
            return None
        yield from self.source.skip_space()
        return str(json.loads(text)) if (yield from self.source.take(":")) else None

    def _member(self, call: _Call, key: str, is_tagged: bool) -> Steps[bool]:
        """False: the object is broken, or is no call."""
        if key == "function" and call.name is None and (yield from self.source.peek()) == "{":
            yield from self._members(call, is_tagged)
            return call.outcome is Outcome.WHOLE
        if key in _ARGUMENTS and call.name is not None and (yield from self.source.peek()) == "{":
            if call.outcome is not Outcome.NONE:
                return False
            call.outcome = yield from self.arguments(call.name)
            return call.outcome is Outcome.WHOLE
        text = yield from self.source.take_json()
        if text is None:
            return False
        return self._learned(call, key, text)

    def _learned(self, call: _Call, key: str, text: str) -> bool:
        if call.outcome is not Outcome.NONE:
            return True
        if key == "name":
            name = json.loads(text)
            if not isinstance(name, str) or not self.knows(name):
                return False
            call.name = name
        elif key in _ARGUMENTS:
            call.early_arguments = _object_text(text)
            if call.early_arguments is None:
                return False
        if call.name is not None and call.early_arguments is not None:
            self._give(call, call.early_arguments)
        return True

    def _give(self, call: _Call, arguments: str) -> None:
        assert call.name is not None
        self._begin(call.name)
        self.events += [CallArguments(arguments), CallEnded()]
        call.outcome = Outcome.WHOLE

    def _begin(self, name: str) -> None:
        self.num_begun += 1
        self.events.append(CallBegun(name))


def _object_text(text: str) -> str | None:
    """Arguments as the text of a JSON object: they may be one, or be it as a text in quotes, or be null."""
    value: Any = json.loads(text)
    if isinstance(value, str):
        text = value
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError):
            return None
        text = text or "{}"
    if value is None:
        return "{}"
    return text.strip() if isinstance(value, dict) else None
