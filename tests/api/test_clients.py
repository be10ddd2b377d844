"""Clients as they are, against `trimaran serve`: openai, langchain-openai and instructor. Rows T1-T5, S1, S3, S4, S6.

The null platform says a call for ever, until its end token; where a grammar holds it, what that allows.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import instructor
import jsonschema_rs
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer

from trimaran.tests.api.test_tools import plain_choices, put_together, without_ids
from trimaran.tests.pure.parsed_answers import HARD, written
from trimaran.tests.pure.vocabularies import TOOL_CHATML
from trimaran.tests.server import Server

CALLS = [("get_weather", {"city": "Paris"}), ("write_file", HARD)]
SAID = f"I look.\n\n{written('hermes', CALLS)}"
ASK: Any = [{"role": "user", "content": "What is the weather?"}]
THOUGHT = "Hm, let me think."


class Weather(BaseModel):
    """The weather now."""

    model_config = ConfigDict(title="get_weather", extra="forbid")
    city: Literal["Paris", "Rome"] = Field(description="where")
    unit: Literal["C", "F"]


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather now.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "write_file", "parameters": {"type": "object"}}},
]
VALID = jsonschema_rs.Draft202012Validator(TOOLS[0]["function"]["parameters"])


@pytest.fixture(scope="module")
def tokenizer(demo_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_folder / "tokenizer.json"))


def cycle(tokenizer: Tokenizer, *texts: str) -> str:
    ids = [id for text in texts for id in tokenizer.encode(text, add_special_tokens=False).ids]
    return f"mode=cycle:{','.join(map(str, ids))}"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(TOOL_CHATML)
    return path


@pytest.fixture(scope="module")
def calling(demo_folder: Path, tokenizer: Tokenizer, template: Path) -> Iterator[Server]:
    """Answers with SAID."""
    arguments = ("--served-model-name", "smol", "--max-model-len", "2048", "--chat-template", str(template))
    with Server(demo_folder, *arguments, script=cycle(tokenizer, SAID, "<|im_end|>")) as server:
        yield server


@pytest.fixture(scope="module")
def thinking(demo_folder: Path, tokenizer: Tokenizer, template: Path) -> Iterator[Server]:
    """Thinks, then says anything that is allowed."""
    arguments = ("--served-model-name", "smol", "--max-model-len", "2048", "--chat-template", str(template))
    with Server(demo_folder, *arguments, script=cycle(tokenizer, THOUGHT, "</think>", " Yes.")) as server:
        yield server


def called(calls: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def test_t1_openai_tools(calling: Server) -> None:
    answer = calling.openai.chat.completions.create(model="smol", messages=ASK, tools=TOOLS, max_tokens=900)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    assert called(choice.message.tool_calls) == CALLS


def test_t1_s3_openai_tools_streamed(calling: Server) -> None:
    with calling.openai.chat.completions.stream(model="smol", messages=ASK, tools=TOOLS, max_tokens=900) as stream:
        for _ in stream:
            pass
        completion = stream.get_final_completion()
    [choice] = completion.choices
    assert called(choice.message.tool_calls) == CALLS and choice.message.content == "I look."
    assert choice.finish_reason == "tool_calls"


async def test_openai_async(calling: Server) -> None:
    async with AsyncOpenAI(base_url=f"{calling.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model="smol", messages=ASK, tools=TOOLS, max_tokens=900)  # type: ignore[call-overload]
        assert called(answer.choices[0].message.tool_calls) == CALLS
        names, arguments = [], ""
        stream = await client.chat.completions.create(  # type: ignore[call-overload]
            model="smol", messages=ASK, tools=TOOLS[:1], max_tokens=900, parallel_tool_calls=False, stream=True
        )
        async for chunk in stream:
            for call in chunk.choices[0].delta.tool_calls or ():
                names += [call.function.name] if call.function.name else []
                arguments += call.function.arguments
        assert names == ["get_weather"] and json.loads(arguments) == CALLS[0][1]


@pytest.mark.parametrize("stream", [False, True])
def test_openai_parse(calling: Server, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "smol", "messages": ASK, "max_tokens": 200}
    chat = calling.openai.chat.completions
    if stream:
        with chat.stream(**asked, response_format=Weather) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = chat.parse(**asked, response_format=Weather).choices[0].message
    assert isinstance(message.parsed, Weather)


def test_openai_parse_strict_tools(calling: Server) -> None:
    """A strict tool that need not be called: the call that the model begins is kept to its schema."""
    answer = calling.openai.chat.completions.parse(
        model="smol", messages=ASK, tools=[pydantic_function_tool(Weather, name="get_weather")], max_tokens=300
    )
    message = answer.choices[0].message
    assert message.content.startswith("I look.")
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Weather)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_required_calls(calling: Server, choice: Any) -> None:
    for seed in range(3):
        answer = calling.openai.chat.completions.create(
            model="smol", messages=ASK, tools=TOOLS[:1], tool_choice=choice, max_tokens=300, seed=seed,
            parallel_tool_calls=False,
        )  # fmt: skip
        [call] = answer.choices[0].message.tool_calls
        VALID.validate(json.loads(call.function.arguments))
        assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None


def test_t3_a_whole_conversation(calling: Server) -> None:
    messages = list(ASK)
    message = (
        calling.openai.chat.completions.create(model="smol", messages=messages, tools=TOOLS, max_tokens=900)
        .choices[0]
        .message
    )
    messages.append(message)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "20"} for call in message.tool_calls]
    again = calling.openai.chat.completions.create(model="smol", messages=messages, max_tokens=20)
    assert again.choices[0].message.content.startswith("I look.")


def test_t4_reasoning_of_the_openai_client(thinking: Server) -> None:
    asked: dict[str, Any] = {
        "model": "smol",
        "messages": ASK,
        "max_tokens": 30,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }
    answer = thinking.openai.chat.completions.create(**asked)
    message = answer.choices[0].message
    assert message.reasoning_content == THOUGHT and message.content.startswith("Yes.")
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < 30
    chunks = list(thinking.openai.chat.completions.create(**asked, stream=True))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == message.content


@pytest.mark.parametrize("stream", [False, True])
def test_t5_free_reasoning_then_a_schema(thinking: Server, stream: bool) -> None:
    body: dict[str, Any] = {
        "model": "smol",
        "messages": ASK,
        "max_tokens": 200,
        "chat_template_kwargs": {"enable_thinking": True},
        "response_format": {"type": "json_schema", "json_schema": {"schema": Weather.model_json_schema()}},
    }
    choice = ask(thinking, body, stream=stream)[0][0]
    assert choice["reasoning_content"] == THOUGHT
    Weather.model_validate_json(choice["content"])
    required = {**body, "response_format": None, "tools": TOOLS[:1], "tool_choice": "required"}
    required["parallel_tool_calls"] = False
    choice = ask(thinking, required, stream=stream)[0][0]
    assert choice["reasoning_content"] == THOUGHT and choice["content"] == ""
    VALID.validate(json.loads(choice["calls"][0]["arguments"]))


def ask(server: Server, body: dict[str, Any], *, stream: bool) -> tuple[list[dict[str, Any]], Any]:
    """Choices without the ids of calls, and the usage."""
    if not stream:
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return without_ids(plain_choices(answer.json())), answer.json()["usage"]
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with server.http.stream("POST", "/v1/chat/completions", json=asked) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    choices, usage = put_together([json.loads(line) for line in lines[:-1]])
    return without_ids(choices), usage


MATRIX = list(itertools.product((1, 3), (None, "Rome"), (False, True), (False, True), (False, True)))


@pytest.mark.parametrize(("n", "stop", "logprobs", "grammar", "tools"), MATRIX)
def test_s6_streamed_and_plain_agree(
    calling: Server, n: int, stop: str | None, logprobs: bool, grammar: bool, tools: bool
) -> None:
    body: dict[str, Any] = {"model": "smol", "messages": ASK, "max_tokens": 400, "n": n, "stop": stop, "seed": 1}
    body |= {"temperature": 1, "return_token_ids": True, "logprobs": logprobs}
    if grammar:
        schema = {"type": "object", "properties": {"a": {"enum": ["Rome 🙂", "Paris"]}}, "required": ["a"]}
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    if tools:
        body["tools"] = TOOLS
    plain, usage = ask(calling, body, stream=False)
    streamed, streamed_usage = ask(calling, body, stream=True)
    assert streamed == plain and streamed_usage == usage
    assert len(plain) == n
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in plain)
    for choice in plain:
        assert choice["finish_reason"] in ("stop", "length", "tool_calls")
        assert bool(choice["logprobs"]) == logprobs
        if tools and not grammar:
            assert [call["name"] for call in choice["calls"]] == ["get_weather", "write_file"]


def test_t3_langchain(calling: Server) -> None:
    model = ChatOpenAI(base_url=f"{calling.url}/v1", api_key="none", model="smol", max_retries=0, max_tokens=900)
    bound = model.bind_tools(TOOLS)
    message = bound.invoke("What is the weather?")
    assert [(call["name"], call["args"]) for call in message.tool_calls] == CALLS
    total: Any = None
    for chunk in bound.stream("What is the weather?"):
        total = chunk if total is None else total + chunk
    assert [(call["name"], call["args"]) for call in total.tool_calls] == CALLS and total.content == "I look."
    told = [ToolMessage("20", tool_call_id=call["id"]) for call in message.tool_calls]
    again = bound.invoke([HumanMessage("What is the weather?"), message, *told])
    assert again.tool_calls
    forced = model.bind_tools(TOOLS[:1], tool_choice="get_weather").invoke("Weather?")
    VALID.validate(forced.tool_calls[0]["args"])
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Weather, method=method).invoke("Weather?"), Weather)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(calling: Server, mode: str) -> None:
    client = instructor.from_openai(calling.openai, mode=instructor.Mode[mode])
    found = client.chat.completions.create(
        model="smol", messages=ASK, response_model=Weather, max_tokens=300, max_retries=0
    )
    assert found.city in ("Paris", "Rome")
