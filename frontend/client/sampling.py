"""How to choose tokens, as a user says it; `settle` turns it into what the engine core needs."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ...ipc.configuration import RequestLimits
from ...ipc.frontend_messages import RejectKind
from ...ipc.sampling import Sampling
from ..text.model_text import ModelText
from .constraints import StructuredOutputs
from .refusals import RequestRefused

_PATH = re.compile(r"`\$\.?([^`]+)`")
_GREEDY_BELOW = 1e-4  # logits divided by less say nothing that the largest does not, and may overflow
INT32_MAX = 2**31 - 1
_WORD = 2**64 - 1

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=INT32_MAX, description="0 or -1: off")]
MinP = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=100)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
BadWord = Annotated[str, Meta(min_length=1, max_length=128)]
AllowedTokenIds = Annotated[tuple[TokenId, ...], Meta(min_length=1)]
TokenCount = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class SamplingParams(Struct, frozen=True, kw_only=True):
    """Sampling of one request. A field left None takes the model's default (generation_config.json), else the API's.

    `logprobs` and `prompt_logprobs` are the number of alternatives per token; 0 gives only the token's own.
    `max_tokens` None means: as many as fit. `detokenize` False makes token ids only: the text stays empty.
    `structured_outputs` constrains the answer. Only `allowed_token_ids` may come, the end where it is one of them;
    `bad_words` may not come, as the tokenizer writes them, alone or behind a space.
    """

    n: Annotated[int, Meta(ge=1, le=INT32_MAX)] = 1
    max_tokens: TokenCount | None = None
    min_tokens: Count = 0
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty | None = None
    stop: StopString | tuple[StopString, ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: dict[TokenId, Bias] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: tuple[BadWord, ...] = ()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, however they were given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def checked(self) -> "SamplingParams":
        """The same, with every type and bound checked. Raises RequestRefused naming the field and its bounds."""
        for name in self.__struct_fields__:
            _check_finite(name, getattr(self, name))
        try:
            checked = msgspec.convert(msgspec.to_builtins(self, str_keys=False), SamplingParams)
        except msgspec.ValidationError as error:
            raise refusal_of(error) from None
        if checked.stop_strings and not checked.detokenize:
            raise RequestRefused(
                "stop: stop strings are looked for in the text, and without detokenizing there is none; give "
                "stop_token_ids, or leave detokenize True",
                param="stop",
            )
        return checked


class TokenRoom(Struct, frozen=True):
    """What a prompt leaves of the context, and the engine's vocabulary."""

    prompt_tokens: int
    max_model_len: int
    vocab_size: int
    default_max_tokens: int | None = None


def refusal_of(error: msgspec.ValidationError) -> RequestRefused:
    """A validation error as a refusal that names the field."""
    text, _, place = str(error).partition(" - at ")
    found = _PATH.search(place)
    param = found[1] if found is not None else None
    return RequestRefused(f"{param}: {text}" if param else text, param=param)


def check_limits(params: SamplingParams, limits: RequestLimits) -> None:
    """Refuse what would cost one request too much. Raises RequestRefused naming the field and the limit."""
    bounded = {
        "n": (params.n, limits.max_n),
        "logprobs": (params.logprobs or 0, limits.max_logprobs),
        "prompt_logprobs": (params.prompt_logprobs or 0, limits.max_logprobs),
        "stop": (len(params.stop_strings), limits.max_stop_strings),
        "stop_token_ids": (len(params.stop_token_ids), limits.max_stop_token_ids),
        "logit_bias": (len(params.logit_bias or ()), limits.max_logit_bias),
        "bad_words": (len(params.bad_words), limits.max_bad_words),
    }
    for name, (asked, limit) in bounded.items():
        if asked > limit:
            raise RequestRefused(f"{name}: {asked} is above this server's limit of {limit}", param=name)


def check_prompt_logprobs(params: SamplingParams, num_prompt_tokens: int, limits: RequestLimits) -> None:
    """Refuse an answer that would fill the memory and hold up everybody. Raises RequestRefused naming the limit."""
    if params.prompt_logprobs is None:
        return
    num_entries = num_prompt_tokens * params.n * (params.prompt_logprobs + 1)
    if num_entries > limits.max_prompt_logprob_entries:
        raise RequestRefused(
            f"prompt_logprobs: {num_prompt_tokens} prompt tokens times n {params.n} times "
            f"{params.prompt_logprobs + 1} log-probabilities are {num_entries}, above the limit of "
            f"{limits.max_prompt_logprob_entries}; ask for fewer",
            param="prompt_logprobs",
        )


def settle(params: SamplingParams, model: ModelText, room: TokenRoom) -> Sampling:
    """The engine's sampling. Output is capped at what the context leaves. Raises RequestRefused."""
    defaults = model.defaults
    _check_ids(params, room.vocab_size)
    max_tokens = _max_tokens(params, room)
    temperature = _first(params.temperature, defaults.temperature, 1.0)
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=_min_tokens(params, max_tokens),
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=_first(params.top_p, defaults.top_p, 1.0),
        top_k=max(0, int(_first(params.top_k, defaults.top_k, 0))),
        min_p=_first(params.min_p, defaults.min_p, 0.0),
        seed=None if params.seed is None else params.seed & _WORD,  # a negative one: its two's complement
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=_first(params.repetition_penalty, defaults.repetition_penalty, 1.0),
        end_token_ids=() if params.ignore_eos else model.end_token_ids,
        stop_token_ids=params.stop_token_ids,
        logit_bias=tuple((params.logit_bias or {}).items()),
        num_logprobs=params.logprobs,
        num_prompt_logprobs=params.prompt_logprobs,
        allowed_token_ids=params.allowed_token_ids or (),
        bad_token_ids=_bad_token_ids(params.bad_words, model),
    )


def _bad_token_ids(words: tuple[str, ...], model: ModelText) -> tuple[tuple[int, ...], ...]:
    """Each word as it begins a text and as it follows another one."""
    texts = [text for word in words for text in (word, f" {word}")]
    runs = [tuple(model.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    return tuple(dict.fromkeys(run for run in runs if run))


def check_prompt(prompt_token_ids: list[int], params: SamplingParams, room: TokenRoom, param: str) -> None:
    """Refuse an empty or over-long prompt and foreign ids. Raises RequestRefused."""
    if not prompt_token_ids:
        raise RequestRefused(f"{param}: the prompt is empty; send at least one token", param=param)
    if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= room.vocab_size:
        wrong = next(id for id in prompt_token_ids if not 0 <= id < room.vocab_size)
        raise RequestRefused(
            f"{param}: token id {wrong} is outside this model's vocabulary of {room.vocab_size}", param=param
        )
    if room.prompt_tokens >= room.max_model_len:
        asked = "no max_tokens was" if params.max_tokens is None else f"max_tokens of {params.max_tokens} was"
        raise RequestRefused(
            f"this model's context is {room.max_model_len} tokens; the prompt has {room.prompt_tokens} tokens and "
            f"{asked} requested; shorten the prompt to at most {room.max_model_len - 1} tokens",
            param=param,
            kind=RejectKind.TOO_LONG,
        )


def _max_tokens(params: SamplingParams, room: TokenRoom) -> int:
    fits = room.max_model_len - room.prompt_tokens
    if params.max_tokens is not None:
        return min(params.max_tokens, fits)
    return fits if room.default_max_tokens is None else min(room.default_max_tokens, fits)


def _min_tokens(params: SamplingParams, max_tokens: int) -> int:
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestRefused(
            f"min_tokens: {params.min_tokens} is above max_tokens, {params.max_tokens}", param="min_tokens"
        )
    return min(params.min_tokens, max_tokens)


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    named: Mapping[str, Any] = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    for name, ids in named.items():
        if len(ids) > vocab_size:
            raise RequestRefused(
                f"{name}: {len(ids)} ids are more than this model's vocabulary of {vocab_size} holds; send each once",
                param=name,
            )
        for id in ids:
            if not 0 <= id < vocab_size:
                raise RequestRefused(
                    f"{name}: token id {id} is outside this model's vocabulary of {vocab_size}", param=name
                )


def _first(asked: float | None, default: float | None, otherwise: float) -> float:
    if asked is not None:
        return asked
    return otherwise if default is None else default


def _check_finite(name: str, value: Any) -> None:
    numbers = value.values() if isinstance(value, dict) else [value]
    for number in numbers:
        if isinstance(number, float) and not math.isfinite(number):
            raise RequestRefused(f"{name}: {number} is not a finite number", param=name)
