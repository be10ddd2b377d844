"""From a constraint, as a request gives it, to the grammar that llguidance compiles. Runs in a trial: it may fail."""

import json
from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from ..ipc.sampling import CallGrammar
from .call_grammar import calls_lark
from .schema_rules import ESCAPES, closed

_WHITE_SPACE = r"[ ]|\n[ ]{0,12}"
"""Between the parts of a JSON text: enough to indent, and no more, or a small model writes blanks to its limit."""
_JSON_RULES: dict[str, Any] = {
    "whitespace_pattern": _WHITE_SPACE,
    "json_allowed_escapes": ESCAPES,
    "lenient": False,
    "coerce_one_of": False,
}
_OWN_OPTIONS = "x-guidance"  # by which a schema may switch its own checks off


def grammar_text(kind: str, source: str) -> str:
    """The grammar of one constraint, by the kinds of ipc.sampling.Grammar. Raises ValueError with what is wrong."""
    match kind:
        case "json_schema":
            return _of_schema(source)
        case "json_object":
            return _of_schema('{"type": "object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(source)
        case "choice":
            return _of_choices(source)
        case "lark":
            return LLMatcher.grammar_from_lark(gbnf_to_lark(source) if "::=" in source else source)
        case "tool_calls":
            return LLMatcher.grammar_from_lark(calls_lark(msgspec.json.decode(source, type=CallGrammar), _JSON_RULES))
    raise ValueError(f"there is no constraint of the kind {kind!r}")


def _of_schema(source: str) -> str:
    try:
        schema = json.loads(source)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a schema is an object, or true")
    schema.pop(_OWN_OPTIONS, None)
    return LLMatcher.grammar_from_json_schema(closed(schema), overrides=_JSON_RULES)  # type: ignore[arg-type]


def _of_choices(source: str) -> str:
    choices = json.loads(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("choice is a list of texts with at least one")
    return LLMatcher.grammar_from_lark("start: " + "\n | ".join(map(json.dumps, choices)))
