"""Tool calls and reasoning out of text: every family, every chunking. Rows T1, T2, T4."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.frontend.parsing.output_parser import OutputParser, Parsers, detected
from trimaran.frontend.parsing.scanner import Arguments, CallBegan, CallBroken, CallEnded, Event, Reasoning, Text

NAMES = frozenset(("get_weather", "search"))
HARD = {
    "text": 'a </tool_call> <tool_call> "quoted" \\ {brace} [x] ; [TOOL_CALLS] <｜tool▁call▁end｜> ``` 🙂',
    "empty": "",
    "none": None,
    "list": [],
    "object": {},
    "number": -1.5e3,
}
ARGUMENTS = json.dumps(HARD, ensure_ascii=False)
WEATHER, SEARCH = ("get_weather", HARD), ("search", {})
A = '{"name": "get_weather", "arguments": ' + ARGUMENTS + "}"
B = '{"name": "search", "arguments": {}}'
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
FENCED = f"function{SEP}get_weather\n```json\n{ARGUMENTS}\n```"

# family, what the model wrote, its text, its calls
RECORDED: list[tuple[str, str, str, list[Any]]] = [
    ("hermes", f"<tool_call>\n{A}\n</tool_call>", "", [WEATHER]),
    (
        "hermes",
        f"Let me see.\n<tool_call>\n{A}\n</tool_call>\n<tool_call>{B}</tool_call>\n",
        "Let me see.",
        [WEATHER, SEARCH],
    ),
    ("hermes", f"<tool_call>{B}", "", [SEARCH]),
    ("hermes", '<tool_call>{"arguments": {}, "name": "search"}</tool_call>', "", [SEARCH]),
    ("hermes", '<tool_call>{"name": "search"}</tool_call>', "", [SEARCH]),
    ("hermes", '<tool_call>{"name": "search", "arguments": "{\\"q\\": 1}"}</tool_call>', "", [("search", {"q": 1})]),
    (
        "hermes",
        '<tool_call>{"name": "search", "arguments": {"q": "a\nb"}}</tool_call>',
        "",
        [("search", {"q": "a\nb"})],
    ),
    ("hermes", "no call < here <tool", "no call < here <tool", []),
    ("llama3_json", '{"name": "search", "parameters": {}}', "", [SEARCH]),
    ("llama3_json", "<|python_tag|>" + A.replace("arguments", "parameters") + "; " + B, "", [WEATHER, SEARCH]),
    ("llama3_json", '{"answer": 5} is JSON', '{"answer": 5} is JSON', []),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama3_json", "  plain text {}", "  plain text {}", []),
    ("mistral", f"[TOOL_CALLS] [{A}, {B}]", "", [WEATHER, SEARCH]),
    ("mistral", f"Now.[TOOL_CALLS]get_weather{ARGUMENTS}[TOOL_CALLS]search{{}}", "Now.", [WEATHER, SEARCH]),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{ARGUMENTS}", "", [WEATHER]),
    ("mistral", "[TOOL_CALLS]search[ARGS]{}", "", [SEARCH]),
    (
        "deepseek",
        f"Wait.{ALL}{BEGIN}{FENCED}{END}\n{BEGIN}function{SEP}search\n```json\n{{}}\n```{END}{ALL_END}",
        "Wait.",
        [WEATHER, SEARCH],
    ),
    (
        "deepseek",
        f"{ALL}{BEGIN}get_weather{SEP}{ARGUMENTS}{END}{BEGIN}search{SEP}{{}}{END}{ALL_END}",
        "",
        [WEATHER, SEARCH],
    ),
    ("plain_json", f"[{A}, {B}]", "", [WEATHER, SEARCH]),
    ("plain_json", B, "", [SEARCH]),
    ("plain_json", "[1, 2]", "[1, 2]", []),
]
MALFORMED = [
    ("hermes", "x <tool_call>not json</tool_call> y"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "search", "arguments": {"a": }}</tool_call>'),
    ("hermes", '<tool_call>{"name": "search", "arguments": [1]}</tool_call>'),
    ("mistral", "[TOOL_CALLS]unknown{}"),
    ("deepseek", f"{ALL}{BEGIN}search{END}"),
    ("llama3_json", '{"name": "search", "parameters": {"a" 1}}'),
]


def folded(events: list[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, text, calls."""
    reasoning, text, calls = "", "", []
    for event in events:
        match event:
            case Text():
                text += event.text
            case Reasoning():
                reasoning += event.text
            case CallBegan():
                calls.append((event.name, ""))
            case Arguments():
                calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
            case CallBroken():
                calls.pop()
            case CallEnded():
                json.loads(calls[-1][1])
    return reasoning, text, calls


def parsed(parsers: Parsers, pieces: list[str], prompt_end: str = "", was_cut: bool = False) -> Any:
    parser = OutputParser(parsers, NAMES, prompt_end=prompt_end)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return folded([*events, *parser.finish(was_cut=was_cut)])


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize(("family", "output", "text", "calls"), RECORDED)
@pytest.mark.parametrize("size", [1, 3, 7, 10**6])
def test_t1_recorded_outputs_in_every_chunking(
    family: str, output: str, text: str, calls: list[Any], size: int
) -> None:
    reasoning, shown, found = parsed(Parsers(family), cut(output, size))
    assert (reasoning, shown) == ("", text)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.parametrize(("family", "output"), MALFORMED)
@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_t2_what_is_no_call_is_given_as_text(family: str, output: str, size: int) -> None:
    _, text, calls = parsed(Parsers(family), cut(output, size))
    assert calls == []
    assert "".join(text.split()) == "".join(output.split())


def test_a_call_that_a_limit_cuts_stays_as_far_as_it_came() -> None:
    output = '<tool_call>{"name": "search", "arguments": {"q": "ab'
    assert parsed(Parsers("hermes"), cut(output, 2), was_cut=True) == ("", "", [("search", '{"q": "ab')])
    assert parsed(Parsers("hermes"), cut(output, 2)) == ("", output, [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NASTY = st.sampled_from(
    ["</tool_call>", "<tool_call>", '"', "\\", "{", "}", "[TOOL_CALLS]", END, "```", "🙂", "", ";", "</think>"]
)
OBJECTS = st.dictionaries(st.text(max_size=4) | NASTY, JSON | st.lists(NASTY).map("".join), max_size=4)
WRITTEN = {
    "hermes": "a\n<tool_call>\n{call}\n</tool_call>",
    "llama3_json": "{call}",
    "mistral": "a[TOOL_CALLS][{call}]",
    "plain_json": "[{call}]",
    "deepseek": f"a{ALL}{BEGIN}search{SEP}{{arguments}}{END}{ALL_END}",
}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(WRITTEN)), OBJECTS, st.booleans(), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_t1_anything_inside_arguments(family: str, value: Any, is_ascii: bool, sizes: list[int]) -> None:
    arguments = json.dumps(value, ensure_ascii=is_ascii)
    call = '{"name": "search", "arguments": ' + arguments + "}"
    output = WRITTEN[family].replace("{call}", call).replace("{arguments}", arguments)
    pieces, at = [], 0
    while at < len(output):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(output[at : at + size])
        at += size
    _, text, calls = parsed(Parsers(family), pieces)
    assert text == ("a" if output.startswith("a") else "")
    assert [(name, json.loads(found)) for name, found in calls] == [("search", value)]


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize(
    ("output", "prompt_end", "reasoning", "text"),
    [
        ("<think>\nSo <b>.\n</think>\n\nYes.", "", "So <b>.", "Yes."),
        ("So.</think>Yes.", "assistant\n<think>\n", "So.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", "", "", "Yes."),
        ("So it goes </thin", "<think>", "So it goes </thin", ""),
        ("Yes. <think>no", "", "", "Yes. <think>no"),
        ("  Yes.", "<think>\n\n</think>\n\n", "", "  Yes."),
    ],
)
def test_t4_reasoning(output: str, prompt_end: str, reasoning: str, text: str, size: int) -> None:
    assert parsed(Parsers("hermes", "think"), cut(output, size), prompt_end) == (reasoning, text, [])


def test_the_template_tells_the_parsers() -> None:
    assert detected("{% if tools %}<tool_call>{% endif %}</think>") == Parsers("hermes", "think")
    assert detected("{{ tools }}[TOOL_CALLS]") == Parsers("mistral", None)
    assert detected("{{ tools }}<｜tool▁calls▁begin｜><tool_call>") == Parsers("deepseek", None)
    assert detected("{{ tools }}<|start_header_id|>") == Parsers("llama3_json", None)
    assert detected("{{ tools }}") == Parsers("plain_json", None)
    assert detected("{{ messages }}") == Parsers(None, None)
