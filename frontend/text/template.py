"""Chat templates: messages to one text, in a sandbox with limits.

The reference is how the `transformers` library renders a model's template; tests compare ids with it.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...ipc.conditions import TrimaranError
from .tokenizer import Tokenizer

_TIME_LIMIT_S = 5.0
_SIZE_LIMIT = 64 << 20  # characters
_REPEAT_LIMIT = 1 << 20  # of one string or list by `*`
_POWER_LIMIT = 4096

Message = dict[str, Any]


class TemplateRefusal(TrimaranError):
    """The template, or its limits, refused these messages."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant text for training; serving shows its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The library's sandbox with a clock: every call, attribute and item looks at it."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_deadline(context)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_deadline(context)
        if operator == "**" and (abs(left) > _POWER_LIMIT or abs(right) > _POWER_LIMIT):
            raise TemplateRefusal("the chat template computes a power that is too large")
        if operator == "*":
            _check_repeat(left, right)
        return super().call_binop(context, operator, left, right)


def _check_deadline(context: Any) -> None:
    deadline = context.get("__deadline_s")
    if deadline is not None and time.monotonic() > deadline:
        raise TemplateRefusal(f"the chat template ran longer than {_TIME_LIMIT_S:g} s")


def _check_repeat(left: Any, right: Any) -> None:
    for repeated, times in ((left, right), (right, left)):
        if (
            isinstance(repeated, (str, list, tuple))
            and isinstance(times, int)
            and len(repeated) * times > _REPEAT_LIMIT
        ):
            raise TemplateRefusal("the chat template repeats a text or list too often")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


_SANDBOX = _Sandbox()


class _Arguments(dict[str, Any]):
    """A call's arguments: an object for templates that want one, its JSON text for those that put a text together."""

    def __str__(self) -> str:
        return _to_json(self)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


class ChatTemplate:
    """One compiled template of one model. `render` is thread-safe."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        try:
            self._template = _SANDBOX.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateRefusal(f"the chat template does not compile: {error}") from error
        self._tokenizer = tokenizer
        self.source = source
        self.knows_developer = "developer" in source
        self.knows_documents = "documents" in source

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        control_tokens_in_content: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, for `Tokenizer.encode_rendered`.

        Control-token text in messages and arguments is broken, so that it stays text, unless
        `control_tokens_in_content`. Raises TemplateRefusal.
        """
        chat = [self._prepared(message, control_tokens_in_content) for message in messages]
        tag = f"{secrets.randbits(128)} "
        if continue_final_message:
            _append(chat, tag)
        extra = self._guarded(dict(arguments or {}), control_tokens_in_content)
        rendered = self._run(chat, add_generation_prompt and not continue_final_message, extra)
        return _cut_at(rendered, tag) if continue_final_message else rendered

    def _run(self, chat: list[Message], add_generation_prompt: bool, extra: dict[str, Any]) -> str:
        variables = {
            "tools": None,
            "documents": None,
            **self._tokenizer.special_texts.by_name,
            **extra,
            "messages": chat,
            "add_generation_prompt": add_generation_prompt,
            "__deadline_s": time.monotonic() + _TIME_LIMIT_S,
        }
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > _SIZE_LIMIT:
                    raise TemplateRefusal(f"the chat template made more than {_SIZE_LIMIT} characters")
                if time.monotonic() > variables["__deadline_s"]:
                    raise TemplateRefusal(f"the chat template ran longer than {_TIME_LIMIT_S:g} s")
        except TemplateRefusal:
            raise
        except Exception as error:  # a template may raise anything at all over unexpected messages
            raise TemplateRefusal(f"the chat template refused these messages: {error}") from error
        return "".join(pieces)

    def _prepared(self, message: Message, control_tokens_in_content: bool) -> Message:
        known = {name: value for name, value in message.items() if value is not None}
        if known.get("role") == "developer" and not self.knows_developer:
            known["role"] = "system"
        guarded: Message = self._guarded(known, control_tokens_in_content)
        for call in guarded.get("tool_calls", ()):
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
                function["arguments"] = _Arguments(function["arguments"])
        return guarded

    def _guarded(self, value: Any, control_tokens_in_content: bool) -> Any:
        if control_tokens_in_content:
            return value
        if isinstance(value, str):
            return self._tokenizer.break_controls(value)
        if isinstance(value, dict):
            return {self._guarded(name, False): self._guarded(item, False) for name, item in value.items()}
        if isinstance(value, list):
            return [self._guarded(item, False) for item in value]
        return value


def _append(chat: list[Message], tag: str) -> None:
    if not chat or not isinstance(chat[-1].get("content"), str):
        raise TemplateRefusal("continue_final_message needs a last message with text content")
    chat[-1]["content"] += tag


def _cut_at(rendered: str, tag: str) -> str:
    """Everything before the tag; where the template trimmed the tag's space, it trims the message's end too."""
    at = rendered.rfind(tag.rstrip())
    if at < 0:
        raise TemplateRefusal("the chat template drops the final message, so it cannot be continued")
    return rendered[:at] if rendered.startswith(tag, at) else rendered[:at].rstrip()


def find_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The model's default chat template: chat_template.jinja, else tokenizer_config.json."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, str):
        return found
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found if isinstance(entry, dict) and "name" in entry}
        return named.get("default")
    return None
