"""Parsed choices as events: both a stream and a plain answer are read alike."""

from typing import Any, Protocol

import msgspec

from ...client.generation import SequenceOutput
from ...client.parsed_choice import ParsedChoice
from ...parsing.answer_parser import AnswerParser
from ...parsing.events import CallArguments, CallBegun, CallBroken, CallEnded, Event, Said, Thought
from ..event_stream import EventStream
from ..schema.chat import AssistantMessage, ChatLogprobs
from ..schema.generation import Usage

_encode = msgspec.json.Encoder().encode


def message_of(choice: ParsedChoice) -> AssistantMessage:
    """What was said."""
    reasoning = choice.reasoning or msgspec.UNSET
    return AssistantMessage(
        choice.content,
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=choice.calls or msgspec.UNSET,
    )


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
