"""Chat completions."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ...client.sampling import Count, TokenCount
from ...client.tool_use import ToolWishes
from ...client.tools import Tool, ToolCall, ToolChoice, Tools
from .generation import NumLogprobs, OptionalPromptLogprobs, UnsupportedInChat, Usage


class ContentPart(Struct, frozen=True):
    """One part of a message. Only text parts are supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(Struct, frozen=True, kw_only=True):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1)]


class ChatInput(Struct, kw_only=True):
    """What a chat template makes a prompt of."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    documents: list[dict[str, Any]] | None = None


class ChatRequest(UnsupportedInChat, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Count | None = None
    documents: list[dict[str, Any]] | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    def tool_wishes(self) -> ToolWishes:
        """The tools, and how they are to be called."""
        return ToolWishes(tools=self.tools or (), choice=self.tool_choice, parallel=self.parallel_tool_calls)

    def chat(self) -> ChatInput:
        """The conversation."""
        return ChatInput(
            messages=self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=list(self.tool_wishes().shown),
            documents=self.documents,
        )


class TopLogprob(Struct, frozen=True):
    """One candidate token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct, frozen=True):
    """One token of the answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Log-probabilities of an answer's tokens."""

    content: list[ChatTokenLogprob]


class AssistantMessage(Struct, frozen=True):
    """The answer. `content` is null where there is reasoning or a call and no text. `reasoning`: the same by the name
    that vLLM uses.
    """

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """A plain answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: OptionalPromptLogprobs = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
