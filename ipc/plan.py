"""What travels through the rings: plans to the workers, token masks to the workers, results back.

All are sets of numpy columns. A worker keeps *rows*: for each sequence its block table, sampling parameters, last
sampled token. A plan carries only what changed. Shapes below: W work items (sequences in this step, decodes first),
T prompt tokens carried, N new rows, K block grants, S sampled rows, P rows with prompt logprobs.

Order in which a worker applies a plan: `freed_rows`, then `new_rows`, then block grants, then the work items.
"""

from enum import IntEnum, IntFlag
from hashlib import blake2b
from typing import Any

import numpy as np

from .columns import Column, Columns, ColumnSchema


class RingKind(IntEnum):
    """What a ring slot holds."""

    PLAN = 1
    MASKS = 2
    RESULT = 3
    OVERSIZED = 4  # the payload follows as a ZeroMQ frame that names this slot's sequence number
    FAILED = 5  # in place of a result: a msgpack StepError


class WorkFlag(IntFlag):
    """One work item's meaning (uint8)."""

    SAMPLES = 1  # its last position yields a token
    FROM_DEVICE = 2  # its one input token is the row's last sampled token, already on the device
    PROMPT_LOGPROBS = 4  # the log-probabilities of `targets` are wanted for its positions
    MASKED = 8  # its logits wait for the allowed-token mask of TokenMasks
    POOLS = 16  # its hidden states feed the row's pooling instead of a sampled token


class RowFlag(IntFlag):
    """What a new row asks for beyond plain sampling (uint32)."""

    GREEDY = 1
    LOGPROBS = 2
    PENALTIES = 4
    BIAS = 8
    MIN_TOKENS = 16
    POOLING = 32


class ResultFlag(IntFlag):
    """What befell one sampled row (uint8)."""

    INVALID = 1  # its logits were not finite: the sequence fails, the others do not


_PLAN = {
    "step": np.int64,  # [1] step id
    # work items, [W] each, in batch order
    "rows": np.int32,
    "starts": np.int32,  # position of the first token computed now = tokens of the row computed before
    "counts": np.int32,  # tokens computed now
    "flags": np.uint8,  # WorkFlag
    "token_ids": np.int32,  # [T] inputs of the items without FROM_DEVICE, in work order
    "targets": np.int32,  # next-token ids of the items with PROMPT_LOGPROBS, flat
    "target_counts": np.int32,  # targets of each item with PROMPT_LOGPROBS: `counts`, or one fewer at the prompt's end
    # block grants, in order: the blocks of `block_ids` extend the row's table from index `block_firsts`
    "block_rows": np.int32,  # [K]
    "block_firsts": np.int32,  # [K]
    "block_counts": np.int32,  # [K]
    "block_ids": np.int32,
    "freed_rows": np.int32,
    # new rows, [N] each
    "new_rows": np.int32,
    "request_ids": np.int64,
    "choices": np.int32,  # index of the sequence within its request; keys the draws together with seed and position
    "row_flags": np.uint32,  # RowFlag
    "temperatures": np.float32,
    "top_ps": np.float32,
    "top_ks": np.int32,  # 0: off
    "min_ps": np.float32,
    "presence_penalties": np.float32,
    "frequency_penalties": np.float32,
    "repetition_penalties": np.float32,
    "seeds": np.uint64,
    "num_logprobs": np.int32,  # top alternatives per sampled token, with LOGPROBS
    "num_prompt_logprobs": np.int32,  # top alternatives per prompt token
    "prompt_lengths": np.int32,  # tokens of the prompt, so that output position = position - prompt length
    "min_lengths": np.int32,  # total length below which the banned ids may not be sampled, with MIN_TOKENS
    "bias_counts": np.int32,  # [N] then flat:
    "bias_ids": np.int32,
    "bias_values": np.float32,
    "banned_counts": np.int32,  # [N] then flat:
    "banned_ids": np.int32,
    # token history of the new rows with PENALTIES, prompt then output; [number of such rows] and flat
    "history_prompt_counts": np.int32,
    "history_output_counts": np.int32,
    "history_ids": np.int32,
}


class StepPlan(Columns):
    """One step's work, as the core planned it. See the module docstring for shapes and order."""

    SCHEMA = ColumnSchema(_PLAN)
    step: Column
    rows: Column
    starts: Column
    counts: Column
    flags: Column
    token_ids: Column
    targets: Column
    target_counts: Column
    block_rows: Column
    block_firsts: Column
    block_counts: Column
    block_ids: Column
    freed_rows: Column
    new_rows: Column
    request_ids: Column
    choices: Column
    row_flags: Column
    temperatures: Column
    top_ps: Column
    top_ks: Column
    min_ps: Column
    presence_penalties: Column
    frequency_penalties: Column
    repetition_penalties: Column
    seeds: Column
    num_logprobs: Column
    num_prompt_logprobs: Column
    prompt_lengths: Column
    min_lengths: Column
    bias_counts: Column
    bias_ids: Column
    bias_values: Column
    banned_counts: Column
    banned_ids: Column
    history_prompt_counts: Column
    history_output_counts: Column
    history_ids: Column


_MASKS = {
    "step": np.int64,  # [1]
    "rows": np.int32,  # [M] rows flagged MASKED in that step's plan, in work order
    "words": np.uint32,  # [M * words per row], bit i of word j allows token 32 * j + i
}


class TokenMasks(Columns):
    """Allowed tokens for the MASKED items of one step: what `sample` waits for and `forward` does not."""

    SCHEMA = ColumnSchema(_MASKS)
    step: Column
    rows: Column
    words: Column


_RESULT = {
    "step": np.int64,  # [1]
    "rows": np.int32,  # [S] the items with SAMPLES, in work order
    "token_ids": np.int32,  # [S]
    "flags": np.uint8,  # [S] ResultFlag
    "tokens_hash": np.uint64,  # [1] of rows and tokens: every rank must send the same
    "seconds": np.float64,  # [4] build batch, forward, sample, copy back
    # log-probabilities of the sampled tokens, for rows with LOGPROBS in work order
    "logprob_rows": np.int32,  # [L]
    "logprobs": np.float32,  # [L] of the sampled token, from raw logits
    "ranks": np.int32,  # [L] 1 = most likely
    "top_counts": np.int32,  # [L] then flat:
    "top_ids": np.int32,
    "top_logprobs": np.float32,
    # the same for prompt positions, for items with PROMPT_LOGPROBS in work order, one entry per target
    "prompt_rows": np.int32,  # [P]
    "prompt_counts": np.int32,  # [P] targets of each
    "prompt_top_counts": np.int32,  # [P] alternatives per target
    "prompt_logprobs": np.float32,
    "prompt_ranks": np.int32,
    "prompt_top_ids": np.int32,
    "prompt_top_logprobs": np.float32,
    # pooled vectors
    "pooled_rows": np.int32,
    "pooled_dims": np.int32,
    "pooled": np.float32,
}


class StepResult(Columns):
    """What one step sampled. Only rank 0's tokens count; the others prove that theirs are the same."""

    SCHEMA = ColumnSchema(_RESULT)
    step: Column
    rows: Column
    token_ids: Column
    flags: Column
    tokens_hash: Column
    seconds: Column
    logprob_rows: Column
    logprobs: Column
    ranks: Column
    top_counts: Column
    top_ids: Column
    top_logprobs: Column
    prompt_rows: Column
    prompt_counts: Column
    prompt_top_counts: Column
    prompt_logprobs: Column
    prompt_ranks: Column
    prompt_top_ids: Column
    prompt_top_logprobs: Column
    pooled_rows: Column
    pooled_dims: Column
    pooled: Column


def hash_tokens(rows: np.ndarray[Any, Any], token_ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[1] uint64 that differs when any (row, token) pair or their order differs, with high probability."""
    digest = blake2b(rows.astype(np.int32, copy=False).tobytes(), digest_size=8)
    digest.update(token_ids.astype(np.int32, copy=False).tobytes())
    return np.frombuffer(digest.digest(), np.uint64)
