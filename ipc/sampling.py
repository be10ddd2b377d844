"""How to choose tokens, as the engine core and the workers need it: integers and floats only."""

from typing import Any

from msgspec import Struct


class ThoughtLimit(Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """How many tokens a model may reason: then the token that ends its reasoning is the only one that may come.

    Tokens between the two tags count. `start_id`: an output that does not begin with it has no reasoning; None: the
    prompt has begun the reasoning.
    """

    max_tokens: int
    end_id: int
    start_id: int | None = None


class Sampling(Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Settled, validated sampling of one request. Text (stop strings) stays in the frontend.

    `end_token_ids` are the model's own ends (ignored when the user asked to ignore them: then empty);
    `stop_token_ids` are the user's. Both end a sequence; the first kind is never shown as text.
    `max_tokens` counts output tokens and is always set. Temperature 0 is greedy. `top_k` 0 is off.
    `seed` is an unsigned word of 64 bits. `allowed_token_ids` are the only ones that may be sampled, unless there are
    none; of `bad_token_ids` no run may come in the output. `thought` goes before both.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    end_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    thought: ThoughtLimit | None = None


class CallGrammar(Struct, frozen=True, kw_only=True):
    """Tool calls as a model writes them: `begin`, calls with `separator` between them, `end`. A piece is a text, or the
    id of a control token.

    `calls` has for each tool what comes before its arguments, the JSON schema of these, and what comes behind.
    `is_many`: several calls may come. `is_optional`: text may come before calls and instead of them, until it holds
    `mark`, which is what all calls begin with. `answer`: the JSON schema of what may come instead of calls.
    """

    calls: list[tuple[list[str | int], Any, list[str | int]]]
    begin: list[str | int] = []
    separator: list[str | int] = []
    end: list[str | int] = []
    is_many: bool = True
    is_optional: bool = False
    mark: str | int = ""
    answer: Any = None


class Grammar(Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A constraint on the output. `kind` is one of json_schema, json_object, regex, choice, lark,
    tool_calls (`source` is then the JSON of CallGrammar).

    `starts_after`: the output is free until it holds these token ids in a row (the end of a model's reasoning); empty:
    it is constrained from its first token. `opened_by`: there is such a free part only where the output begins with
    this token id; None: there is one.
    """

    kind: str
    source: str
    starts_after: tuple[int, ...] = ()
    opened_by: int | None = None
