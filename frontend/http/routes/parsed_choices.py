"""Choices whose text a parser parts into reasoning, tool calls and text, whole or as events. Both read alike."""

from typing import Any, Protocol

import msgspec

from ...client.generation import SequenceOutput
from ...parsing.answer_parser import AnswerParser
from ...parsing.events import CallArguments, CallBegun, CallBroken, CallEnded, Event, Said, Thought
from ..event_stream import EventStream
from ..schema.chat import AssistantMessage, CalledFunction, ChatLogprobs, ToolCall
from ..schema.generation import Usage

_encode = msgspec.json.Encoder().encode


class ParsedChoice:
    """A listener that collects the message. `is_single`: the answer ends with its first call."""

    def __init__(
        self, parser: AnswerParser, sequence: SequenceOutput, *, is_single: bool, shows_reasoning: bool
    ) -> None:
        self._shows_reasoning = shows_reasoning
        self._parser = parser
        self._sequence = sequence
        self._is_single = is_single
        self._num_thought: int | None = None
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []
        self._num_whole = 0

    @property
    def finish_reason(self) -> str | None:
        """With a whole call, that of calls; an answer cut by its length says so."""
        reason = self._sequence.finish_reason
        return "tool_calls" if reason == "stop" and self._num_whole else reason

    @property
    def num_reasoning_tokens(self) -> int:
        """Those so far, tags included."""
        if self._num_thought is not None:
            return self._num_thought
        return self._sequence.num_tokens if self._parser.has_thought else 0

    @property
    def message(self) -> AssistantMessage:
        """What was said."""
        text = "".join(self._content)
        calls = [ToolCall(id, CalledFunction(name, "".join(pieces))) for id, name, pieces in self._calls]
        reasoning = "".join(self._thoughts) or msgspec.UNSET
        return AssistantMessage(
            text if text or not (calls or self._thoughts) else None,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=calls or msgspec.UNSET,
        )

    def show(self, text: str) -> None:
        """More of what the model wrote."""
        self._take(self._parser.feed(text))
        if self._num_thought is None and self._parser.has_thought and not self._parser.is_thinking:
            self._num_thought = self._sequence.num_tokens
        if self._is_single and self._num_whole and self._sequence.finish_reason is None:
            self._sequence.cut()

    def finish(self) -> None:
        """The rest."""
        if not (self._is_single and self._num_whole):
            self._take(self._parser.end(was_cut=self._sequence.finish_reason == "length"))

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if self._shows_reasoning or not isinstance(event, Thought):
                self._add(event)
            if self._is_single and self._num_whole:
                return

    def _add(self, event: Event) -> None:
        match event:
            case Said():
                self._content.append(event.text)
            case Thought():
                self._thoughts.append(event.text)
            case CallBegun():
                self._calls.append((self._parser.call_id(), event.name, []))
            case CallArguments():
                self._calls[-1][2].append(event.text)
            case CallEnded():
                self._num_whole += 1
            case CallBroken():
                self._calls.pop()


class StreamedForm(Protocol):
    """What a stream's chunks are made of."""

    has_running_usage: bool
    gives_token_ids: bool

    def chunk_head(self) -> bytes:
        """Everything of a chunk before its choices."""

    def taken_logprobs(self, sequence: SequenceOutput) -> ChatLogprobs | None:
        """Those of the tokens since the last call."""

    def usage(self, sequence: SequenceOutput) -> Usage:
        """So far."""


class ParsedChoiceStream(ParsedChoice):
    """The same as events: one for each thing found, with the log-probabilities of the tokens since the last.

    A call that turns out to be none is out already; its text follows.
    """

    def __init__(
        self,
        parser: AnswerParser,
        sequence: SequenceOutput,
        *,
        is_single: bool,
        shows_reasoning: bool,
        form: StreamedForm,
        stream: EventStream,
    ) -> None:
        super().__init__(parser, sequence, is_single=is_single, shows_reasoning=shows_reasoning)
        self._form = form
        self._write = stream.write
        self._is_open = False
        self._num_given = 0
        self._num_calls = 0

    def finish(self) -> None:
        """The rest, and the chunk with the finish reason."""
        super().finish()
        self._send({}, finish_reason=self.finish_reason, stop_reason=self._sequence.stop_reason)

    def _add(self, event: Event) -> None:
        super()._add(event)
        delta = self._delta(event)
        if delta is not None:
            self._send(delta)

    def _delta(self, event: Event) -> dict[str, Any] | None:
        self._num_calls += isinstance(event, CallBegun)
        index = self._num_calls - 1
        match event:
            case Said():
                return {"content": event.text}
            case Thought():
                return {"reasoning_content": event.text, "reasoning": event.text}
            case CallBegun():
                id, name, _ = self._calls[-1]
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
            case CallArguments():
                return {"tool_calls": [{"index": index, "function": {"arguments": event.text}}]}
            case CallEnded() | CallBroken():
                return None

    def _send(self, delta: dict[str, Any], **ends: Any) -> None:
        if not self._is_open:
            self._is_open = True
            self._write(self._chunk({"role": "assistant", "content": ""}, None, {}, self._prompt()))
        logprobs = self._form.taken_logprobs(self._sequence)
        if self._form.gives_token_ids:
            ends["token_ids"] = self._sequence.token_ids[self._num_given :]
            self._num_given = self._sequence.num_tokens
        self._write(self._chunk(delta, logprobs if logprobs is not None and logprobs.content else None, ends))

    def _prompt(self) -> bytes:
        if not self._form.gives_token_ids:
            return b""
        return b',"prompt_token_ids":' + _encode(self._sequence.generation.request.prompt_token_ids)

    def _chunk(
        self, delta: dict[str, Any], logprobs: ChatLogprobs | None, ends: dict[str, Any], more: bytes = b""
    ) -> bytes:
        choice = {"index": self._sequence.choice, "delta": delta, "logprobs": logprobs, "finish_reason": None, **ends}
        usage = b',"usage":' + _encode(self._form.usage(self._sequence)) if self._form.has_running_usage else b""
        return self._form.chunk_head() + _encode(choice) + b"]" + more + usage + b"}\n\n"
