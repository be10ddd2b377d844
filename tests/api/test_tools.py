"""Tools and reasoning over HTTP, with answers that are scripted. Rows T1-T5, S1-S4, S7."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trimaran.ipc.sampling import CallGrammar, Grammar, ThoughtLimit
from trimaran.tests.api.conftest import Served, eventually, serving
from trimaran.tests.api.test_answers import events
from trimaran.tests.api.test_refusals import check_refused
from trimaran.tests.pure import vocabularies
from trimaran.tests.pure.parsed_answers import HARD, written

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Now.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "write-file", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "no_arguments"}},
]
ASK: dict[str, Any] = {"model": "test-model", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1500}
PARIS = ("get_weather", {"city": "Paris"})


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(vocabularies.byte_level_tools(tmp_path_factory.mktemp("tools"))) as served:
        yield served


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(vocabularies.byte_level_mistral_tools(tmp_path_factory.mktemp("mistral"))) as served:
        yield served


@pytest.fixture(scope="module")
def spelt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its vocabulary has no token for the tags of calls, nor for the end of reasoning: they come in pieces."""
    directory = vocabularies.byte_level_chatml(tmp_path_factory.mktemp("spelt"))
    (directory / "chat_template.jinja").write_text(vocabularies.TOOL_CHATML)
    with serving(directory) as served:
        yield served


def ask(served: Served, **fields: Any) -> dict[str, Any]:
    answer = served.http.post(CHAT, json={**ASK, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def put_together(found: list[Any]) -> tuple[list[dict[str, Any]], Any]:
    """A stream's choices as those of a plain answer, each part checked; and its usage."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in found:
        usage = event.get("usage") or usage
        for part in event["choices"]:
            empty = {"content": "", "reasoning_content": "", "calls": [], "logprobs": [], "token_ids": []}
            empty["finish_reason"] = None
            choice = choices.setdefault(part["index"], empty)
            assert choice["finish_reason"] is None, "something follows the finish reason"
            choice["finish_reason"] = part["finish_reason"]
            choice["logprobs"] += (part["logprobs"] or {"content": []})["content"]
            choice["token_ids"] += part.get("token_ids", ())
            _add_delta(choice, part["delta"])
    return [choices[index] for index in sorted(choices)], usage


def _add_delta(choice: dict[str, Any], delta: dict[str, Any]) -> None:
    choice["content"] += delta.get("content") or ""
    choice["reasoning_content"] += delta.get("reasoning_content") or ""
    for call in delta.get("tool_calls", ()):
        if "id" in call:
            assert call["index"] == len(choice["calls"]) and call["type"] == "function"
            choice["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
        else:
            assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
            assert call["index"] == len(choice["calls"]) - 1
        choice["calls"][-1]["arguments"] += call["function"]["arguments"]


def plain_choices(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "content": choice["message"]["content"] or "",
            "reasoning_content": choice["message"].get("reasoning_content", ""),
            "calls": [{"id": call["id"], **call["function"]} for call in choice["message"].get("tool_calls", ())],
            "logprobs": (choice["logprobs"] or {"content": []})["content"],
            "token_ids": choice.get("token_ids", []),
            "finish_reason": choice["finish_reason"],
        }
        for choice in answer["choices"]
    ]


def without_ids(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ids = [call["id"] for choice in choices for call in choice["calls"]]
    assert len(set(ids)) == len(ids) and all(id.startswith("call_") or len(id) == 9 for id in ids)
    for choice in choices:
        for call in choice["calls"]:
            del call["id"]
    return choices


def both(served: Served, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Choices and usage of a plain answer, which the streamed one equals."""
    plain = ask(served, **fields)
    found = events(served, CHAT, {**ASK, **fields, "stream_options": {"include_usage": True}})
    choices, usage = put_together(found)
    want = without_ids(plain_choices(plain))
    assert without_ids(choices) == want and usage == plain["usage"]
    return want, plain["usage"]


def calls(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(call["name"], json.loads(call["arguments"])) for call in choice["calls"]]


def test_t1_t2_calls(hermes: Served) -> None:
    hard = ("write-file", HARD)
    hermes.says("I look.\n\n" + written("hermes", [PARIS, hard]))
    [choice], _ = both(hermes, tools=TOOLS)
    assert choice["content"] == "I look." and calls(choice) == [PARIS, hard]
    assert choice["finish_reason"] == "tool_calls"


def test_t1_t4_tags_that_come_in_pieces(spelt: Served) -> None:
    hard = ("write-file", HARD)
    spelt.says("<think>\nHm.\n</think>\n\nI look.\n\n" + written("hermes", [PARIS, hard]))
    [choice], usage = both(spelt, tools=TOOLS)
    assert choice["reasoning_content"] == "Hm." and choice["content"] == "I look." and calls(choice) == [PARIS, hard]
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 5


def test_t1_control_tokens_that_are_tags(mistral: Served) -> None:
    hard = ("write-file", {name: value for name, value in HARD.items() if name != "tags"})
    mistral.says(written("mistral", [PARIS, hard]))
    [choice], _ = both(mistral, tools=TOOLS)
    assert calls(choice) == [PARIS, hard] and choice["content"] == ""
    [call] = ask(mistral, tools=TOOLS[:1])["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum(), "Mistral's own templates refuse any other id"


def test_t2_control_tokens_stay_hidden_where_nobody_reads_them(mistral: Served) -> None:
    mistral.says(written("mistral", [PARIS]))
    [choice], _ = both(mistral)
    assert choice["content"] == 'get_weather{"city": "Paris"}'


def test_s1_emoji_in_arguments(hermes: Served) -> None:
    hermes.says(written("hermes", [("write-file", {"🙂": "漢字 👩‍👩‍👧"})]))
    for event in events(hermes, CHAT, {**ASK, "tools": TOOLS}):
        assert "\ufffd" not in json.dumps(event, ensure_ascii=False)
    [choice], _ = both(hermes, tools=TOOLS)
    assert calls(choice) == [("write-file", {"🙂": "漢字 👩‍👩‍👧"})]


def test_malformed_calls_are_text(hermes: Served) -> None:
    for text in ("<tool_call>get_weather(Paris)</tool_call>", written("hermes", [("unknown", {})])):
        hermes.says(text)
        [choice], _ = both(hermes, tools=TOOLS)
        assert (choice["content"], choice["calls"], choice["finish_reason"]) == (text, [], "stop")


def test_a_call_that_breaks_is_text_and_leaves_the_next_its_place(hermes: Served) -> None:
    broken = '<tool_call>{"name": "get_weather", "arguments": {"city": Paris}}</tool_call>'
    hermes.says(broken + written("hermes", [PARIS]))
    [plain] = plain_choices(ask(hermes, tools=TOOLS))
    [streamed], _ = put_together(events(hermes, CHAT, {**ASK, "tools": TOOLS}))
    assert plain["content"] == streamed["content"] == broken
    assert calls(plain) == [PARIS] and [call["arguments"] for call in streamed["calls"][1:]] == ['{"city": "Paris"}']
    assert streamed["calls"][0]["arguments"] == '{"city": ', "out already when it broke"
    assert plain["finish_reason"] == streamed["finish_reason"] == "tool_calls"


def test_without_tools_markup_is_text(hermes: Served) -> None:
    text = written("hermes", [PARIS])
    hermes.says(text)
    for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "auto"}):
        [choice], _ = both(hermes, **fields)
        assert choice["content"] == text and not choice["calls"]
    ask(hermes, tools=TOOLS)
    with_tools = len(hermes.core.prompts[-1])
    ask(hermes, tools=TOOLS, tool_choice="none")
    assert len(hermes.core.prompts[-1]) < with_tools, "tools that may not be called are not in the prompt"


def test_parallel_tool_calls_off_ends_after_the_first(hermes: Served) -> None:
    hermes.says(written("hermes", [PARIS, PARIS]) + " more")
    [choice], usage = both(hermes, tools=TOOLS, parallel_tool_calls=False)
    assert calls(choice) == [PARIS] and choice["finish_reason"] == "tool_calls" and choice["content"] == ""
    assert usage["completion_tokens"] < len(hermes.core.script(hermes.core.submits[0], [], 0)) / 2 + 5
    eventually(lambda: len(hermes.core.finishes) == 2)


def test_s3_a_call_cut_by_length(hermes: Served) -> None:
    hermes.says(written("hermes", [PARIS]))
    whole = ask(hermes, tools=TOOLS)["usage"]["completion_tokens"]
    [choice], _ = both(hermes, tools=TOOLS, max_tokens=whole - 8)
    assert choice["finish_reason"] == "length" and choice["calls"][0]["name"] == "get_weather"
    assert json.dumps(PARIS[1]).startswith(choice["calls"][0]["arguments"])


STOPS = (None, "Rome")
MATRIX = list(itertools.product((1, 3), STOPS, (False, True), (False, True), (False, True)))


@pytest.mark.parametrize(("n", "stop", "logprobs", "tools", "reasons"), MATRIX)
def test_streamed_and_plain_agree(
    hermes: Served, n: int, stop: str | None, logprobs: bool, tools: bool, reasons: bool
) -> None:
    thought = "<think>Hm 🙂.</think>\n\n" if reasons else ""
    hermes.says(f"{thought}So: {written('hermes', [PARIS])} and Rome.")
    fields: dict[str, Any] = {"n": n, "logprobs": logprobs, "stop": stop, "tools": TOOLS if tools else None}
    choices, usage = both(hermes, **fields)
    assert len(choices) == n and usage["completion_tokens"] % n == 0
    for choice in choices:
        assert choice["reasoning_content"] == ("Hm 🙂." if reasons else "")
        assert calls(choice) == ([PARIS] if tools else [])
        said = f"So: {written('hermes', [PARIS])} and Rome." if not tools else "So: and Rome."
        assert choice["content"].split() == (said if stop is None else said.removesuffix(" Rome.")).split()
        assert choice["finish_reason"] == ("tool_calls" if tools else "stop")
        assert bool(choice["logprobs"]) == logprobs
    assert (usage["completion_tokens_details"]["reasoning_tokens"] > 0) == reasons


def test_t4_reasoning(hermes: Served) -> None:
    hermes.says("<think>\nI think.\n</think>\n\nYes.")
    [choice], usage = both(hermes)
    assert (choice["reasoning_content"], choice["content"]) == ("I think.", "Yes.")
    thought = hermes.model.tokenizer.encode("<think>\nI think.\n</think>", add_special_tokens=False)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(thought)
    hidden = ask(hermes, include_reasoning=False)
    assert "reasoning_content" not in hidden["choices"][0]["message"]
    assert hidden["choices"][0]["message"]["content"] == "Yes."
    assert hidden["usage"] == usage


def test_t4_reasoning_that_the_prompt_begins(hermes: Served) -> None:
    hermes.says("I think.\n</think>\n\nYes.")
    [choice], usage = both(hermes, chat_template_kwargs={"enable_thinking": True})
    assert (choice["reasoning_content"], choice["content"]) == ("I think.", "Yes.")
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 3
    hermes.says("Yes.")
    [choice], usage = both(hermes, chat_template_kwargs={"enable_thinking": False})
    assert (choice["reasoning_content"], choice["content"]) == ("", "Yes.")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_t4_a_message_that_is_continued(hermes: Served) -> None:
    hermes.says(" and think.</think>Yes.")
    for begun, thought, said in (("<think>I", "and think.", "Yes."), ("So", "", " and think.</think>Yes.")):
        messages = [*ASK["messages"], {"role": "assistant", "content": begun}]
        [choice], _ = both(hermes, messages=messages, continue_final_message=True, add_generation_prompt=False)
        assert (choice["reasoning_content"], choice["content"]) == (thought, said)


def test_strict_is_not_in_the_prompt(hermes: Served) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    ask(hermes, tools=strict)
    ask(hermes, tools=TOOLS[:1])
    assert hermes.core.prompts[-1] == hermes.core.prompts[-2]


def test_t4_a_limit_inside_reasoning(hermes: Served) -> None:
    hermes.says("<think>\nI think and think and think.\n</think>\n\nYes.")
    for field in ("max_tokens", "max_completion_tokens"):
        fields = {"max_tokens": None, field: 6}
        [choice], usage = both(hermes, **fields)
        assert choice["finish_reason"] == "length" and choice["content"] == ""
        assert "I think and think and think.".startswith(choice["reasoning_content"]) and choice["reasoning_content"]
        assert usage["completion_tokens"] == usage["completion_tokens_details"]["reasoning_tokens"] == 6
        assert ask(hermes, **fields)["choices"][0]["message"]["content"] is None


def test_t4_a_budget_of_reasoning_tokens(hermes: Served, spelt: Served, served: Served) -> None:
    [start], [end] = (hermes.model.tokenizer.encode(tag, add_special_tokens=False) for tag in ("<think>", "</think>"))
    hermes.says("<think>Hm.</think>Yes.")
    for thinks, start_id in ((None, start), (True, None)):
        kwargs = None if thinks is None else {"enable_thinking": thinks}
        ask(hermes, thinking_token_budget=5, chat_template_kwargs=kwargs)
        assert hermes.core.submits[-1].sampling.thought == ThoughtLimit(max_tokens=5, end_id=end, start_id=start_id)
    for nothing in ({}, {"thinking_token_budget": 5, "chat_template_kwargs": {"enable_thinking": False}}):
        ask(hermes, **nothing)
        assert hermes.core.submits[-1].sampling.thought is None
    for other, wrong in ((hermes, -1), (spelt, 5), (served, 5)):
        check_refused(other.http.post(CHAT, json={**ASK, "thinking_token_budget": wrong}), "thinking_token_budget")
    completion = {"prompt": "x", "thinking_token_budget": 5}
    check_refused(hermes.http.post("/v1/completions", json=completion), "thinking_token_budget")


HISTORIES: tuple[Any, ...] = (None, "", [], ...)


@pytest.mark.parametrize("content", HISTORIES)
def test_t3_the_servers_own_message_comes_back(hermes: Served, content: Any) -> None:
    hermes.says("<think>Hm.</think>" + written("hermes", [("write-file", {"a": [1, "ü"]})]))
    message = ask(hermes, tools=TOOLS)["choices"][0]["message"]
    del message["content"]
    if content is not ...:
        message["content"] = content
    told = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "done"}
    hermes.says("Yes.")
    answer = ask(hermes, tools=TOOLS, messages=[*ASK["messages"], message, told])
    assert answer["choices"][0]["message"]["content"] == "Yes."
    prompt = hermes.model.tokenizer.decode(hermes.core.prompts[-1], skip_special_tokens=False)
    assert '<tool_call>write-file {"a": [1, "ü"]}</tool_call><|im_end|>\n<|im_start|>tool\ndone<|im_end|>' in prompt


def test_t3_arguments_in_templates_that_print_them(mistral: Served) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":\n "ü"}'}}
    ask(mistral, messages=[*ASK["messages"], {"role": "assistant", "tool_calls": [call]}])
    prompt = mistral.model.tokenizer.decode(mistral.core.prompts[-1], skip_special_tokens=False)
    assert prompt.endswith('[TOOL_CALLS]f[ARGS]{"a": "ü"}')


@pytest.mark.user_pain("T8")
@pytest.mark.parametrize("kind", ["array", ["object", "null"], None])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_t8_arguments_that_are_no_object_are_refused(hermes: Served, kind: Any, choice: str) -> None:
    """No parser takes such a call, so the model would be held to what comes out as text."""
    tools = [TOOLS[0], {"type": "function", "function": {"name": "list", "parameters": {"type": kind}}}]
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice}
    error = check_refused(hermes.http.post("/v1/chat/completions", json=asked), "tools[1].function.parameters")
    assert "wrap it" in error["message"]


def test_tools_and_documents_are_in_the_prompt(hermes: Served) -> None:
    documents = [{"title": "A", "text": "b <|im_end|>"}]
    ask(hermes, tools=TOOLS, documents=documents)
    prompt = hermes.model.tokenizer.decode(hermes.core.prompts[-1], skip_special_tokens=False)
    assert '"parameters": {"type": "object", "properties": {"city"' in prompt and "A: b " in prompt
    body = {"messages": ASK["messages"], "tools": TOOLS, "documents": documents}
    assert hermes.http.post("/tokenize", json=body).json()["tokens"] == hermes.core.prompts[-1]
    end = hermes.model.tokenizer.control_texts["<|im_end|>"]
    assert hermes.core.prompts[-1].count(end) == 2, "a control token in a document is text"


def grammar_of(served: Served, **fields: Any) -> Grammar | None:
    ask(served, **fields)
    return served.core.submits[-1].grammar


def call_grammar(served: Served, **fields: Any) -> CallGrammar:
    grammar = grammar_of(served, **fields)
    assert grammar is not None and grammar.kind == "tool_calls"
    return msgspec.json.decode(grammar.source, type=CallGrammar)


def test_tool_choice_by_grammar(hermes: Served, mistral: Served) -> None:
    hermes.says(written("hermes", [PARIS]))
    assert grammar_of(hermes, tools=TOOLS) is grammar_of(hermes, tools=TOOLS, tool_choice="auto") is None
    required = call_grammar(hermes, tools=TOOLS, tool_choice="required")
    assert [call[0] for call in required.calls] == [
        [f'<tool_call>\n{{"name": "{tool["function"]["name"]}", "arguments": '] for tool in TOOLS
    ]
    assert required.calls[0][1] == WEATHER and required.calls[2][1]["additionalProperties"] is False
    assert required.is_many and not required.is_optional
    named = {"type": "function", "function": {"name": "get_weather"}}
    one = call_grammar(hermes, tools=TOOLS, tool_choice=named)
    assert len(one.calls) == 1 and not one.is_many
    assert not call_grammar(hermes, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).is_many
    controls = mistral.model.tokenizer.control_texts
    assert call_grammar(mistral, tools=TOOLS, tool_choice="required").calls[0][0] == [
        controls["[TOOL_CALLS]"],
        "get_weather",
        controls["[ARGS]"],
    ]
    [choice], _ = both(hermes, tools=TOOLS, tool_choice=named)
    assert calls(choice) == [PARIS] and choice["finish_reason"] == "tool_calls"


def test_strict_tools_that_need_not_be_called(hermes: Served) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, *TOOLS[1:]]
    grammar = call_grammar(hermes, tools=strict)
    assert grammar.is_optional and grammar.mark == "<tool_call>" and grammar.calls[0][1] == WEATHER


def test_t5_grammars_start_behind_reasoning(hermes: Served) -> None:
    [start], [end] = (hermes.model.tokenizer.encode(tag, add_special_tokens=False) for tag in ("<think>", "</think>"))
    for fields in ({"response_format": {"type": "json_object"}}, {"tools": TOOLS, "tool_choice": "required"}):
        free = grammar_of(hermes, **fields)
        begun = grammar_of(hermes, **fields, chat_template_kwargs={"enable_thinking": True})
        over = grammar_of(hermes, **fields, chat_template_kwargs={"enable_thinking": False})
        assert free is not None and (free.starts_after, free.opened_by) == ((end,), start)
        assert begun is not None and (begun.starts_after, begun.opened_by) == ((end,), None)
        assert over is not None and (over.starts_after, over.opened_by) == ((), None)


def test_t5_the_end_of_reasoning_may_be_several_tokens(spelt: Served) -> None:
    end = tuple(spelt.model.tokenizer.encode("</think>", add_special_tokens=False))
    spelt.says('<think>Free.</think>{"a": 1}')
    grammar = grammar_of(spelt, response_format={"type": "json_object"})
    assert len(end) > 1 and grammar is not None and grammar.starts_after == end


def test_v6_schemas_of_tools_have_a_limit(hermes: Served) -> None:
    large = {"type": "object", "properties": {"x" * (1 << 20): {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": large}}]
    check_refused(hermes.http.post(CHAT, json={**ASK, "tools": tools, "tool_choice": "required"}), "tools")


def test_a_schema_or_a_call(hermes: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": WEATHER}}
    assert call_grammar(hermes, tools=TOOLS, response_format=form).answer == WEATHER
    check_refused(hermes.http.post(CHAT, json={**ASK, "tools": TOOLS, "guided_regex": "a"}), "guided_regex")


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": "x"}, "tools"),
    (
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format: not together",
    ),
)


@pytest.mark.parametrize(("fields", "field"), WRONG)
def test_wrong_tools(hermes: Served, fields: dict[str, Any], field: str) -> None:
    check_refused(hermes.http.post(CHAT, json={**ASK, **fields}), None)
    assert field in hermes.http.post(CHAT, json={**ASK, **fields}).json()["error"]["message"]


def test_models_without_tools(served: Served) -> None:
    for field, value in (("tools", TOOLS), ("documents", [{"text": "x"}])):
        check_refused(served.http.post(CHAT, json={**ASK, field: value}), field)
    assert served.http.post(CHAT, json={**ASK, "tools": TOOLS, "tool_choice": "none"}).status_code == 200


def test_the_operator_chooses(model_directory: Path) -> None:
    with serving(model_directory, tool_parser="plain_json", reasoning_parser="think") as served:
        served.says('<think>a</think>{"name": "get_weather", "arguments": {"city": "Paris"}}')
        [choice], _ = both(served, tools=TOOLS)
        assert calls(choice) == [PARIS] and choice["reasoning_content"] == "a"


def test_the_operator_chooses_none(tmp_path: Path) -> None:
    with serving(vocabularies.byte_level_tools(tmp_path), tool_parser="none", reasoning_parser="none") as served:
        served.says("<think>a</think>b")
        [choice], usage = both(served)
        assert choice["content"] == "<think>a</think>b" and "completion_tokens_details" not in usage
        check_refused(served.http.post(CHAT, json={**ASK, "tools": TOOLS}), "tools")


@pytest.fixture(autouse=True)
def as_new(hermes: Served, mistral: Served) -> None:
    for served in (hermes, mistral):
        for log in (served.core.submits, served.core.prompts, served.core.finishes):
            log.clear()
