"""How families of models write tool calls.

A format's `openers` are tags behind which `after` finds calls; `at_start` looks for calls that begin the answer without
any tag. Both leave the place where they found nothing more.
"""

import re
import uuid
from typing import Protocol

from msgspec import Struct

from .call_reader import CallReader, Outcome
from .source import Steps

_NAME = re.compile(r"[\w.-]*", re.ASCII)
_LONGEST_NAME = 256


class CallForm(Struct, frozen=True):
    """How a model is made to write calls: `begin`, calls with `separator` between them, `end`. A call is `before` with
    the name where `NAME` stands, the JSON of the arguments, and `after`.
    """

    before: str
    after: str
    separator: str
    begin: str = ""
    end: str = ""


class ToolFormat(Protocol):
    """One family's way."""

    @property
    def openers(self) -> tuple[str, ...]:
        """Tags behind which calls come."""

    @property
    def tags(self) -> tuple[str, ...]:
        """All that is markup, so that it is never hidden from the parser, even where it is a control token."""

    def call_id(self) -> str:
        """A new call's id, of the kind that the family's templates take."""

    def form(self, template: str) -> CallForm:
        """The way to write that this template shows, where the family has several."""

    def at_start(self, reader: CallReader) -> Steps[None]:
        """Calls without a tag, at the beginning of the answer."""

    def after(self, opener: str, reader: CallReader) -> Steps[None]:
        """Calls behind this tag."""


class _Format:
    """What most have in common."""

    openers: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    def call_id(self) -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    def at_start(self, reader: CallReader) -> Steps[None]:
        return _nothing()

    def after(self, opener: str, reader: CallReader) -> Steps[None]:
        return _nothing()


def _nothing() -> Steps[None]:
    return
    yield


class Hermes(_Format):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one pair of tags a call."""

    openers = ("<tool_call>",)
    closer = "</tool_call>"
    tags = (*openers, closer)

    def form(self, template: str) -> CallForm:
        return CallForm('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n")

    def after(self, opener: str, reader: CallReader) -> Steps[None]:
        outcome = yield from reader.call_object(is_tagged=True)
        if outcome is Outcome.WHOLE:
            reader.owed = [self.closer]


class Llama3Json(_Format):
    """`{"name": ..., "parameters": {...}}` from the first character, or behind `<|python_tag|>`; `;` between calls."""

    openers = ("<|python_tag|>",)
    tags = openers

    def form(self, template: str) -> CallForm:
        return CallForm('{"name": "NAME", "parameters": ', "}", "; ")

    def at_start(self, reader: CallReader) -> Steps[None]:
        return reader.call_row(is_tagged=False)

    def after(self, opener: str, reader: CallReader) -> Steps[None]:
        return reader.call_row(is_tagged=True)


class Mistral(_Format):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    openers = ("[TOOL_CALLS]",)
    tags = (*openers, "[ARGS]", "[CALL_ID]")

    def call_id(self) -> str:
        """Its templates refuse ids of any other length."""
        return uuid.uuid4().hex[:9]

    def form(self, template: str) -> CallForm:
        if "[ARGS]" in template:
            return CallForm("[TOOL_CALLS]NAME[ARGS]", "", "")
        return CallForm('{"name": "NAME", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]")

    def after(self, opener: str, reader: CallReader) -> Steps[None]:
        source = reader.source
        yield from source.skip_space()
        match (yield from source.peek()):
            case "[":
                yield from reader.call_list(is_tagged=True)
            case "{":
                yield from reader.call_row(is_tagged=True)
            case _:
                name = yield from source.take_while(_NAME, _LONGEST_NAME)
                if (yield from source.take("[CALL_ID]")):
                    yield from source.take_while(_NAME, _LONGEST_NAME)
                yield from source.take("[ARGS]")
                yield from source.skip_space()
                yield from reader.arguments(name)


class DeepSeek(_Format):
    """Tags round all calls, round each, and between name and arguments; these alone (V3.1) or in a fence (V3, R1)."""

    _CALLS, _CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
    _SEPARATOR = "<｜tool▁sep｜>"
    _CALL_END, _CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
    openers = (_CALLS, _CALL)
    tags = (*openers, _SEPARATOR, _CALL_END, _CALLS_END)

    def form(self, template: str) -> CallForm:
        if "```json" in template:
            before = f"{self._CALL}function{self._SEPARATOR}NAME\n```json\n"
            return CallForm(before, f"\n```{self._CALL_END}", "\n", self._CALLS, self._CALLS_END)
        return CallForm(f"{self._CALL}NAME{self._SEPARATOR}", self._CALL_END, "", self._CALLS, self._CALLS_END)

    def after(self, opener: str, reader: CallReader) -> Steps[None]:
        source = reader.source
        if opener == self._CALLS:
            yield from source.skip_space()
            if not (yield from source.take(self._CALL)):
                return
        name = yield from source.take_while(_NAME, _LONGEST_NAME)
        if not (yield from source.take(self._SEPARATOR)):
            return
        yield from source.skip_space()
        if (yield from source.peek()) != "{":
            name = yield from source.take_while(_NAME, _LONGEST_NAME)
            yield from source.skip_space()
            yield from source.take_any("```json", "```")
            yield from source.skip_space()
        outcome = yield from reader.arguments(name)
        if outcome is Outcome.WHOLE:
            reader.owed = [self._CALL_END, self._CALLS_END]
            begin = source.at
            yield from source.skip_space()
            if not (yield from source.take("```")):
                source.at = begin


class PlainJson(_Format):
    """`{"name": ..., "arguments": {...}}`, several, or a list of them, from the first character, fenced or not."""

    def form(self, template: str) -> CallForm:
        return CallForm('{"name": "NAME", "arguments": ', "}", "\n")

    def at_start(self, reader: CallReader) -> Steps[None]:
        source = reader.source
        yield from source.skip_space()
        fence = yield from source.take_any("```json", "```")
        yield from source.skip_space()
        if (yield from source.peek()) == "[":
            yield from reader.call_list(is_tagged=False)
        else:
            yield from reader.call_row(is_tagged=False)
        if fence is not None and reader.num_begun:
            reader.owed = ["```"]


TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": Hermes(),
    "llama3_json": Llama3Json(),
    "mistral": Mistral(),
    "deepseek": DeepSeek(),
    "plain_json": PlainJson(),
}
