"""The parser of one choice: reasoning first, then text and calls; and which parsers a chat template asks for."""

from collections.abc import Set

from msgspec import Struct

from .scanner import Event, Parse, Reasoning, Scanner
from .tool_families import FAMILIES, plain_text

REASONING_TAGS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}


class Parsers(Struct, frozen=True):
    """Names of the parsers of a model; None: it has no such thing."""

    tools: str | None = None
    reasoning: str | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must reach the parsers even where they are control tokens."""
        return (*_TOOL_MARKERS.get(self.tools or "", ()), *REASONING_TAGS.get(self.reasoning or "", ()))


_TOOL_MARKERS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "deepseek": (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ),
}


def detected(template: str) -> Parsers:
    """By the tags that a chat template writes."""
    reasoning = next((name for name, (_, end) in REASONING_TAGS.items() if end in template), None)
    if "tools" not in template:
        return Parsers(None, reasoning)
    tags = {
        "deepseek": "<｜tool▁call",
        "mistral": "[TOOL_CALLS]",
        "hermes": "<tool_call>",
        "llama3_json": "<|python_tag|>",
    }
    family = next((name for name, tag in tags.items() if tag in template), None)
    if family is None:
        family = "llama3_json" if "<|start_header_id|>" in template else "plain_json"
    return Parsers(family, reasoning)


class OutputParser:
    """Takes one choice's text in pieces; the events of `feed` and `finish` joined do not depend on the pieces."""

    def __init__(self, parsers: Parsers, tool_names: Set[str], *, prompt_end: str = "") -> None:
        """`prompt_end`: how the prompt ends, which may have opened the reasoning."""
        self._scanner = Scanner()
        self.is_reasoning = False
        self.has_reasoned = False
        self._parse = self._run(parsers, tool_names, prompt_end.rstrip())

    def feed(self, piece: str) -> list[Event]:
        """What this piece decides."""
        self._scanner.feed(piece)
        return self._events()

    def finish(self, *, was_cut: bool) -> list[Event]:
        """The rest. `was_cut`: a limit ended the text, not the model."""
        self._scanner.end(was_cut)
        return self._events()

    def _events(self) -> list[Event]:
        events: list[Event] = []
        for event in self._parse:
            if event is None:
                break
            events.append(event)
        return events

    def _run(self, parsers: Parsers, tool_names: Set[str], prompt_end: str) -> Parse[None]:
        if parsers.reasoning is not None:
            yield from self._read_reasoning(*REASONING_TAGS[parsers.reasoning], prompt_end)
        family = FAMILIES[parsers.tools] if parsers.tools is not None and tool_names else plain_text
        yield from family(self._scanner, tool_names)

    def _read_reasoning(self, begin: str, end: str, prompt_end: str) -> Parse[None]:
        scanner = self._scanner
        if not prompt_end.endswith(begin):
            yield from scanner.skip_space()
            if not (yield from scanner.take(begin)):
                scanner.back()
                return
        self.is_reasoning = self.has_reasoned = True
        yield from scanner.skip_space()
        if (yield from scanner.until((end,), Reasoning)) is not None:
            self.is_reasoning = False
            yield from scanner.skip_space()
        scanner.set_mark()
