"""A choice whose text a parser parts into reasoning, tool calls and text."""

from ..parsing.answer_parser import AnswerParser
from ..parsing.events import CallArguments, CallBegun, CallBroken, CallEnded, Event, Said, Thought
from .generation import SequenceOutput
from .tools import CalledFunction, ToolCall


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
    def content(self) -> str | None:
        """The text; None where there is none beside reasoning or calls."""
        text = "".join(self._content)
        return text if text or not (self._calls or self._thoughts) else None

    @property
    def reasoning(self) -> str:
        """Empty where there is none."""
        return "".join(self._thoughts)

    @property
    def calls(self) -> list[ToolCall]:
        """Those that were begun, and are calls."""
        return [ToolCall(id, CalledFunction(name, "".join(pieces))) for id, name, pieces in self._calls]

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
