"""What a request's tools ask of its answer."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ...ipc.configuration import RequestLimits
from ...ipc.sampling import CallGrammar, Grammar
from ..parsing.choosing import Parsers
from .constraints import Constraint, only
from .refusals import RequestRefused
from .sampling import refusal_of
from .tools import FunctionTool, NamedTool, Tool, ToolChoice, Tools

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


class _GivenTools(Struct, kw_only=True):
    tools: Tools
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool | None


class ToolWishes(Struct, frozen=True, kw_only=True):
    """The tools of a request, and how they are to be called."""

    tools: Sequence[Tool] = ()
    choice: ToolChoice | None = None
    parallel: bool | None = None

    @classmethod
    def of(cls, tools: Any, choice: Any, parallel: Any) -> "ToolWishes":
        """Of what a Python caller gives. Raises RequestRefused."""
        try:
            given = {"tools": tools or (), "tool_choice": choice, "parallel_tool_calls": parallel}
            checked = msgspec.convert(given, _GivenTools)
        except msgspec.ValidationError as error:
            raise refusal_of(error) from None
        return cls(tools=checked.tools, choice=checked.tool_choice, parallel=checked.parallel_tool_calls)

    @property
    def shown(self) -> Sequence[Tool]:
        """Those that the prompt tells of."""
        return () if self.choice == "none" else self.tools


class ToolUse(Struct, frozen=True, kw_only=True):
    """`names` may be called; with `is_single`, one of them once. `constraint` is that of the whole answer."""

    names: frozenset[str] = frozenset()
    is_single: bool = False
    constraint: Constraint | None = None


def tool_use(wishes: ToolWishes, asked: Constraint | None, parsers: Parsers, limits: RequestLimits) -> ToolUse:
    """`asked`: the constraint without tools. Raises RequestRefused."""
    choice, tools = wishes.choice, [tool.function for tool in wishes.tools]
    if not tools and choice not in (None, "none", "auto"):
        raise RequestRefused("tool_choice: there are no tools to call; send tools", param="tool_choice")
    if not tools or choice == "none":
        return ToolUse(constraint=asked)
    if parsers.tool_format is None:
        raise RequestRefused(
            "tools: this model's chat template does not show how it calls tools; start the server with --tool-parser, "
            'or send tool_choice "none"',
            param="tools",
        )
    _check_names(tools, choice)
    _check_parameters(tools)
    is_single = wishes.parallel is False or isinstance(choice, NamedTool)
    called = [tool for tool in tools if not isinstance(choice, NamedTool) or tool.name == choice.function.name]
    grammar = _call_grammar(called, parsers, is_many=not is_single)
    if choice in (None, "auto"):
        constraint = _of_free_choice(called, grammar, asked, parsers)
    elif asked is not None:
        raise RequestRefused(
            f"{asked.field}: not together with a tool_choice that demands a call; leave one out", param=asked.field
        )
    else:
        constraint = _made(grammar)
    only([] if constraint is None else [constraint], limits)
    return ToolUse(names=frozenset(tool.name for tool in called), is_single=is_single, constraint=constraint)


def _check_names(tools: list[FunctionTool], choice: Any) -> None:
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestRefused(f"tools: two have the name {twice!r}; give each its own", param="tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise RequestRefused(
            f"tool_choice: there is no tool {choice.function.name!r} among tools; name one of them",
            param="tool_choice",
        )


def _check_parameters(tools: list[FunctionTool]) -> None:
    for index, tool in enumerate(tools):
        kind = (tool.parameters or {}).get("type", "object")
        if kind != "object":
            field = f"tools[{index}].function.parameters"
            raise RequestRefused(
                f"{field}: arguments are an object, and this schema wants {kind!r}; wrap it in one", param=field
            )


def _of_free_choice(
    tools: list[FunctionTool], grammar: CallGrammar, asked: Constraint | None, parsers: Parsers
) -> Constraint | None:
    """Calls only if the model likes: then as strict tools want them, and the answer as it was asked for."""
    if asked is not None:
        match asked.grammar.kind:
            case "json_schema":
                answer = msgspec.json.decode(asked.grammar.source)
            case "json_object":
                answer = _ANY_ARGUMENTS
            case _:
                raise RequestRefused(
                    f"{asked.field}: not together with tools that may be left uncalled; send a JSON schema, or "
                    'tool_choice "none"',
                    param=asked.field,
                )
        return Constraint(asked.field, _made(msgspec.structs.replace(grammar, answer=answer)).grammar)
    if not any(tool.strict for tool in tools):
        return None
    assert parsers.tool_format is not None
    if not parsers.tool_format.openers:
        raise RequestRefused(
            f"tools: strict is not kept to with the tool format {parsers.tools!r}, which has no tag of its own, unless "
            'a call is required; leave strict out, or send tool_choice "required"',
            param="tools",
        )
    mark = parsers.tool_format.openers[0]
    calls = [
        (before, schema if tool.strict else _ANY_ARGUMENTS, after)
        for tool, (before, schema, after) in zip(tools, grammar.calls, strict=True)
    ]
    return _made(
        msgspec.structs.replace(
            grammar, calls=calls, is_optional=True, is_many=True, mark=parsers.controls.get(mark, mark)
        )
    )


def _made(grammar: CallGrammar) -> Constraint:
    return Constraint("tools", Grammar(kind="tool_calls", source=msgspec.json.encode(grammar).decode()))


def _call_grammar(tools: list[FunctionTool], parsers: Parsers, *, is_many: bool) -> CallGrammar:
    assert parsers.tool_format is not None
    form, controls = parsers.tool_format.form(parsers.template), parsers.controls
    calls = [
        (
            _pieces(form.before.replace("NAME", tool.name), controls),
            _NO_ARGUMENTS if tool.parameters is None else {"type": "object", **tool.parameters},
            _pieces(form.after, controls),
        )
        for tool in tools
    ]
    return CallGrammar(
        calls=calls,
        begin=_pieces(form.begin, controls),
        separator=_pieces(form.separator, controls),
        end=_pieces(form.end, controls),
        is_many=is_many,
    )


def _pieces(text: str, controls: Mapping[str, int]) -> list[str | int]:
    """The text with its control tokens by id."""
    if not controls:
        return [text] if text else []
    parts = re.split(f"({'|'.join(map(re.escape, controls))})", text)
    return [controls.get(part, part) for part in parts if part]
