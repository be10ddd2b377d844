"""Text completions."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ...client.sampling import Count
from .generation import GenerationFields, NumLogprobs, OptionalPromptLogprobs, Usage


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions. `prompt`: a text, texts, one prompt's token ids, or several prompts' token ids."""

    prompt: str | list[int | str | list[int]]
    max_tokens: Count | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    suffix: str | None = None
    thinking_token_budget: Any = None
    add_special_tokens: bool | None = None


class CompletionLogprobs(Struct, frozen=True):
    """Four lists of equal length, an entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    prompt_logprobs: OptionalPromptLogprobs = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """A plain answer."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"
