"""Parsers of tool calls and reasoning: the same for every chunking, and nothing is lost. Rows T1, T2, T4."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.frontend.parsing.answer_parser import AnswerParser
from trimaran.frontend.parsing.choosing import reasoning_format_of, tool_format_of
from trimaran.frontend.parsing.events import (
    CallArguments,
    CallBegun,
    CallBroken,
    CallEnded,
    Event,
    Said,
    Thought,
    joined,
)
from trimaran.frontend.parsing.json_scanner import JsonScanner
from trimaran.frontend.parsing.reasoning_parser import REASONING_FORMATS
from trimaran.frontend.parsing.tool_formats import TOOL_FORMATS
from trimaran.tests.pure.parsed_answers import HARD, RECORDED, TOOLS, Call, Recorded, written

TAGS = sorted({tag for form in TOOL_FORMATS.values() for tag in form.tags} | {"<think>", "</think>", "```"})


def chunkings(text: str) -> Iterator[list[str]]:
    """Whole, in pieces of one size, and cut at random; empty pieces among them."""
    yield [text]
    for size in (1, 3, 7):
        yield [text[begin : begin + size] for begin in range(0, len(text), size)]
    generator = random.Random(len(text))
    cuts = sorted(generator.choices(range(len(text) + 1), k=len(text) // 4 + 1))
    yield [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def parsed(parser: AnswerParser, pieces: list[str]) -> list[Event]:
    found: list[Event] = []
    for piece in pieces:
        found += parser.feed(piece)
    return joined([*found, *parser.end()])


def of_tools(form: str, pieces: list[str]) -> list[Event]:
    return parsed(AnswerParser(TOOL_FORMATS[form], TOOLS, None, is_open=False), pieces)


def calls_of(events: list[Event]) -> tuple[Call, ...]:
    found: list[Call] = []
    for event in events:
        match event:
            case CallBegun():
                found.append((event.name, ""))
            case CallArguments():
                found[-1] = (found[-1][0], found[-1][1] + event.text)
            case CallBroken():
                found.pop()
    return tuple(found)


def content_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Said))


def thought_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Thought))


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: f"{recorded.form} {recorded.text[:40]!r}")
def test_t1_t2_recorded_answers_in_every_chunking(recorded: Recorded) -> None:
    for pieces in chunkings(recorded.text):
        events = of_tools(recorded.form, pieces)
        assert calls_of(events) == recorded.calls
        assert content_of(events) == recorded.content
        ended = [event for event in events if isinstance(event, CallEnded)]
        assert len(ended) == sum(_is_json(arguments) for _, arguments in recorded.calls)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


TEXTS = st.lists(st.sampled_from([*TAGS, '"', "\\", "{", "}", "[", "]", ";", "\n", "🙂", "漢", "", "a", " "])).map(
    "".join
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(st.sampled_from(TOOLS), st.dictionaries(TEXTS, VALUES, max_size=3)), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("form", TOOL_FORMATS)
@given(calls=CALLS)
def test_t1_any_arguments(form: str, calls: list[tuple[str, Any]]) -> None:
    text = written(form, calls)
    want = [(name, json.loads(json.dumps(arguments))) for name, arguments in calls]
    for pieces in chunkings(text):
        events = of_tools(form, pieces)
        assert [(name, json.loads(arguments)) for name, arguments in calls_of(events)] == want
        assert content_of(events) == ""


@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("form", TOOL_FORMATS)
@given(
    text=st.lists(TEXTS | st.sampled_from(['{"name": "get_weather", "arguments": {"a":', "get_weather"])).map("".join)
)
def test_t1_any_text_is_read_alike_in_every_chunking(form: str, text: str) -> None:
    want = of_tools(form, [text])
    for pieces in chunkings(text):
        assert of_tools(form, pieces) == want
    if not calls_of(want):
        assert content_of(want) == text, "text without calls is given as it is"


@settings(max_examples=100, deadline=None)
@given(text=TEXTS, is_open=st.booleans())
def test_t4_any_reasoning_is_read_alike_in_every_chunking(text: str, is_open: bool) -> None:
    def read(pieces: list[str]) -> list[Event]:
        form, tags = TOOL_FORMATS["hermes"], REASONING_FORMATS["think"]
        return parsed(AnswerParser(form, TOOLS, tags, is_open=is_open), pieces)

    want = read([text])
    for pieces in chunkings(text):
        assert read(pieces) == want
    if not is_open and not text.lstrip(" \t\n\r").startswith("<think>"):
        assert content_of(want) == text


REASONED = (  # opened in the prompt, text, reasoning, content
    (True, "\nI think.\n</think>\n\nYes.", "I think.", "Yes."),
    (True, "<think>\nI think.</think>Yes.", "I think.", "Yes."),
    (False, "<think>\nI\n\nthink.\n</think>\n\nYes.\n", "I\n\nthink.", "Yes.\n"),
    (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    (True, "</think>Yes.", "", "Yes."),
    (True, "never ends </thin", "never ends </thin", ""),
    (False, "<think>never ends", "never ends", ""),
    (False, "Yes. <think>late</think>", "", "Yes. <think>late</think>"),
    (False, "  <thi", "", "  <thi"),
    (False, "", "", ""),
    (True, "", "", ""),
    (True, "a</think>b</think>c", "a", "b</think>c"),
)


@pytest.mark.parametrize(("is_open", "text", "thought", "content"), REASONED)
@pytest.mark.parametrize("form", REASONING_FORMATS)
def test_t4_reasoning(form: str, is_open: bool, text: str, thought: str, content: str) -> None:
    tags = REASONING_FORMATS[form]

    def own(shown: str) -> str:
        if shown.endswith(("</thin", "<thi")):
            return shown
        return shown.replace("<think>", tags.start).replace("</think>", tags.end)

    for pieces in chunkings(own(text)):
        events = parsed(AnswerParser(None, (), tags, is_open=is_open), pieces)
        assert (thought_of(events), content_of(events)) == (own(thought), own(content))


def test_t2_calls_behind_reasoning_and_none_in_it() -> None:
    call = written("hermes", [("get_weather", HARD)])
    maybe = written("hermes", [("get_weather", {"city": "Paris"})])
    text = f"<think>Maybe {maybe}?</think>\n\nI look.\n{call}"
    for pieces in chunkings(text):
        parser = AnswerParser(TOOL_FORMATS["hermes"], TOOLS, REASONING_FORMATS["think"], is_open=False)
        events = parsed(parser, pieces)
        assert content_of(events) == "I look."
        assert [json.loads(arguments) for _, arguments in calls_of(events)] == [HARD]


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_t1_arguments_come_as_they_are_written(form: str) -> None:
    """Not held back until the call ends: an editor shows a file while it is written."""
    text = written(form, [("write-file", {"content": "line " * 100})])
    parser = AnswerParser(TOOL_FORMATS[form], TOOLS, None, is_open=False)
    sizes = [
        sum(len(event.text) for event in parser.feed(character) if isinstance(event, CallArguments))
        for character in text
    ]
    assert max(sizes) <= 16 and sum(map(bool, sizes)) > 400


BROKEN = (  # the answer, what of it is text, its calls
    ('[TOOL_CALLS]get_weather[ARGS]{"a": x}', None, ()),
    ('[TOOL_CALLS][{"name": "get_weather", "arguments": {"a" 1}}]', None, ()),
    (
        'Yes. [TOOL_CALLS][{"name": "get_weather", "arguments": {}}, {"name": "get_weather", "arguments": {x}}]',
        'Yes., {"name": "get_weather", "arguments": {x}}]',
        (("get_weather", "{}"),),
    ),
    (
        "a [TOOL_CALLS]get_weather[ARGS]{x} [TOOL_CALLS]get_weather[ARGS]{}",
        "a [TOOL_CALLS]get_weather[ARGS]{x}",
        (("get_weather", "{}"),),
    ),
)


@pytest.mark.parametrize(("text", "said", "calls"), BROKEN)
def test_a_call_that_breaks_is_text(text: str, said: str | None, calls: tuple[Call, ...]) -> None:
    for pieces in chunkings(text):
        events = of_tools("mistral", pieces)
        assert (content_of(events), calls_of(events)) == (text if said is None else said, calls)


def test_a_call_that_a_limit_cuts_stays_as_far_as_it_came() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa'
    parser = AnswerParser(TOOL_FORMATS["hermes"], TOOLS, None, is_open=False)
    events = [*parser.feed(text), *parser.end(was_cut=True)]
    assert calls_of(events) == (("get_weather", '{"city": "Pa'),) and content_of(events) == ""


GOOD = ['{"a": [1, -0.5e-3, true, null, "\\u00e9\\n"]}', "[]", '"x"', "{}", '[[{"a":{}}]]']
BAD = ['{"a" 1}', "{a: 1}", "[1,]", '{"a":1,}', "[01 ]", "[NaN ]", '["\\x"]', "]", "{]", "[1 2]", "[" * 200]


@pytest.mark.parametrize("text", GOOD)
def test_whole_json(text: str) -> None:
    scanner = JsonScanner()
    assert scanner.scan(f"{text} rest", 0) == len(text) and scanner.is_done


@pytest.mark.parametrize("text", BAD)
def test_broken_json(text: str) -> None:
    scanner = JsonScanner()
    taken = scanner.scan(text, 0)
    assert scanner.is_broken and not scanner.is_done and taken < len(text)


@settings(max_examples=200, deadline=None)
@given(value=VALUES)
def test_any_json_is_whole_at_its_last_character(value: Any) -> None:
    text = json.dumps([value], ensure_ascii=False)
    scanner, at = JsonScanner(), 0
    for end in range(1, len(text) + 1):
        assert not scanner.is_done
        at = scanner.scan(text[:end], at)
    assert scanner.is_done and at == len(text)


def test_formats_from_templates() -> None:
    assert tool_format_of("{{ '<tool_call>' }}") == "hermes"
    assert tool_format_of("{{ '<｜tool▁calls▁begin｜>' }}") == "deepseek"
    assert tool_format_of("[TOOL_CALLS]") == "mistral"
    assert tool_format_of("{{ '<|python_tag|>' }}") == tool_format_of("Environment: ipython") == "llama3_json"
    assert tool_format_of("{% if tools %}") == "plain_json"
    assert tool_format_of("{{ messages }}") is tool_format_of(None) is None
    assert tool_format_of("<tool_call>\n<function=name>") is None, "another format behind the same tag"
    assert reasoning_format_of("{{ content.split('</think>') }}") == "think"
    assert reasoning_format_of("[THINK][/THINK]") == "mistral"
    assert reasoning_format_of("<think>") is reasoning_format_of(None) is None
