"""The tokens of the null platform: a pure function of content that is read through the block table, as a model reads
it.

The cache stores per slot a token id, that token's share of the content hash, and the hash of everything up to it. A
sequence that reads a slot another one overwrote gets other tokens than `expected_tokens` says. Numpy only.

W work items, T tokens, L longest length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...ipc.conditions import Refusal
from ...ipc.facts import PoolingFacts
from ...ipc.plan import ResultFlag, RowFlag, StepPlan, StepResult, TokenMasks, WorkFlag, hash_tokens
from ..execution.row_table import RowTable

Array = np.ndarray[Any, np.dtype[Any]]
MODES = ("hash", "echo", "cycle")
_POOLS = int(WorkFlag.POOLS)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, kw_only=True)
class NullScript:
    """What the null model says. `end_after` output tokens comes `end_id`, if given. Hash tokens are at least `low_id`.

    `reads` "all": a token depends on every cached slot of its sequence; "last": on the last one only, which is cheaper.
    """

    mode: str = "hash"
    cycle: tuple[int, ...] = ()
    end_after: int | None = None
    end_id: int = 2
    low_id: int = 100
    reads: str = "all"

    def __post_init__(self) -> None:
        if self.mode not in MODES or (self.mode == "cycle") != bool(self.cycle):
            raise Refusal(f"null script: mode is hash, echo or cycle:ID,ID,..., not {self.mode}")
        if self.reads not in ("all", "last"):
            raise Refusal(f"null script: reads is all or last, not {self.reads}")


def _mixed(values: Array) -> Array:
    """64 bits that look random (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * _MIX_A
        values = (values ^ (values >> np.uint64(27))) * _MIX_B
        mixed: Array = values ^ (values >> np.uint64(31))
    return mixed


def token_shares(token_ids: Array, positions: Array) -> Array:
    """Each token's share of the content hash; a sequence's hash is the sum over its tokens."""
    with np.errstate(over="ignore"):
        return _mixed(token_ids.astype(np.uint64) * _GOLDEN + positions.astype(np.uint64) * _MIX_A + _GOLDEN)


def hash_choice(hashes: Array, seeds: Array, choices: Array, vocab_size: int, low_id: int) -> Array:
    """The hash mode's token for each content hash; greedy sequences have seed 0 and choice 0."""
    low = low_id if vocab_size > 2 * low_id else 0
    with np.errstate(over="ignore"):
        salted = _mixed(hashes + seeds * _GOLDEN + choices.astype(np.uint64) * _MIX_B)
    return (salted % np.uint64(vocab_size - low)).astype(np.int64) + low


def expected_tokens(
    prompt_token_ids: list[int],
    num_tokens: int,
    vocab_size: int,
    *,
    script: NullScript | None = None,
    seed: int = 0,
    choice: int = 0,
) -> list[int]:
    """What the null model must answer to a prompt, token by token. `seed` and `choice` count for rows that are not
    greedy.
    """
    script = script or NullScript()
    tokens = list(prompt_token_ids)
    for output in range(num_tokens):
        tokens.append(_expected_next(tokens, output, len(prompt_token_ids), vocab_size, script, seed, choice))
    return tokens[len(prompt_token_ids) :]


def _expected_next(
    tokens: list[int], output: int, prompt_length: int, vocab_size: int, script: NullScript, seed: int, choice: int
) -> int:
    if script.end_after is not None and output >= script.end_after:
        return script.end_id
    if script.mode == "echo":
        return tokens[output % prompt_length]
    if script.mode == "cycle":
        return script.cycle[output % len(script.cycle)]
    content = token_shares(np.array(tokens), np.arange(len(tokens))).sum(dtype=np.uint64, keepdims=True)
    return int(hash_choice(content, np.array([seed], np.uint64), np.array([choice]), vocab_size, script.low_id)[0])


def content_hash(token_ids: Array) -> Any:
    """Of a whole sequence, uint64."""
    return token_shares(token_ids, np.arange(len(token_ids))).sum(dtype=np.uint64)


def content_vector(content: Any, num_dimensions: int) -> Array:
    """Float32 `[num_dimensions]` in -1..1 that follows from a content hash: the null model's vector of a text."""
    with np.errstate(over="ignore"):
        drawn = _mixed(np.uint64(content) + np.arange(1, num_dimensions + 1, dtype=np.uint64) * _GOLDEN)
    return (drawn.astype(np.float64) / 2.0**63 - 1.0).astype(np.float32)


def expected_vector(token_ids: list[int], num_dimensions: int) -> Array:
    """What the null model must answer to a text's tokens, before it is normalised."""
    return content_vector(content_hash(np.array(token_ids)), num_dimensions)


class NullModel:
    """Rows, cache and tokens; no time, no faults. `run` is a whole step: what property tests use as an oracle."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        vocab_size: int,
        script: NullScript | None = None,
        pooling: PoolingFacts | None = None,
    ) -> None:
        self.script = script or NullScript()
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._pooling = pooling
        num_slots = num_blocks * block_size
        self._token_ids = np.zeros(num_slots, np.int32)
        self._shares = np.zeros(num_slots, np.uint64)
        self._hashes = np.zeros(num_slots, np.uint64)
        self._table = RowTable(-(-max_model_len // block_size), 64)
        self._last_tokens = np.zeros(64, np.int64)
        self._plan: StepPlan | None = None

    def run(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepResult:
        """One whole step."""
        self.forward(plan)
        return self.sample(masks)

    def forward(self, plan: StepPlan) -> None:
        """Apply row changes, write the items' tokens and hashes through the block table."""
        self._table.apply(plan)
        self._last_tokens = np.resize(self._last_tokens, max(self._table.num_rows, len(self._last_tokens)))
        self._plan = plan
        if len(plan.rows) and not (self._pooling is not None and self._pooling.is_encoder):
            self._write(plan)

    def drop_rows(self) -> None:
        self._table.clear()

    def _write(self, plan: StepPlan) -> None:
        counts, ends = plan.counts, np.cumsum(plan.counts)
        item_T = np.repeat(np.arange(len(plan.rows)), counts)
        position_T = np.arange(int(ends[-1])) - (ends - counts)[item_T] + plan.starts[item_T]
        token_T = np.empty(len(item_T), np.int64)
        from_device = (plan.flags & WorkFlag.FROM_DEVICE) != 0
        token_T[from_device[item_T]] = self._last_tokens[plan.rows[from_device]]
        token_T[~from_device[item_T]] = plan.token_ids
        slot_T = self._slots(plan.rows[item_T], position_T)
        share_T = token_shares(token_T, position_T)
        before = np.where(plan.starts > 0, self._hashes[self._slots(plan.rows, np.maximum(plan.starts - 1, 0))], 0)
        running = np.cumsum(share_T, dtype=np.uint64)
        before_chunk = np.concatenate((np.zeros(1, np.uint64), running))[ends - counts]
        self._token_ids[slot_T] = token_T
        self._shares[slot_T] = share_T
        self._hashes[slot_T] = running - before_chunk[item_T] + before.astype(np.uint64)[item_T]

    def _slots(self, rows: Array, positions: Array) -> Array:
        blocks = self._table.blocks[rows, positions // self._block_size].astype(np.int64)
        slots: Array = blocks * self._block_size + positions % self._block_size
        return slots

    def sample(self, masks: TokenMasks | None) -> StepResult:
        plan = self._plan
        assert plan is not None
        self._plan = None
        items = np.nonzero(plan.flags & WorkFlag.SAMPLES)[0]
        rows = plan.rows[items].copy()
        lengths = (plan.starts + plan.counts)[items]
        tokens = self._next(rows, lengths) if len(rows) else np.empty(0, np.int64)
        tokens = self._without_banned(tokens, rows, lengths)
        if masks is not None and len(masks.rows):
            tokens = _with_masks(tokens, rows, masks, self._vocab_size)
        self._last_tokens[rows] = tokens
        ids = tokens.astype(np.int32)
        return StepResult(
            step=plan.step.copy(),
            rows=rows,
            token_ids=ids,
            flags=np.zeros(len(rows), np.uint8),
            tokens_hash=hash_tokens(rows, ids),
            seconds=np.zeros(4),
            **self._logprobs(rows, ids),
            **self._prompt_logprobs(plan),
            **self._pooled(plan),
        )

    def _pooled(self, plan: StepPlan) -> dict[str, Array]:
        """Vectors of the rows that pool: of an encoder from the plan's own tokens, else from what the cache holds."""
        items = np.nonzero(plan.flags & _POOLS)[0]
        if not len(items):
            return {}
        assert self._pooling is not None
        contents = self._pooled_contents(plan, items)
        vectors = np.concatenate([content_vector(content, self._pooling.num_dimensions) for content in contents])
        return {
            "pooled_rows": plan.rows[items].copy(),
            "pooled_dims": np.full(len(items), self._pooling.num_dimensions, np.int32),
            "pooled": vectors,
        }

    def _pooled_contents(self, plan: StepPlan, items: Array) -> Array:
        assert self._pooling is not None
        if not self._pooling.is_encoder:
            return self._contents(plan.rows[items], (plan.starts + plan.counts)[items])
        prompts = np.split(plan.token_ids, np.cumsum(plan.counts)[:-1])
        return np.array([content_hash(prompts[item]) for item in items], np.uint64)

    def _next(self, rows: Array, lengths: Array) -> Array:
        columns, script = self._table.columns, self.script
        prompt_lengths = columns["prompt_lengths"][rows]
        outputs = lengths - prompt_lengths
        if script.mode == "echo":
            tokens = self._token_ids[self._slots(rows, outputs % np.maximum(prompt_lengths, 1))].astype(np.int64)
        elif script.mode == "cycle":
            tokens = np.array(script.cycle)[outputs % len(script.cycle)]
        else:
            greedy = (columns["flags"][rows] & RowFlag.GREEDY) != 0
            seeds = np.where(greedy, np.uint64(0), columns["seeds"][rows])
            choices = np.where(greedy, 0, columns["choices"][rows])
            tokens = hash_choice(self._contents(rows, lengths), seeds, choices, self._vocab_size, script.low_id)
        if script.end_after is not None:
            tokens = np.where(outputs >= script.end_after, script.end_id, tokens)
        return tokens

    def _contents(self, rows: Array, lengths: Array) -> Array:
        """Content hash of each row: summed over all its slots, or as the last slot holds it."""
        if self.script.reads == "last":
            return self._hashes[self._slots(rows, lengths - 1)]
        positions_L = np.arange(int(lengths.max()))
        slots_WL = self._slots(rows[:, None], np.minimum(positions_L, lengths[:, None] - 1))
        shares_WL = np.where(positions_L < lengths[:, None], self._shares[slots_WL], np.uint64(0))
        contents: Array = shares_WL.sum(axis=1, dtype=np.uint64)
        return contents

    def _without_banned(self, tokens: Array, rows: Array, lengths: Array) -> Array:
        for place, row in enumerate(rows.tolist()):
            banned = self._table.banned.get(row)
            if banned is not None and lengths[place] < self._table.columns["min_lengths"][row]:
                while tokens[place] in banned:
                    tokens[place] = (tokens[place] + 1) % self._vocab_size
        return tokens

    def _logprobs(self, rows: Array, ids: Array) -> dict[str, Array]:
        """Made up, finite, and the same each time: the token itself is the most likely one."""
        wanted = (self._table.columns["flags"][rows] & RowFlag.LOGPROBS) != 0
        counts = np.minimum(self._table.columns["num_logprobs"][rows[wanted]], self._vocab_size).astype(np.int32)
        top_ids, top_values = self._alternatives(ids[wanted], counts)
        return {
            "logprob_rows": rows[wanted],
            "logprobs": np.full(len(counts), -0.125, np.float32),
            "ranks": np.ones(len(counts), np.int32),
            "top_counts": counts,
            "top_ids": top_ids,
            "top_logprobs": top_values,
        }

    def _prompt_logprobs(self, plan: StepPlan) -> dict[str, Array]:
        items = np.nonzero(plan.flags & WorkFlag.PROMPT_LOGPROBS)[0]
        rows = plan.rows[items].copy()
        num_top = np.minimum(self._table.columns["num_prompt_logprobs"][rows], self._vocab_size).astype(np.int32)
        top_ids, top_values = self._alternatives(plan.targets, np.repeat(num_top, plan.target_counts))
        return {
            "prompt_rows": rows,
            "prompt_counts": plan.target_counts.copy(),
            "prompt_top_counts": num_top,
            "prompt_logprobs": np.full(len(plan.targets), -0.125, np.float32),
            "prompt_ranks": np.ones(len(plan.targets), np.int32),
            "prompt_top_ids": top_ids,
            "prompt_top_logprobs": top_values,
        }

    def _alternatives(self, ids: Array, counts: Array) -> tuple[Array, Array]:
        places = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        top_ids = (np.repeat(ids, counts) + places) % self._vocab_size
        return top_ids.astype(np.int32), (-0.125 - places).astype(np.float32)


def _with_masks(tokens: Array, rows: Array, masks: TokenMasks, vocab_size: int) -> Array:
    """The next allowed id at or after each masked row's token, going round."""
    place_of = {row: place for place, row in enumerate(rows.tolist())}
    words = masks.words.reshape(len(masks.rows), -1)
    allowed_bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    for row, bits in zip(masks.rows.tolist(), allowed_bits, strict=True):
        allowed = np.nonzero(bits)[0]
        if len(allowed):
            place = np.searchsorted(allowed, tokens[place_of[row]])
            tokens[place_of[row]] = allowed[place % len(allowed)]
    return tokens


def with_invalid_row(result: StepResult) -> StepResult:
    """The result with its first sampled row flagged as broken."""
    flags = result.flags.copy()
    flags[:1] |= np.uint8(ResultFlag.INVALID)
    result.flags = flags
    return result
