"""LangChain's client against a frontend with tools: one turn with a call, its result, and the answer. Row T3."""

from collections.abc import Iterator

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from trimaran.tests.api.conftest import Served
from trimaran.tests.api.test_tool_calls import CALL, CITY, model_name
from trimaran.tests.api.test_tool_calls import tooled as tooled


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


@pytest.fixture
def client(tooled: Served) -> Iterator[ChatOpenAI]:
    yield ChatOpenAI(
        model=model_name(tooled), base_url=str(tooled.openai.base_url), api_key="none", max_retries=0, timeout=10
    )


def test_t3_a_turn_with_a_tool(tooled: Served, client: ChatOpenAI) -> None:
    bound = client.bind_tools([get_weather])
    tooled.says(CALL)
    asked = HumanMessage("What is the weather in Paris?")
    called = bound.invoke([asked])
    [call] = called.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": CITY})
    tooled.says("It is sunny.")
    answer = bound.invoke([asked, called, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])])
    assert answer.content == "It is sunny." and not answer.tool_calls


def test_t1_a_streamed_call(tooled: Served, client: ChatOpenAI) -> None:
    tooled.says("Let me see.\n" + CALL)
    chunks = list(client.bind_tools([get_weather]).stream([HumanMessage("Paris?")]))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert whole.content == "Let me see."
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("get_weather", {"city": CITY})]
