"""The deliberate breaks of tools and reasoning."""

from broken import Break

PARSING = ("tests/pure/test_output_parsing.py",)
TOOLS = ("tests/api/test_tools.py",)
GRAMMARS = ("tests/pure/test_call_grammars.py",)

PARSING_BREAKS = (
    Break(
        "T1: a call ends at the first closing brace",
        "frontend/parsing/json_value.py",
        '            self._expects = "comma or end"\n',
        "            self.is_done = True\n",
        PARSING,
    ),
    Break(
        "T1: half a tag is shown",
        "frontend/parsing/scanner.py",
        "rest[: len(rest) - _held(rest, markers)].rstrip()",
        "rest.rstrip()",
        PARSING,
    ),
    Break(
        "T2: a call of any name counts",
        "frontend/parsing/calls.py",
        "if not isinstance(name, str) or name not in self.names:",
        "if not isinstance(name, str):",
        PARSING,
    ),
    Break(
        "T2: malformed calls are lost",
        "frontend/parsing/calls.py",
        "        if raw:\n            yield Text(raw)\n",
        "",
        PARSING,
    ),
    Break(
        "T4: reasoning that the prompt opened is text",
        "frontend/parsing/output_parser.py",
        "        if not prompt_end.endswith(begin):\n",
        "        if True:\n",
        PARSING,
    ),
    Break(
        "T4: reasoning tokens are not counted to the end",
        "frontend/http/routes/chat_parsing.py",
        "            self._counts = self._parser.is_reasoning\n",
        "            self._counts = False\n",
        TOOLS,
    ),
    Break(
        "S3: calls end as text does",
        "frontend/http/routes/chat_parsing.py",
        'return "tool_calls" if self.num_calls and reason == "stop" else reason',
        "return reason",
        TOOLS,
    ),
    Break(
        "a demanded call is a wish",
        "frontend/http/routes/chat_parsing.py",
        "    if forced or (constraint is not None and tools):\n",
        "    if constraint is not None and tools:\n",
        TOOLS,
    ),
    Break(
        "T8: strict tools are taken and not kept",
        "frontend/http/routes/chat_parsing.py",
        "    elif any(tool.function.strict for tool in tools):\n",
        "    elif False:\n",
        TOOLS,
    ),
    Break(
        "one call is as good as many",
        "frontend/parsing/call_grammars.py",
        'more = "" if is_single else',
        'more = "" if False else',
        GRAMMARS,
    ),
)
