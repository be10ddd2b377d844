"""Grammars (Lark, as llguidance reads it) of the tool calls that a family's parser reads.

Arguments are held to each tool's JSON schema. Markers that are control tokens are named by id, since their text alone
would be written in other tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

Marker = Callable[[str], str]  # a terminal for a tag
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class Form(Struct, frozen=True):
    """A call is `before` name `between` arguments `after`; calls stand in `begin` ... `end` with `comma` between."""

    begin: tuple[str, ...]
    before: tuple[str, ...]
    between: tuple[str, ...]
    after: tuple[str, ...]
    comma: tuple[str, ...] = ()
    end: tuple[str, ...] = ()


_OBJECT = (('{"name": "',), ('", "arguments": ',), ("}",))
FORMS: Mapping[str, Form] = {
    "hermes": Form((), ("<tool_call>", '\n{"name": "'), ('", "arguments": ',), ("}\n", "</tool_call>"), ("\n",)),
    "llama3_json": Form((), ('{"name": "',), ('", "parameters": ',), ("}",), ("; ",)),
    "plain_json": Form(("[",), *_OBJECT, (", ",), ("]",)),
    "mistral": Form(("[TOOL_CALLS]", " ["), *_OBJECT, (", ",), ("]",)),
    "mistral with ARGS": Form((), ("[TOOL_CALLS]",), ("[ARGS]",), ()),
    "deepseek": Form(("<｜tool▁calls▁begin｜>",), (_BEGIN,), (_SEP,), (_END,), (), ("<｜tool▁calls▁end｜>",)),
    "deepseek fenced": Form(
        ("<｜tool▁calls▁begin｜>",),
        (_BEGIN, "function", _SEP),
        ("\n```json\n",),
        ("\n```", _END),
        ("\n",),
        ("<｜tool▁calls▁end｜>",),
    ),
}


def form_of(family: str, template: str) -> Form:
    """The form that the model's own template shows."""
    if family == "mistral" and "[ARGS]" in template:
        return FORMS["mistral with ARGS"]
    if family == "deepseek" and "```json" in template:
        return FORMS["deepseek fenced"]
    return FORMS[family]


def without_first(form: Form) -> Form:
    """The same after its first marker, which the model has written already."""
    if form.begin:
        return replace(form, begin=form.begin[1:])
    # What begins every call ends the comma between two, so that the first can go without.
    return replace(form, before=form.before[1:], comma=(*form.comma, form.before[0]))


def calls_grammar(
    form: Form,
    tools: Sequence[tuple[str, Mapping[str, Any]]],
    marker: Marker,
    *,
    is_single: bool,
    answer_schema: str | None = None,
) -> str:
    """Calls of these tools (name and schema of its arguments), one where `is_single`; or an answer of this schema."""
    comma = _joined(form.comma, marker)
    more = "" if is_single else f" ({comma} call)*".replace("( ", "(")
    lines = [
        "start: calls" + (" | answer" if answer_schema is not None else ""),
        f"calls: {_joined(form.begin, marker)} call{more} {_joined(form.end, marker)}".rstrip(),
        "call: " + " | ".join(f"tool_{index}" for index in range(len(tools))),
    ]
    for index, (name, schema) in enumerate(tools):
        before, between, after = (_joined(part, marker) for part in (form.before, form.between, form.after))
        lines.append(f"tool_{index}: {before} {json.dumps(name)} {between} arguments_{index} {after}".rstrip())
        lines.append(f"arguments_{index}: %json {json.dumps(schema)}")
    if answer_schema is not None:
        lines.append(f"answer: %json {answer_schema}")
    return "\n".join(lines) + "\n"


def _joined(texts: tuple[str, ...], marker: Marker) -> str:
    return " ".join(marker(text) for text in texts)
