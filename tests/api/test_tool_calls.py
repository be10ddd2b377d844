"""Tools and reasoning as clients use them; the scripted core's vocabulary has no token for tags. Rows T1-T5."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from trimaran.tests.api.conftest import Served, serving
from trimaran.tests.pure import vocabularies

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }} <tool_call></tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}{{'<|im_start|>' + message.role + '\n' + message.content}}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = 'Paris </tool_call> "x" 🙂'
CALL = "<tool_call>\n" + json.dumps({"name": "get_weather", "arguments": {"city": CITY}}) + "\n</tool_call>"


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = vocabularies.byte_level_chatml(tmp_path_factory.mktemp("tools"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    with serving(directory) as served:
        yield served


def chat(served: Served, **fields: Any) -> Any:
    body = {"messages": ASK, "tools": [WEATHER], **fields}
    answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(served: Served, **fields: Any) -> dict[str, Any]:
    """A stream put together in the shape of a plain answer's choices, and its usage."""
    body = {"messages": ASK, "tools": [WEATHER], **fields, "stream": True, "stream_options": {"include_usage": True}}
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    with served.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for part in event["choices"]:
                choice = choices.setdefault(
                    part["index"], {"content": "", "reasoning": "", "calls": [], "finish": None, "tokens": []}
                )
                assert choice["finish"] is None, "S3: something follows the finish reason"
                delta = part["delta"]
                choice["content"] += delta.get("content") or ""
                choice["reasoning"] += delta.get("reasoning_content") or ""
                choice["tokens"] += [entry["token"] for entry in (part["logprobs"] or {}).get("content", [])]
                for call in delta.get("tool_calls", []):
                    if "id" in call:
                        assert call["index"] == len(choice["calls"])
                        choice["calls"].append([call["function"]["name"], ""])
                        assert re.fullmatch("call_[0-9a-f]{24}", call["id"])
                    choice["calls"][call["index"]][1] += call["function"]["arguments"]
                choice["finish"] = part["finish_reason"]
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def in_stream_shape(answer: Any) -> dict[str, Any]:
    choices = []
    for choice in answer["choices"]:
        message = choice["message"]
        calls = message.get("tool_calls", [])
        choices.append(
            {
                "content": message["content"] or "",
                "reasoning": message.get("reasoning_content", ""),
                "calls": [[call["function"]["name"], call["function"]["arguments"]] for call in calls],
                "finish": choice["finish_reason"],
                "tokens": [entry["token"] for entry in (choice["logprobs"] or {}).get("content", [])],
            }
        )
    return {"choices": choices, "usage": answer["usage"]}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stop", [None, "weather is"])
@pytest.mark.parametrize("logprobs", [None, True])
@pytest.mark.parametrize("grammar", [None, {"type": "json_object"}], ids=["free", "grammar"])
@pytest.mark.parametrize("tools", [[], [WEATHER]], ids=["no tools", "tools"])
@pytest.mark.parametrize("says", ["<think>\nHm.\n</think>\n\nThe weather is fine.", f"Let me see.\n{CALL}"])
def test_streamed_and_plain_answers_agree(
    tooled: Served, n: int, stop: str | None, logprobs: bool | None, grammar: Any, tools: list[Any], says: str
) -> None:
    """Rows S2, S3, S5, S6, T1: the matrix."""
    tooled.says(says)
    fields = {"n": n, "stop": stop, "logprobs": logprobs, "tools": tools, "response_format": grammar}
    plain = in_stream_shape(chat(tooled, **fields))
    assert streamed(tooled, **fields) == plain
    assert len(plain["choices"]) == n
    assert (tooled.core.submits[-1].grammar is not None) == (grammar is not None)
    called = bool(tools) and "tool_call" in says
    assert all(choice["finish"] == ("tool_calls" if called else "stop") for choice in plain["choices"])
    assert all(bool(choice["calls"]) == called for choice in plain["choices"])
    assert all(bool(choice["tokens"]) == bool(logprobs) for choice in plain["choices"])


def test_t1_a_call_by_the_openai_client(tooled: Served) -> None:
    tooled.says(CALL)
    answer = tooled.openai.chat.completions.create(model=model_name(tooled), messages=ASK, tools=[WEATHER])  # type: ignore[list-item]
    message = answer.choices[0].message
    assert message.content is None and answer.choices[0].finish_reason == "tool_calls"
    [call] = message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": CITY}  # type: ignore[union-attr]
    with tooled.openai.chat.completions.stream(model=model_name(tooled), messages=ASK, tools=[WEATHER]) as stream:  # type: ignore[list-item]
        final = stream.get_final_completion()
    assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == {"city": CITY}  # type: ignore[index]


def model_name(served: Served) -> str:
    return str(served.http.get("/v1/models").json()["data"][0]["id"])


@pytest.mark.parametrize("content", [None, "", [], "missing"])
def test_t3_the_servers_own_message_comes_back(tooled: Served, content: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    message = {"role": "assistant", "content": content, "tool_calls": [call]}
    if content == "missing":
        del message["content"]
    tooled.says("Sunny.")
    chat(tooled, messages=[*ASK, message, {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}])
    prompt = tooled.model.tokenizer.decode(tooled.core.prompts[-1], skip_special_tokens=False)
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>' in prompt


def test_t4_reasoning_is_apart_and_counted(tooled: Served) -> None:
    reasoning = "<think>\nHm, let me think.\n</think>"
    tooled.says(reasoning + "\n\nYes.")
    answer = chat(tooled, tools=None, chat_template_kwargs={"enable_thinking": True})
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert message["reasoning_content"] == message["reasoning"] == "Hm, let me think."
    assert message["content"] == "Yes."
    num_reasoning = len(tooled.model.tokenizer.encode(reasoning, add_special_tokens=False))
    assert abs(usage["completion_tokens_details"]["reasoning_tokens"] - num_reasoning) <= 1
    assert usage["completion_tokens"] > num_reasoning
    cut = chat(
        tooled, tools=None, max_completion_tokens=num_reasoning - 4, chat_template_kwargs={"enable_thinking": True}
    )
    assert cut["choices"][0]["finish_reason"] == "length" and cut["choices"][0]["message"]["content"] is None
    assert cut["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_reasoning - 4


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_demanded_call_is_a_grammar(tooled: Served, choice: Any) -> None:
    tooled.says(CALL)
    assert chat(tooled, tool_choice=choice)["choices"][0]["finish_reason"] == "tool_calls"
    grammar = tooled.core.submits[-1].grammar
    assert grammar is not None and grammar.kind == "tool_calls" and grammar.starts_after == ()
    assert "<tool_call>" in grammar.source and '"required":["city"]' in grammar.source
    assert ('"is_many":true' in grammar.source) == (choice == "required"), "one call of the named tool"


def test_t5_a_schema_holds_after_the_reasoning(tooled: Served) -> None:
    """The thought is free: the grammar waits for the end tag, unless the prompt has closed it already."""
    tooled.says('<think>Free.</think>{"a": 1}')
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    end = tuple(tooled.model.tokenizer.encode("</think>", add_special_tokens=False))
    for thinks, starts_after in ((True, end), (False, ())):
        fields = {"response_format": form, "chat_template_kwargs": {"enable_thinking": thinks}}
        message = chat(tooled, tools=None, **fields)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Free.", '{"a": 1}')
        grammar = tooled.core.submits[-1].grammar
        assert grammar is not None and grammar.starts_after == starts_after
    chat(tooled, **fields)
    grammar = tooled.core.submits[-1].grammar
    assert grammar is not None and '"answer":{"type":"object"}' in grammar.source, "calls, or an answer of the schema"


class Answer(BaseModel):
    """What the client parses."""

    a: int


async def test_the_clients_parse_and_its_async_form(tooled: Served) -> None:
    tooled.says('{"a": 1}')
    name = model_name(tooled)
    parsed = tooled.openai.chat.completions.parse(model=name, messages=ASK, response_format=Answer)
    assert parsed.choices[0].message.parsed == Answer(a=1)
    tooled.says(CALL)
    async with AsyncOpenAI(base_url=tooled.openai.base_url, api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model=name, messages=ASK, tools=[WEATHER])  # type: ignore[list-item]
        assert answer.choices[0].finish_reason == "tool_calls"
        stream = await client.chat.completions.create(model=name, messages=ASK, tools=[WEATHER], stream=True)  # type: ignore[list-item]
        pieces = [chunk.choices[0].delta.tool_calls or [] async for chunk in stream]
    arguments = "".join((call.function and call.function.arguments) or "" for calls in pieces for call in calls)
    assert json.loads(arguments) == {"city": CITY}


def test_schemas_of_tools_have_a_limit(tooled: Served) -> None:
    """Row V6."""
    large = {"type": "object", "properties": {"x" * (1 << 20): {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": large}}
    body = {"messages": ASK, "tools": [tool], "tool_choice": "required"}
    answer = tooled.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools", answer.text


def test_none_and_single_calls(tooled: Served) -> None:
    tooled.says(CALL + CALL)
    shown = chat(tooled, tool_choice="none")["choices"][0]
    assert shown["message"]["content"] == CALL + CALL and shown["finish_reason"] == "stop"
    assert len(chat(tooled)["choices"][0]["message"]["tool_calls"]) == 2
    assert len(chat(tooled, parallel_tool_calls=False)["choices"][0]["message"]["tool_calls"]) == 1


def test_tools_that_cannot_be_honoured_are_refused(tooled: Served, served: Served) -> None:
    for fields in (
        {"tools": [WEATHER, WEATHER]},
        {"tools": None, "tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
    ):
        answer = tooled.http.post("/v1/chat/completions", json={"messages": ASK, "tools": [WEATHER], **fields})
        assert answer.status_code == 400 and answer.json()["error"]["param"], answer.text
    answer = served.http.post("/v1/chat/completions", json={"messages": ASK, "tools": [WEATHER]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
