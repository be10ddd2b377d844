"""The grammar of tool calls: what it writes is what the parsers read. Rows T1, T5, T8."""

import json
from typing import Any

import msgspec
import pytest

from trimaran.engine_core.constraint import GrammarWalk
from trimaran.engine_core.grammar_text import grammar_text
from trimaran.frontend.client.refusals import RequestRefused
from trimaran.frontend.client.tool_use import tool_use
from trimaran.frontend.http.schema.chat import ChatRequest
from trimaran.frontend.parsing.choosing import Parsers
from trimaran.frontend.parsing.tool_formats import TOOL_FORMATS
from trimaran.ipc.configuration import RequestLimits
from trimaran.ipc.sampling import CallGrammar
from trimaran.tests.pure.constrained import CONTROL, made
from trimaran.tests.pure.parsed_answers import HARD
from trimaran.tests.pure.test_constraints import accepts, allowed, sampling, spelled
from trimaran.tests.pure.test_parsing import calls_of, content_of, of_tools

TEMPLATES = {
    "hermes": ["<tool_call>"],
    "llama3_json": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][ARGS]"],
    "deepseek": ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>```json"],
    "plain_json": ["tools"],
}
FORMS = [(form, template) for form, templates in TEMPLATES.items() for template in templates]
LIMITS = RequestLimits()
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def asked(template: str, parameters: Any = CITY, controls: dict[str, int] | None = None, **fields: Any) -> CallGrammar:
    functions = [{"name": "get_weather", "parameters": parameters}, {"name": "write-file", "parameters": {}}]
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"strict": True, **function}} for function in functions],
        **fields,
    }
    request = msgspec.convert(body, ChatRequest)
    constraint = tool_use(
        request.tool_wishes(), request.constraint(LIMITS), Parsers.chosen(template, controls or {}), LIMITS
    ).constraint
    assert constraint is not None and constraint.grammar.kind == "tool_calls"
    return msgspec.json.decode(constraint.grammar.source, type=CallGrammar)


def compiled(grammar: CallGrammar) -> Any:
    return made("tool_calls", msgspec.json.encode(grammar).decode())


def joined(pieces: list[str | int]) -> str:
    assert all(isinstance(piece, str) for piece in pieces)
    return "".join(map(str, pieces))


def written(grammar: CallGrammar, *arguments: tuple[int, Any]) -> str:
    """Calls of the tools with these numbers, as the grammar spells them."""
    texts = []
    for number, value in arguments:
        before, _, after = grammar.calls[number]
        texts.append(joined(before) + json.dumps(value, ensure_ascii=False) + joined(after))
    return joined(grammar.begin) + joined(grammar.separator).join(texts) + joined(grammar.end)


@pytest.mark.parametrize(("form", "template"), FORMS)
def test_t1_what_the_grammar_writes_the_parser_reads(form: str, template: str) -> None:
    grammar = asked(template, tool_choice="required")
    whole = compiled(grammar)
    text = written(grammar, (0, {"city": "Paris"}), (1, HARD))
    assert accepts(whole, text)
    events = of_tools(form, list(text))
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(events)] == [
        ("get_weather", {"city": "Paris"}),
        ("write-file", HARD),
    ]
    assert content_of(events) == ""
    for wrong in (written(grammar, (0, {"town": "x"})), written(grammar, (0, [])), "Hello", text + "x"):
        assert not accepts(whole, wrong)
    one = compiled(asked(template, tool_choice="required", parallel_tool_calls=False))
    assert accepts(one, written(grammar, (1, {}))) and not accepts(one, text)


@pytest.mark.parametrize(("form", "template"), [form for form in FORMS if TOOL_FORMATS[form[0]].openers])
def test_strict_tools_in_an_answer_of_any_text(form: str, template: str) -> None:
    if form == "llama3_json":
        with pytest.raises(ValueError, match="no tag of their own"):
            compiled(asked(template))
        return
    grammar = asked(template)
    whole = compiled(grammar)
    text = written(grammar, (0, {"city": "x"}))
    for good in ("", "Hello <tool 🙂", text, f"I look. {text}", f"{text} and {text} done"):
        assert accepts(whole, good), good
    assert not accepts(whole, "I look. " + written(grammar, (0, {"town": "x"})))


def test_tags_that_are_control_tokens() -> None:
    grammar = asked("[TOOL_CALLS]", controls={"[TOOL_CALLS]": CONTROL}, tool_choice="required")
    walk = GrammarWalk(compiled(grammar), sampling())
    assert allowed(walk) == {CONTROL}
    walk.advance([CONTROL, *spelled('[{"name": "get_weather", "arguments": {"city": "x"}}')])
    assert allowed(walk) == {ord("]"), ord(",")}


def test_a_schema_or_calls() -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
    grammar = asked("<tool_call>", response_format=form)
    whole = compiled(grammar)
    assert accepts(whole, "12") and accepts(whole, written(grammar, (0, {"city": "x"})))
    assert not accepts(whole, "Hello")


def test_t8_schemas_that_cannot_be_kept_to() -> None:
    for parameters in ({"properties": {"a": {"$ref": "http://elsewhere"}}}, {"not": {"required": ["a"]}}):
        grammar = asked("<tool_call>", parameters, tool_choice="required")
        with pytest.raises((ValueError, AssertionError), match=r"http://elsewhere|not"):
            compiled(grammar)
    with pytest.raises(RequestRefused, match="strict"):
        asked("tools")
    with pytest.raises(RequestRefused, match="limit"):
        asked("<tool_call>", {"description": "x" * (1 << 20)}, tool_choice="required")


def test_references_inside_a_tools_schema() -> None:
    parameters = {
        "properties": {"a": {"$ref": "#/$defs/b"}},
        "$defs": {"b": {"const": 7}},
        "additionalProperties": False,
    }
    grammar = asked("<tool_call>", parameters, tool_choice="required")
    whole = compiled(grammar)
    assert accepts(whole, written(grammar, (0, {"a": 7}))) and not accepts(whole, written(grammar, (0, {"a": 8})))


def test_t5_a_free_part_only_where_the_output_begins_with_its_tag() -> None:
    tag, mark = CONTROL, (10,)
    bound = GrammarWalk(made("choice", ["yes"]), sampling(), mark, tag)
    plain = allowed(GrammarWalk(made("choice", ["yes"]), sampling()))
    assert allowed(bound) == plain | {tag}
    bound.advance(spelled("y"))
    assert allowed(bound) == {ord("e")}
    free = GrammarWalk(made("choice", ["yes"]), sampling(), mark, tag)
    free.advance([tag, *spelled("th")])
    assert len(allowed(free)) > 200
    free.advance([10])
    assert allowed(free) == plain


def test_the_kind_is_known() -> None:
    assert "call_0" in grammar_text(
        "tool_calls", msgspec.json.encode(asked("<tool_call>", tool_choice="required")).decode()
    )
