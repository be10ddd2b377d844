"""Fields and answers that chat and text completions share."""

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from ...client.refusals import RequestRefused
from ...client.sampling import (
    AllowedTokenIds,
    BadWord,
    Bias,
    Count,
    MinP,
    Penalty,
    RepetitionPenalty,
    SamplingParams,
    Seed,
    StopString,
    Temperature,
    TokenId,
    TopK,
    TopP,
)
from .unsupported import UnsupportedInGeneration

INT32_MAX = 2**31 - 1
NumChoices = Annotated[int, Meta(ge=1, le=INT32_MAX)]
NumLogprobs = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Priority = Annotated[int, Meta(ge=-(2**31), le=INT32_MAX, description="lower runs earlier")]
NumKept = Annotated[
    int, Meta(ge=-1, le=INT32_MAX, description="the last so many tokens of the prompt; -1: as many as fit")
]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(Struct, frozen=True):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(UnsupportedInGeneration, kw_only=True):
    """Sampling and handling, the same for every generating route."""

    model: str | None = None
    n: NumChoices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    min_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop: StopString | list[StopString] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: list[BadWord] | None = None
    prompt_logprobs: NumLogprobs | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: NumKept | None = None
    return_token_ids: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    user: str | None = None

    def check_stream_fields(self) -> None:
        """Raises RequestRefused for fields that contradict `stream`."""
        if self.stream_options is not None and not self.stream:
            raise RequestRefused("stream_options: only allowed with stream true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestRefused("prompt_logprobs: not available in a stream", param="prompt_logprobs")

    def sampling(self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """As the engine client takes it."""
        stop = self.stop or ()
        return SamplingParams(
            n=self.n or 1,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty,
            stop=stop if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=tuple(self.bad_words or ()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens is not False,
        )


class UnsupportedInChat(GenerationFields, kw_only=True):
    """Fields of chat only that are refused; see unsupported.CHAT."""

    best_of: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning: Any = None
    reasoning_effort: Any = None
    thinking: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    mm_processor_kwargs: Any = None
    echo: Any = None
    add_special_tokens: Any = None


class PromptTokensDetails(Struct, frozen=True):
    """Prompt tokens that the prefix cache held, and those that were cut off it, where that was asked for."""

    cached_tokens: int
    truncated_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(Struct, frozen=True):
    """Output tokens that were reasoning, its tags included."""

    reasoning_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of a request. `completion_tokens_details`: where the model may reason."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    *,
    reasoning_tokens: int | None = None,
    truncated_tokens: int | None = None,
) -> Usage:
    """The sum is made here and nowhere else."""
    return Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        PromptTokensDetails(cached_tokens, UNSET if truncated_tokens is None else truncated_tokens),
        UNSET if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens),
    )


class PromptLogprob(Struct, frozen=True):
    """One candidate at one position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


# Per position of the prompt: candidates by token id; the first position has none.
PromptLogprobs = list[dict[int, PromptLogprob] | None]
OptionalPromptLogprobs = PromptLogprobs | UnsetType
NO_PROMPT_LOGPROBS = UNSET
