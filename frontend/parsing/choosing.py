"""Which formats a model uses: as its chat template shows, or as the operator says."""

import re

from .reasoning_parser import REASONING_FORMATS
from .tool_formats import TOOL_FORMATS

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
    return "json" if _TOOLS.search(template) else None


def reasoning_format_of(template: str | None) -> str | None:
    """The name of the reasoning format; None: the template knows none."""
    if template is None:
        return None
    return next((name for name, form in REASONING_FORMATS.items() if form.end in template), None)
