"""Tools and reasoning of one chat request: what the model is held to, and its output as events."""

import secrets
import string
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ....ipc.sampling import Grammar
from ...client.constraints import Constraint
from ...client.generation import SequenceOutput
from ...client.refusals import RequestRefused
from ...parsing.call_grammars import Form, calls_grammar, form_of, without_first
from ...parsing.output_parser import REASONING_TAGS, OutputParser, Parsers
from ...parsing.scanner import Arguments, CallBegan, CallBroken, CallEnded, Event, Reasoning, Text
from ..schema.chat import CalledFunction, ChatRequest, NamedTool, Tool, ToolCall
from ..serving import ServedModel

_ALPHANUMERIC = string.ascii_letters + string.digits


class Reading(Struct, frozen=True, kw_only=True):
    """How to read one request's output. `shown_ids`: control tokens that the parsers read."""

    parsers: Parsers
    tool_names: frozenset[str] = frozenset()
    is_single: bool = False
    shown_ids: frozenset[int] = frozenset()


class Parsed(Struct):
    """One choice, put together."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = []

    @property
    def content(self) -> str | None:
        """The message's content: null beside calls or reasoning where there is no text."""
        return self.text or (None if self.calls or self.reasoning else "")


def reading_of(request: ChatRequest, model: ServedModel) -> Reading | None:
    """None: the output is text and nothing else. Raises RequestRefused for tools that cannot be honoured."""
    tools = _asked_tools(request, model)
    parsers = Parsers(model.parsers.tools if tools else None, model.parsers.reasoning)
    if parsers == Parsers():
        return None
    control = model.text.tokenizer.control_texts
    return Reading(
        parsers=parsers,
        tool_names=frozenset(tool.function.name for tool in tools),
        is_single=request.parallel_tool_calls is False,
        shown_ids=frozenset(control[text] for text in parsers.markers if text in control),
    )


def constraint_with_tools(
    request: ChatRequest, model: ServedModel, constraint: Constraint | None, prompt_end: str, limit_bytes: int
) -> Constraint | None:
    """The one grammar of response format and tool choice; it begins after the reasoning. Raises RequestRefused."""
    settled = _settled(request, model, constraint, prompt_end)
    size = 0 if settled is None else len(settled.grammar.source.encode("utf-8", "replace"))
    if settled is not None and size > limit_bytes:
        raise RequestRefused(
            f"{settled.field}: the schemas come to {size} bytes, above this server's limit of {limit_bytes} for a "
            "constraint; send fewer or smaller ones",
            param=settled.field,
        )
    return settled


def _settled(
    request: ChatRequest, model: ServedModel, constraint: Constraint | None, prompt_end: str
) -> Constraint | None:
    forced = _forced_tools(request)
    tools = [] if request.tool_choice == "none" else list(request.tools or ())
    if forced and constraint is not None:
        raise RequestRefused(
            f"{constraint.field}: not together with a tool_choice that demands a call; leave one out",
            param=constraint.field,
        )
    if forced or (constraint is not None and tools):
        constraint = _calls_constraint(request, model, forced or tools, constraint)
    elif any(tool.function.strict for tool in tools):
        return _constraint_from_trigger(request, model, tools)
    if constraint is None:
        return None
    return constraint._replace(grammar=replace(constraint.grammar, starts_after=_end_ids(model, prompt_end)))


def _asked_tools(request: ChatRequest, model: ServedModel) -> list[Tool]:
    tools = request.tools or []
    names = [tool.function.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestRefused(f"tools: {twice!r} stands there twice; name each tool once", param="tools")
    choice = request.tool_choice
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise RequestRefused(f"tool_choice: {choice.function.name!r} is none of the tools", param="tool_choice")
    if choice == "required" and not tools:
        raise RequestRefused("tool_choice: a call is demanded, and there are no tools; send tools", param="tool_choice")
    if choice == "none" or not tools:
        return []
    if model.parsers.tools is None:
        raise RequestRefused(
            "tools: this model's chat template does not show tools to the model; start the server with a "
            "--chat-template that does, or with --tool-parser",
            param="tools",
        )
    return tools


def _forced_tools(request: ChatRequest) -> list[Tool]:
    choice, tools = request.tool_choice, request.tools or []
    if isinstance(choice, NamedTool):
        return [tool for tool in tools if tool.function.name == choice.function.name]
    return tools if choice == "required" else []


def _calls_constraint(
    request: ChatRequest, model: ServedModel, tools: list[Tool], other: Constraint | None
) -> Constraint:
    answer = None
    if other is not None:
        if other.grammar.kind not in ("json_schema", "json_object"):
            raise RequestRefused(
                f"{other.field}: beside tools only JSON can be demanded; leave tools or this out", param=other.field
            )
        answer = other.grammar.source if other.grammar.kind == "json_schema" else '{"type": "object"}'
    source = _calls_grammar(_form(model), request, model, tools, answer)
    return Constraint("tools", Grammar(kind="lark", source=source))


def _constraint_from_trigger(request: ChatRequest, model: ServedModel, tools: list[Tool]) -> Constraint:
    """Strict tools that the model may call or not: held to their schemas once it has begun a call."""
    form = _form(model)
    trigger = (form.begin or form.before)[0]
    ids = model.text.tokenizer.encode(trigger, add_special_tokens=False)
    if len(ids) != 1:
        raise RequestRefused(
            "tools: this model has no token that begins a call, so strict can only be kept where a call is demanded; "
            'send tool_choice "required", or leave strict out',
            param="tools",
        )
    source = _calls_grammar(without_first(form), request, model, tools, None)
    return Constraint("tools", Grammar(kind="lark", source=source, starts_after=tuple(ids)))


def _form(model: ServedModel) -> Form:
    assert model.parsers.tools is not None and model.text.template is not None
    return form_of(model.parsers.tools, model.text.template.source)


def _calls_grammar(
    form: Form, request: ChatRequest, model: ServedModel, tools: list[Tool], answer_schema: str | None
) -> str:
    control = model.text.tokenizer.control_texts

    def marker(text: str) -> str:
        return f"<[{control[text]}]>" if text in control else _quoted(text)

    return calls_grammar(
        form,
        [(tool.function.name, tool.function.parameters or {"type": "object"}) for tool in tools],
        marker,
        is_single=request.parallel_tool_calls is False or isinstance(request.tool_choice, NamedTool),
        answer_schema=answer_schema,
    )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _end_ids(model: ServedModel, prompt_end: str) -> tuple[int, ...]:
    """Tokens of the end of the reasoning, where there is going to be some."""
    if model.parsers.reasoning is None:
        return ()
    _, end = REASONING_TAGS[model.parsers.reasoning]
    if prompt_end.rstrip().endswith(end):
        return ()
    return tuple(model.text.tokenizer.encode(end, add_special_tokens=False))


class ChoiceReader:
    """Listens to one choice; `take` gets its events. Counts the tokens of the reasoning."""

    def __init__(self, reading: Reading, prompt_end: str, sequence: SequenceOutput) -> None:
        self.sequence = sequence
        self.reasoning_tokens = 0
        self.num_calls = 0  # complete ones
        self._is_mistral = reading.parsers.tools == "mistral"
        self._is_single = reading.is_single
        self._parser = OutputParser(reading.parsers, reading.tool_names, prompt_end=prompt_end)
        self._counts = True

    @property
    def finish_reason(self) -> str | None:
        """As the API names it: calls are a reason of their own."""
        reason = self.sequence.finish_reason
        return "tool_calls" if self.num_calls and reason == "stop" else reason

    def read(self, text: str) -> list[Event]:
        """The events that this text decides."""
        events = self._parser.feed(text)
        if self._counts and self._parser.has_reasoned:
            self.reasoning_tokens = self.sequence.num_tokens
            self._counts = self._parser.is_reasoning
        return self._kept(events)

    def read_rest(self) -> list[Event]:
        """The events at the end."""
        events = self._parser.finish(was_cut=self.sequence.finish_reason == "length")
        if self._parser.is_reasoning:
            self.reasoning_tokens = self.sequence.num_tokens
        return self._kept(events)

    def new_call(self, name: str) -> ToolCall:
        """A call with an id; Mistral's templates take ids of nine letters and digits only."""
        if self._is_mistral:
            id = "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        else:
            id = f"call_{secrets.token_hex(12)}"
        return ToolCall(id=id, function=CalledFunction(name, ""))

    def _kept(self, events: list[Event]) -> list[Event]:
        """Without what follows the first call, where one is all that was asked for."""
        kept: list[Event] = []
        for event in events:
            if self._is_single and self.num_calls:
                continue
            kept.append(event)
            self.num_calls += isinstance(event, CallEnded)
        return kept


class CollectedChoice:
    """The listener of a plain answer's choice."""

    def __init__(self, reader: ChoiceReader) -> None:
        self.reader = reader
        self.parsed = Parsed()

    def show(self, text: str) -> None:
        """More text."""
        self._add(self.reader.read(text))

    def finish(self) -> None:
        """The end."""
        self._add(self.reader.read_rest())

    def _add(self, events: list[Event]) -> None:
        parsed = self.parsed
        for event in events:
            match event:
                case Text():
                    parsed.text += event.text
                case Reasoning():
                    parsed.reasoning += event.text
                case CallBegan():
                    parsed.calls.append(self.reader.new_call(event.name))
                case Arguments():
                    last = parsed.calls[-1]
                    longer = CalledFunction(last.function.name, last.function.arguments + event.text)
                    parsed.calls[-1] = replace(last, function=longer)
                case CallBroken():
                    parsed.calls.pop()


class Deltas:
    """One choice's events as the deltas of a stream."""

    def __init__(self, reader: ChoiceReader) -> None:
        self._reader = reader
        self._index = -1

    def of(self, events: list[Event]) -> list[dict[str, Any]]:
        """A delta for each event that a client sees."""
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def _delta(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Text():
                return {"content": event.text}
            case Reasoning():
                return {"reasoning_content": event.text, "reasoning": event.text}
            case CallBegan():
                self._index += 1
                call = self._reader.new_call(event.name)
                function = {"name": event.name, "arguments": ""}
                return {"tool_calls": [{"index": self._index, "id": call.id, "type": "function", "function": function}]}
            case Arguments():
                return {"tool_calls": [{"index": self._index, "function": {"arguments": event.text}}]}
        return None
