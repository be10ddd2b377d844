"""The grammar of tool calls, in llguidance's Lark."""

import json
from typing import Any

from ..ipc.sampling import CallGrammar
from .schema_rules import closed

_OWN_OPTIONS = "x-guidance"


def calls_lark(grammar: CallGrammar, rules: dict[str, Any]) -> str:
    """`rules`: llguidance's options for JSON. Raises ValueError with what is wrong."""
    lines = []
    for index, (before, schema, after) in enumerate(grammar.calls):
        lines.append(f"arguments_{index}: %json {_schema_text(schema, rules)}")
        lines.append(f"tail_{index}: arguments_{index} {_pieces(after)}")
        lines.append(f"call_{index}: {_pieces(before)} tail_{index}")
    calls = " | ".join(f"call_{index}" for index in range(len(grammar.calls)))
    more = f"({_pieces(grammar.separator)} call)*" if grammar.is_many else '""'
    lines += [f"call: {calls}", f"rest: {more} {_pieces(grammar.end)}"]
    if grammar.is_optional:
        lines += _optional(grammar)
    elif grammar.answer is not None:
        answer = f"answer: %json {_schema_text(grammar.answer, rules)}"
        lines += [f"start: {_pieces(grammar.begin)} call rest | answer", answer]
    else:
        lines.append(f"start: {_pieces(grammar.begin)} call rest")
    return "\n".join(lines)


def _optional(grammar: CallGrammar) -> list[str]:
    """Text up to the mark of calls, whereupon they must go on as calls do. Raises ValueError."""
    mark, rests = grammar.mark, []
    for before, _, _ in grammar.calls:
        first, *others = [*grammar.begin, *before]
        if isinstance(mark, str) and mark and isinstance(first, str) and first.startswith(mark):
            rests.append([first[len(mark) :], *others])
        elif isinstance(mark, int) and first == mark:
            rests.append(others)
        else:
            raise ValueError("the calls of this model begin with no tag of their own")
    firsts = " | ".join(f"{_pieces(pieces)} tail_{index}" for index, pieces in enumerate(rests))
    head = f"head: TEXT <[{mark}]>" if isinstance(mark, int) else f"head[lazy]: TEXT {json.dumps(mark)}"
    return [head, f"first: {firsts}", "start: (head first rest)* TEXT", r"TEXT: /(.|\n)*/"]


def _pieces(pieces: list[str | int]) -> str:
    texts = [f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece) for piece in pieces if piece != ""]
    return " ".join(texts) or '""'


def _schema_text(schema: Any, rules: dict[str, Any]) -> str:
    if not isinstance(schema, dict):
        raise ValueError("a schema is an object")
    own = {name: value for name, value in schema.items() if name != _OWN_OPTIONS}
    return json.dumps({**closed(own), _OWN_OPTIONS: rules})
