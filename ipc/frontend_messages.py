"""Between a frontend and the engine core. Token ids travel as raw int32 frames, outputs as packed columns."""

from enum import IntEnum, StrEnum
from typing import Any

import numpy as np

from .columns import Column, Columns, ColumnSchema
from .messages import Decoder, Message
from .metrics import MetricFamily
from .sampling import Grammar, Sampling
from .server_info import EngineLimits, ServerInfo


class FinishReason(IntEnum):
    """How one sequence ended, as the core saw it (uint8 in Outputs)."""

    NONE = 0
    END_TOKEN = 1
    STOP_TOKEN = 2
    LENGTH = 3
    ABORTED = 4  # at its frontend's wish: the frontend's own stop strings, or a client that left
    POOLED = 5  # with a vector instead of tokens


class RejectKind(StrEnum):
    """Why a request was turned away at the door."""

    INVALID = "invalid"
    TOO_LONG = "too_long"
    QUEUE_FULL = "queue_full"
    UNAVAILABLE = "unavailable"
    GRAMMAR = "grammar"  # its constraint cannot be honoured


class FailKind(StrEnum):
    """Why an accepted request could not be finished."""

    WORKER_LOST = "worker_lost"
    CORE_LOST = "core_lost"
    STEP_FAILED = "step_failed"
    INVALID_LOGITS = "invalid_logits"
    GRAMMAR = "grammar"  # its constraint became too complex on the way
    SHUTDOWN = "shutdown"


class Hello(Message, frozen=True, tag="hello"):
    """A frontend presents itself; idempotent. The core answers with EngineState."""

    index: int
    incarnation: int


class Vocabulary(Message, frozen=True, tag="vocabulary"):
    """What each token is as bytes: grammars constrain the very bytes that clients are shown. Sent once to each core.

    Frames: the bytes of all tokens by id, joined; their lengths, int32. `control_ids` are no text, whatever bytes they
    have; `end_ids` end an answer.
    """

    control_ids: tuple[int, ...]
    end_ids: tuple[int, ...]


class Submit(Message, frozen=True, tag="submit"):
    """A request. Its frame: the prompt's token ids, int32. `request_id` is unique over all frontends and restarts.

    `core_incarnation` names the core this was meant for; another core drops it, because its sender has already
    failed it. `arrival_s` is CLOCK_MONOTONIC at the frontend's door. `pools`: a vector is wanted instead of tokens.
    """

    request_id: int
    core_incarnation: int
    sampling: Sampling
    num_sequences: int = 1
    priority: int = 0
    arrival_s: float = 0.0
    cache_salt: str | None = None
    adapter: str | None = None
    pools: bool = False
    grammar: Grammar | None = None


class Abort(Message, frozen=True, tag="abort"):
    """End a request. It still gets its one terminal message."""

    request_id: int


class FinishSequence(Message, frozen=True, tag="finish_sequence"):
    """End one sequence of a request (a stop string was found); the others go on."""

    request_id: int
    choice: int


class Report(Message, frozen=True, tag="report"):
    """A frontend's own metrics, cumulative since its start."""

    index: int
    incarnation: int
    families: tuple[MetricFamily, ...]


class MetricsRequest(Message, frozen=True, tag="metrics_request"):
    """Ask for the totals; `query_id` comes back in the reply."""

    query_id: int


class InfoRequest(Message, frozen=True, tag="info_request"):
    """Ask for what /v1/server_info shows."""

    query_id: int


class ResetPrefixCache(Message, frozen=True, tag="reset_prefix_cache"):
    """Forget cached content that no live sequence holds."""

    query_id: int


class EngineState(Message, frozen=True, tag="engine_state"):
    """The core's word on itself: once a second, and at every change. Its age says whether the core lives.

    `ready` means: can make a token now. `reason` says why not, in words for a user.
    """

    incarnation: int
    generation: int
    ready: bool
    reason: str
    limits: EngineLimits | None = None
    num_running: int = 0
    num_waiting: int = 0
    draining: bool = False
    retry_after_s: float = 1.0


class Outputs(Message, frozen=True, tag="outputs"):
    """New tokens of this frontend's sequences from one step. Its frame: packed OutputColumns."""


class Rejected(Message, frozen=True, tag="rejected"):
    """Terminal: the request was turned away at the door."""

    request_id: int
    kind: RejectKind
    text: str
    retry_after_s: float | None = None


class Failed(Message, frozen=True, tag="failed"):
    """Terminal: these requests were accepted and cannot be finished."""

    request_ids: tuple[int, ...]
    kind: FailKind
    text: str


class MetricsReply(Message, frozen=True, tag="metrics_reply"):
    """The totals over the core and all frontends."""

    query_id: int
    families: tuple[MetricFamily, ...]


class InfoReply(Message, frozen=True, tag="info_reply"):
    """Answers InfoRequest and ResetPrefixCache."""

    query_id: int
    info: ServerInfo


ToCore = Hello | Vocabulary | Submit | Abort | FinishSequence | Report | MetricsRequest | InfoRequest | ResetPrefixCache
ToFrontend = EngineState | Outputs | Rejected | Failed | MetricsReply | InfoReply

TO_CORE: Decoder[ToCore] = Decoder(ToCore)
TO_FRONTEND: Decoder[ToFrontend] = Decoder(ToFrontend)

_OUTPUTS: dict[str, Any] = {
    # [n] each: one entry per sequence with news in this step
    "request_ids": np.int64,
    "choices": np.int32,
    "token_counts": np.int32,
    "finish": np.uint8,  # FinishReason
    "done": np.uint8,  # 1: the request's terminal message; it has no live sequence left
    "cached_tokens": np.int32,  # prompt tokens that came from the prefix cache, with the first token; else 0
    "token_ids": np.int32,  # flat
    # log-probabilities of the tokens above, for sequences that asked: [n] counts (0 or token_counts), then flat
    "logprob_counts": np.int32,
    "logprobs": np.float32,
    "ranks": np.int32,
    "top_counts": np.int32,  # per logprob entry, then flat:
    "top_ids": np.int32,
    "top_logprobs": np.float32,
    # prompt log-probabilities computed in this step: [n] counts of positions, [n] alternatives per position, then flat
    "prompt_counts": np.int32,
    "prompt_top_counts": np.int32,
    "prompt_logprobs": np.float32,
    "prompt_ranks": np.int32,
    "prompt_top_ids": np.int32,
    "prompt_top_logprobs": np.float32,
    # pooled vectors: [n] dimensions (0: none), then flat
    "pooled_dims": np.int32,
    "pooled": np.float32,
}


class OutputColumns(Columns):
    """One step's news for one frontend, in the frame of an Outputs message."""

    SCHEMA = ColumnSchema(_OUTPUTS)
    request_ids: Column
    choices: Column
    token_counts: Column
    finish: Column
    done: Column
    cached_tokens: Column
    token_ids: Column
    logprob_counts: Column
    logprobs: Column
    ranks: Column
    top_counts: Column
    top_ids: Column
    top_logprobs: Column
    prompt_counts: Column
    prompt_top_counts: Column
    prompt_logprobs: Column
    prompt_ranks: Column
    prompt_top_ids: Column
    prompt_top_logprobs: Column
    pooled_dims: Column
    pooled: Column
