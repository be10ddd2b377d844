"""Answers as families of models write them, and what is in them: the corpus of the parsers' tests."""

import json
from typing import Any, NamedTuple

Call = tuple[str, str]  # name, and the JSON text of the arguments as the model wrote it

TOOLS = ("get_weather", "search.web", "no_arguments", "write-file")
HARD = {
    "tags": "</tool_call><tool_call> [TOOL_CALLS] <|python_tag|> <｜tool▁call▁end｜> </think>",
    "text": '"quoted" \\ {brace}} ]',
    "emoji": "🙂👩‍👩‍👧 漢字 é",
    "empty": "",
    "list": [],
    "object": {},
    "none": None,
    "nested": {"a": [{"b": "}"}, -1.5e3, True]},
}
HARD_TEXT = json.dumps(HARD, ensure_ascii=False)
ESCAPED_TEXT = json.dumps(HARD)


class Recorded(NamedTuple):
    """`content` None: the answer has no text."""

    form: str
    text: str
    content: str
    calls: tuple[Call, ...]


def _hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _deepseek(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


PARIS, ROME = '{"city": "Paris"}', '{"city":"Rome"}'
WEATHER = ("get_weather", PARIS)
RECORDED = (
    # Hermes, Qwen
    Recorded("hermes", _hermes(*WEATHER), "", (WEATHER,)),
    Recorded("hermes", "\n\nI look.\n\n" + _hermes(*WEATHER) + "\n", "\n\nI look.", (WEATHER,)),
    Recorded(
        "hermes", _hermes(*WEATHER) + "\n" + _hermes("write-file", HARD_TEXT), "", (WEATHER, ("write-file", HARD_TEXT))
    ),
    Recorded("hermes", _hermes("write-file", ESCAPED_TEXT) + " Done.", " Done.", (("write-file", ESCAPED_TEXT),)),
    Recorded("hermes", _hermes("no_arguments", "{}"), "", (("no_arguments", "{}"),)),
    Recorded("hermes", '<tool_call>{"name": "no_arguments"}</tool_call>', "", (("no_arguments", "{}"),)),
    Recorded("hermes", f'<tool_call>{{"arguments": {PARIS}, "name": "get_weather"}}</tool_call>', "", (WEATHER,)),
    Recorded(
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}</tool_call>',
        "",
        (WEATHER,),
    ),
    Recorded("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}</tool_call>', "", (WEATHER,)),
    Recorded("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}', "", (WEATHER,)),
    Recorded(
        "hermes",
        f'<tool_call>{{"id": [1, {{}}], "name": "get_weather", "arguments": {PARIS}, "x": "}}"}}</tool_call>',
        "",
        (WEATHER,),
    ),
    Recorded(
        "hermes",
        '<tool_call>{"name": "write-file", "arguments": {"text": "a\n\tb"}}</tool_call>',
        "",
        (("write-file", '{"text": "a\\n\\tb"}'),),
    ),
    # malformed: text, whole
    Recorded("hermes", "<tool_call>get_weather(Paris)</tool_call>", "<tool_call>get_weather(Paris)</tool_call>", ()),
    Recorded("hermes", _hermes("unknown", PARIS), _hermes("unknown", PARIS), ()),
    Recorded("hermes", _hermes("get_weather", '"Paris"'), _hermes("get_weather", '"Paris"'), ()),
    Recorded("hermes", "a < b <tool <tool_call", "a < b <tool <tool_call", ()),
    Recorded("hermes", "The tag <tool_call> opens a call. ", "The tag <tool_call> opens a call. ", ()),
    Recorded("hermes", '<tool_call>{"name": "get_w', '<tool_call>{"name": "get_w', ()),
    Recorded("hermes", "<tool_call>" + _hermes(*WEATHER), "<tool_call>", (WEATHER,)),
    Recorded("hermes", "</tool_call> before", "</tool_call> before", ()),
    # broken once given out: taken back, and text
    Recorded("hermes", _hermes("get_weather", '{"city": Paris}'), _hermes("get_weather", '{"city": Paris}'), ()),
    Recorded(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa',
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa',
        (),
    ),
    # Llama 3
    Recorded("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS}}}', "", (WEATHER,)),
    Recorded("llama3_json", f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}', "", (WEATHER,)),
    Recorded(
        "llama3_json",
        f'\n{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}; '
        f'{{"name": "get_weather", "parameters": {ROME}}}',
        "",
        (WEATHER, ("get_weather", ROME)),
    ),
    Recorded(
        "llama3_json",
        f'{{"type": "function", "function": {{"name": "write-file", "parameters": {HARD_TEXT}}}}}',
        "",
        (("write-file", HARD_TEXT),),
    ),
    Recorded(
        "llama3_json", f'I think {{"name": "get_weather"}} {PARIS}', f'I think {{"name": "get_weather"}} {PARIS}', ()
    ),
    Recorded("llama3_json", '{"city": "Paris", "name": "x"}', '{"city": "Paris", "name": "x"}', ()),
    Recorded("llama3_json", '{"name": "get_weather"}', '{"name": "get_weather"}', ()),
    Recorded("llama3_json", '<|python_tag|>print("x")', '<|python_tag|>print("x")', ()),
    Recorded("llama3_json", "  {", "  {", ()),
    # Mistral, old and new
    Recorded("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]', "", (WEATHER,)),
    Recorded(
        "mistral",
        f'Yes. [TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}, "id": "a1"}}, '
        f'{{"name": "write-file", "arguments": {HARD_TEXT}}}]\n',
        "Yes.",
        (WEATHER, ("write-file", HARD_TEXT)),
    ),
    Recorded("mistral", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", "", (WEATHER,)),
    Recorded("mistral", f"[TOOL_CALLS]get_weather{PARIS}", "", (WEATHER,)),
    Recorded(
        "mistral",
        f"[TOOL_CALLS]get_weather[CALL_ID]abc123xyz[ARGS]{PARIS}[TOOL_CALLS]write-file[ARGS]{HARD_TEXT}",
        "",
        (WEATHER, ("write-file", HARD_TEXT)),
    ),
    Recorded("mistral", "[TOOL_CALLS] none", "[TOOL_CALLS] none", ()),
    Recorded(
        "mistral",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}, {{"nam',
        ', {"nam',
        (WEATHER,),
    ),
    Recorded("mistral", "[1, 2] [TOOL", "[1, 2] [TOOL", ()),
    # DeepSeek V3 and R1, then V3.1
    Recorded("deepseek", f"<｜tool▁calls▁begin｜>{_deepseek(*WEATHER)}<｜tool▁calls▁end｜>", "", (WEATHER,)),
    Recorded(
        "deepseek",
        f"Well.\n\n<｜tool▁calls▁begin｜>{_deepseek(*WEATHER)}\n"
        f"{_deepseek('write-file', HARD_TEXT)}<｜tool▁calls▁end｜>",
        "Well.",
        (WEATHER, ("write-file", HARD_TEXT)),
    ),
    Recorded(
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>search.web<｜tool▁sep｜>{HARD_TEXT}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        (WEATHER, ("search.web", HARD_TEXT)),
    ),
    Recorded("deepseek", "<｜tool▁calls▁begin｜>nothing", "<｜tool▁calls▁begin｜>nothing", ()),
    # plain JSON
    Recorded("plain_json", f'{{"name": "get_weather", "arguments": {PARIS}}}', "", (WEATHER,)),
    Recorded("plain_json", f'```json\n{{"name": "get_weather", "parameters": {PARIS}}}\n```', "", (WEATHER,)),
    Recorded(
        "plain_json",
        f'[{{"name": "get_weather", "arguments": {PARIS}}},\n {{"name": "write-file", "arguments": {HARD_TEXT}}}]',
        "",
        (WEATHER, ("write-file", HARD_TEXT)),
    ),
    Recorded("plain_json", '```json\n{"answer": 1}\n```', '```json\n{"answer": 1}\n```', ()),
    Recorded("plain_json", "[1, 2, 3]", "[1, 2, 3]", ()),
    Recorded("plain_json", "", "", ()),
    Recorded("plain_json", " \n ", " \n ", ()),
)


def written(form: str, calls: list[tuple[str, Any]]) -> str:
    """These calls as the format wants them."""
    texts = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    match form:
        case "hermes":
            return "\n".join(_hermes(*call) for call in texts)
        case "llama3_json":
            return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in texts)
        case "mistral":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in texts)
        case "deepseek":
            return f"<｜tool▁calls▁begin｜>{''.join(_deepseek(*call) for call in texts)}<｜tool▁calls▁end｜>"
    return "[" + ", ".join(f'{{"name": "{name}", "arguments": {text}}}' for name, text in texts) + "]"
