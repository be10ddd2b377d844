"""Which formats a model uses: as its chat template shows, or as the operator says."""

import re
from collections.abc import Mapping

from msgspec import Struct

from .reasoning_parser import REASONING_FORMATS, ReasoningFormat
from .tool_formats import TOOL_FORMATS, ToolFormat

TOOL_PARSERS = ("auto", "none", *TOOL_FORMATS)
REASONING_PARSERS = ("auto", "none", *REASONING_FORMATS)

_TOOL_SIGNS = (  # the first that the template holds decides
    ("deepseek", "<｜tool▁call"),
    ("mistral", "[TOOL_CALLS]"),
    ("hermes", "<tool_call>"),
    ("llama3_json", "<|python_tag|>"),
    ("llama3_json", "ipython"),
)
_OTHER_SIGNS = ("<function=", "<arg_key>")  # calls in markup that no parser here reads
_TOOLS = re.compile(r"\btools\b")


def tool_format_of(template: str | None) -> str | None:
    """The name of the tool format; None: the template knows no tools, or another format."""
    if template is None or any(sign in template for sign in _OTHER_SIGNS):
        return None
    for name, sign in _TOOL_SIGNS:
        if sign in template:
            return name
    return "plain_json" if _TOOLS.search(template) else None


def reasoning_format_of(template: str | None) -> str | None:
    """The name of the reasoning format; None: the template knows none."""
    if template is None:
        return None
    return next((name for name, form in REASONING_FORMATS.items() if form.end in template), None)


class Parsers(Struct, frozen=True):
    """A served model's formats by name, None for none; `controls` are their tags that are control tokens, by text."""

    tools: str | None = None
    reasoning: str | None = None
    controls: Mapping[str, int] = {}
    template: str = ""

    @classmethod
    def chosen(
        cls, template: str | None, controls: Mapping[str, int], *, tools: str = "auto", reasoning: str = "auto"
    ) -> "Parsers":
        """As the operator says: a name, none, or auto, which is as the template shows."""
        tool_name = tool_format_of(template) if tools == "auto" else None if tools == "none" else tools
        thought = reasoning_format_of(template) if reasoning == "auto" else None if reasoning == "none" else reasoning
        tags = [
            *(() if tool_name is None else TOOL_FORMATS[tool_name].tags),
            *(() if thought is None else REASONING_FORMATS[thought].tags),
        ]
        return cls(tool_name, thought, {tag: controls[tag] for tag in tags if tag in controls}, template or "")

    def kept(self, *, with_tools: bool) -> dict[int, str]:
        """The control tokens that a parser reads, by id."""
        tags = () if self.reasoning_format is None else self.reasoning_format.tags
        if with_tools and self.tool_format is not None:
            tags = (*tags, *self.tool_format.tags)
        return {self.controls[tag]: tag for tag in tags if tag in self.controls}

    @property
    def tool_format(self) -> ToolFormat | None:
        """How calls are written."""
        return None if self.tools is None else TOOL_FORMATS[self.tools]

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """How reasoning is marked."""
        return None if self.reasoning is None else REASONING_FORMATS[self.reasoning]
