"""Parts an answer into the model's reasoning and what follows it."""

from msgspec import Struct

from .events import Event, Said, Thought
from .source import Source, Steps, tag_begun

_SPACE = " \t\n\r"


class ReasoningFormat(Struct, frozen=True):
    """The tags round the reasoning."""

    start: str
    end: str

    @property
    def tags(self) -> tuple[str, ...]:
        """Both."""
        return (self.start, self.end)


REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed": ReasoningFormat("<seed:think>", "</seed:think>"),
    "cohere": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
}


class ReasoningParser:
    """`is_open`: the prompt has begun the reasoning. White space round it, and before the answer behind it, is dropped.

    An answer that does not begin with reasoning has none; reasoning that does not end is all there is.
    """

    def __init__(self, form: ReasoningFormat, *, is_open: bool) -> None:
        self.is_thinking = is_open
        self.has_thought = is_open
        self._format = form
        self._source = Source()
        self._events: list[Event] = []
        self._is_past = False
        self._steps = self._run()

    def feed(self, text: str) -> list[Event]:
        """What this text adds."""
        if self._is_past:
            return [Said(text)]
        self._source.text += text
        return self._advanced()

    def end(self) -> list[Event]:
        """What is left, now that nothing follows."""
        self._source.is_ended = True
        return self._advanced()

    def _advanced(self) -> list[Event]:
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    def _run(self) -> Steps[None]:
        source = self._source
        yield from source.skip_space()
        if (yield from source.take(self._format.start)):
            self.is_thinking = self.has_thought = True
        if self.is_thinking:
            yield from source.skip_space()
            yield from self._think()
            yield from source.skip_space()
        else:
            source.at = 0
        self._is_past = True
        if source.at < len(source.text):
            self._events.append(Said(source.text[source.at :]))

    def _think(self) -> Steps[None]:
        source, end = self._source, self._format.end
        while (found := source.text.find(end, source.at)) < 0:
            self._think_until(len(source.text) - tag_begun(source.text[source.at :], (end,)))
            source.drop_taken()
            if not (yield from source.more()):
                self._think_until(len(source.text))
                source.at = len(source.text)
                return
        self._think_until(found)
        source.at = found + len(end)
        self.is_thinking = False

    def _think_until(self, end: int) -> None:
        source = self._source
        text = source.text[source.at : end].rstrip(_SPACE)
        if text:
            self._events.append(Thought(text))
        source.at += len(text)
