"""Tools and calls of them, as the OpenAI API writes both."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs


class FunctionTool(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function that the model may call. `parameters`: a JSON schema; without one it takes none."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, kw_only=True):
    """One tool."""

    type: Literal["function"]
    function: FunctionTool


class FunctionName(Struct, frozen=True):
    """Of one of the tools."""

    name: str


class NamedTool(Struct, frozen=True, kw_only=True):
    """The tool that is to be called."""

    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[Tool], Meta(max_length=512)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(Struct, frozen=True):
    """What is called. `arguments`: JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True):
    """One call."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


def template_tool(tool: Tool) -> dict[str, Any]:
    """As models know tools: `strict` is for the server alone."""
    return {"type": tool.type, "function": msgspec.to_builtins(structs.replace(tool.function, strict=None))}


def template_call(call: dict[str, Any]) -> dict[str, Any]:
    """Templates want a call's arguments as an object, clients send them as JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except msgspec.DecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
