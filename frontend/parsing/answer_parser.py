"""Reasoning, then text and tool calls."""

from collections.abc import Collection

from .events import Event, Said
from .reasoning_parser import ReasoningFormat, ReasoningParser
from .tool_formats import ToolFormat
from .tool_parser import ToolParser


class AnswerParser:
    """One choice's parser. `names` are those of the tools that may be called."""

    def __init__(
        self,
        tools: ToolFormat | None,
        names: Collection[str],
        reasoning: ReasoningFormat | None,
        *,
        is_open: bool,
    ) -> None:
        self._format = tools
        self._tools = None if tools is None else ToolParser(tools, names)
        self._reasoning = None if reasoning is None else ReasoningParser(reasoning, is_open=is_open)

    @property
    def is_thinking(self) -> bool:
        """What comes now is reasoning."""
        return self._reasoning is not None and self._reasoning.is_thinking

    @property
    def has_thought(self) -> bool:
        """There was reasoning, or there is."""
        return self._reasoning is not None and self._reasoning.has_thought

    def call_id(self) -> str:
        """For a call that has begun."""
        assert self._format is not None, "without a format there are no calls"
        return self._format.call_id()

    def feed(self, text: str) -> list[Event]:
        """What this text adds."""
        if self._reasoning is None:
            return self._parted(text)
        return self._behind(self._reasoning.feed(text))

    def end(self, *, was_cut: bool = False) -> list[Event]:
        """What is left, now that nothing follows. `was_cut`: a limit ended the text, not the model."""
        events = [] if self._reasoning is None else self._behind(self._reasoning.end())
        return events if self._tools is None else [*events, *self._tools.end(was_cut=was_cut)]

    def _behind(self, events: list[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            found += self._parted(event.text) if isinstance(event, Said) else [event]
        return found

    def _parted(self, text: str) -> list[Event]:
        return [Said(text)] if self._tools is None else self._tools.feed(text)
