"""Tokens of a text, and back."""

from typing import Any

from msgspec import Struct

from ...client.refusals import RequestRefused
from ...client.tools import Tool
from .chat import ChatMessage


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize: of `prompt`, or of `messages` through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    documents: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raises RequestRefused unless exactly one input is given."""
        if (self.prompt is None) == (not self.messages):
            raise RequestRefused("give either prompt or messages", param="prompt")


class TokenizeResponse(Struct, frozen=True, kw_only=True):
    """The ids."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(Struct, frozen=True):
    """The text."""

    prompt: str
