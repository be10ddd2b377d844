"""The grammars of demanded calls, as llguidance reads them: what they allow is what the parsers read. Row T1."""

import json

import llguidance
import pytest
from llguidance import LLMatcher, LLTokenizer

from trimaran.frontend.parsing.call_grammars import FORMS, calls_grammar, without_first

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"], "additionalProperties": False}
ARGUMENTS = '{"q": "a </tool_call> \\\\" 🙂"}'.replace('\\\\"', '\\"')
TOKENIZER = LLTokenizer("byte")


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written(form: str, num_calls: int) -> str:
    parts = FORMS[form]
    call = "".join((*parts.before, "search", *parts.between, ARGUMENTS, *parts.after))
    return "".join(parts.begin) + "".join(parts.comma).join([call] * num_calls) + "".join(parts.end)


@pytest.mark.parametrize("form", FORMS)
def test_calls_of_the_tool_and_nothing_else(form: str) -> None:
    assert llguidance.__version__
    many = calls_grammar(FORMS[form], [("search", SCHEMA)], json.dumps, is_single=False)
    single = calls_grammar(FORMS[form], [("search", SCHEMA)], json.dumps, is_single=True)
    assert accepts(many, written(form, 1)) and accepts(many, written(form, 2)) and accepts(single, written(form, 1))
    assert not accepts(single, written(form, 2))
    assert not accepts(many, written(form, 1).replace("search", "other"))
    assert not accepts(many, written(form, 1).replace('"q"', '"z"'))
    assert not accepts(many, "Hello.")


@pytest.mark.parametrize("form", ["hermes", "mistral", "mistral with ARGS", "deepseek", "deepseek fenced"])
def test_what_follows_the_first_marker(form: str) -> None:
    first = (FORMS[form].begin or FORMS[form].before)[0]
    grammar = calls_grammar(without_first(FORMS[form]), [("search", SCHEMA)], json.dumps, is_single=False)
    assert accepts(grammar, written(form, 2).removeprefix(first))
    assert not accepts(grammar, written(form, 2))


def test_an_answer_instead_of_calls() -> None:
    grammar = calls_grammar(
        FORMS["hermes"], [("search", SCHEMA)], json.dumps, is_single=False, answer_schema='{"type": "integer"}'
    )
    assert accepts(grammar, "5") and accepts(grammar, written("hermes", 1)) and not accepts(grammar, "no")
