"""Collects one step's work and turns it into the columns of a plan."""

from functools import lru_cache
from typing import Any

import numpy as np

from ..ipc.plan import RowFlag, StepPlan, WorkFlag
from .request import Sequence

_DECODE = int(WorkFlag.SAMPLES | WorkFlag.FROM_DEVICE)
_MASKED = int(WorkFlag.MASKED)
_GREEDY_BELOW = 1e-4  # below it the division by the temperature overflows half precision; the result is greedy anyway

Array = np.ndarray[Any, Any]


@lru_cache(maxsize=64)
def filled(length: int, value: int, dtype: type) -> Array:
    """[length] of one value, shared by all who ask for the same: not to be written to."""
    array: Array = np.full(length, value, dtype)
    array.setflags(write=False)
    return array


class PlanBuilder:
    """The columns of StepPlan, in the making. Decodes are set once, as arrays; the rest is appended item by item."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.decode_rows: Array = StepPlan.rows
        self.decode_starts: Array = StepPlan.starts
        self.decode_flags: Array = StepPlan.flags
        self.items: list[tuple[int, int, int, int]] = []  # row, start, count, flags
        self.tokens: list[Array] = []
        self.targets: list[Array] = []
        self.grants: list[tuple[int, int, list[int]]] = []  # row, first index in its table, blocks
        self.seated: list[tuple[Sequence, int]] = []  # with its number of known tokens
        self.has_masked = False

    @property
    def is_empty(self) -> bool:
        """No work item: there is nothing to compute."""
        return not self.items and not len(self.decode_rows)

    @property
    def num_tokens(self) -> int:
        """Tokens that the plan computes."""
        return len(self.decode_rows) + sum(count for _, _, count, _ in self.items)

    def decode(self, rows: Array, starts: Array, is_masked: Array | None) -> None:
        """Rows that compute one token each. `is_masked`: None where no row is."""
        self.decode_rows, self.decode_starts = rows, starts
        self.decode_flags = filled(len(rows), _DECODE, np.uint8)
        if is_masked is not None:
            self.has_masked = True
            self.decode_flags = self.decode_flags | np.where(is_masked, _MASKED, 0).astype(np.uint8)

    def chunk(self, row: int, start: int, tokens: Array, flags: int, targets: Array | None) -> None:
        """A run of known tokens of one row."""
        self.items.append((row, start, len(tokens), flags))
        self.has_masked |= bool(flags & _MASKED)
        self.tokens.append(tokens)
        if targets is not None:
            self.targets.append(targets)

    def grant(self, row: int, first: int, blocks: list[int]) -> None:
        """Blocks that extend the row's table from index `first`."""
        self.grants.append((row, first, blocks))

    def seat(self, sequence: Sequence, num_known: int) -> None:
        """A row's new tenant."""
        self.seated.append((sequence, num_known))

    def build(self, freed_rows: list[int], history: Array) -> StepPlan:
        """The finished plan. `history` is the sequence table's."""
        columns: dict[str, Array] = {
            "step": np.array([self.step], np.int64),
            "rows": self.decode_rows,
            "starts": self.decode_starts,
            "counts": filled(len(self.decode_rows), 1, np.int32),
            "flags": self.decode_flags,
        }
        if self.items:
            columns |= self._chunk_columns(columns)
        if self.grants:
            columns |= self._grant_columns()
        if freed_rows:
            columns["freed_rows"] = np.array(freed_rows, np.int32)
        if self.seated:
            columns |= self._row_columns(history)
        return StepPlan(**columns)

    def _chunk_columns(self, decodes: dict[str, Array]) -> dict[str, Array]:
        rows, starts, counts, flags = zip(*self.items, strict=True)
        columns = {
            "rows": np.concatenate((decodes["rows"], np.array(rows, np.int32))),
            "starts": np.concatenate((decodes["starts"], np.array(starts, np.int32))),
            "counts": np.concatenate((decodes["counts"], np.array(counts, np.int32))),
            "flags": np.concatenate((decodes["flags"], np.array(flags, np.uint8))),
            "token_ids": np.concatenate(self.tokens),
        }
        if self.targets:
            columns["targets"] = np.concatenate(self.targets)
            columns["target_counts"] = np.array([len(targets) for targets in self.targets], np.int32)
        return columns

    def _grant_columns(self) -> dict[str, Array]:
        return {
            "block_rows": np.array([row for row, _, _ in self.grants], np.int32),
            "block_firsts": np.array([first for _, first, _ in self.grants], np.int32),
            "block_counts": np.array([len(blocks) for _, _, blocks in self.grants], np.int32),
            "block_ids": np.array([block for _, _, blocks in self.grants for block in blocks], np.int32),
        }

    def _row_columns(self, history: Array) -> dict[str, Array]:
        sequences = [sequence for sequence, _ in self.seated]
        samplings = [sequence.request.sampling for sequence in sequences]
        flags = [_row_flags(sequence) for sequence in sequences]
        columns: dict[str, Array] = {
            "new_rows": np.array([sequence.row for sequence in sequences], np.int32),
            "request_ids": np.array([sequence.request.request_id for sequence in sequences], np.int64),
            "choices": np.array([sequence.choice for sequence in sequences], np.int32),
            "row_flags": np.array(flags, np.uint32),
            "temperatures": np.array([sampling.temperature for sampling in samplings], np.float32),
            "top_ps": np.array([sampling.top_p for sampling in samplings], np.float32),
            "top_ks": np.array([sampling.top_k for sampling in samplings], np.int32),
            "min_ps": np.array([sampling.min_p for sampling in samplings], np.float32),
            "presence_penalties": np.array([sampling.presence_penalty for sampling in samplings], np.float32),
            "frequency_penalties": np.array([sampling.frequency_penalty for sampling in samplings], np.float32),
            "repetition_penalties": np.array([sampling.repetition_penalty for sampling in samplings], np.float32),
            "seeds": np.array([sampling.seed or 0 for sampling in samplings], np.uint64),
            "num_logprobs": np.array([sampling.num_logprobs or 0 for sampling in samplings], np.int32),
            "num_prompt_logprobs": np.array([sampling.num_prompt_logprobs or 0 for sampling in samplings], np.int32),
            "prompt_lengths": np.array([sequence.request.prompt_length for sequence in sequences], np.int32),
            "min_lengths": np.array(
                [sequence.request.prompt_length + sequence.request.sampling.min_tokens for sequence in sequences],
                np.int32,
            ),
            "bias_counts": np.array([len(sampling.logit_bias) for sampling in samplings], np.int32),
            "banned_counts": np.array([len(_banned(sequence)) for sequence in sequences], np.int32),
        }
        biases = [pair for sampling in samplings for pair in sampling.logit_bias]
        if biases:
            columns["bias_ids"] = np.array([token_id for token_id, _ in biases], np.int32)
            columns["bias_values"] = np.array([value for _, value in biases], np.float32)
        banned = [token_id for sequence in sequences for token_id in _banned(sequence)]
        if banned:
            columns["banned_ids"] = np.array(banned, np.int32)
        with_history = [pair for pair, flag in zip(self.seated, flags, strict=True) if flag & RowFlag.PENALTIES]
        if with_history:
            prompts = [sequence.request.prompt_length for sequence, _ in with_history]
            columns["history_prompt_counts"] = np.array(prompts, np.int32)
            columns["history_output_counts"] = np.array(
                [known - prompt for (_, known), prompt in zip(with_history, prompts, strict=True)], np.int32
            )
            columns["history_ids"] = np.concatenate([history[sequence.row, :known] for sequence, known in with_history])
        return columns


def _banned(sequence: Sequence) -> tuple[int, ...]:
    """The ids that `min_tokens` keeps away; under a grammar its masks do, which know when nothing else is left."""
    request, sampling = sequence.request, sequence.request.sampling
    if request.grammar is not None:
        return ()
    return sampling.end_token_ids + sampling.stop_token_ids if sampling.min_tokens else ()


def _row_flags(sequence: Sequence) -> int:
    request, sampling = sequence.request, sequence.request.sampling
    flags = RowFlag(0)
    if sampling.temperature < _GREEDY_BELOW:
        flags |= RowFlag.GREEDY
    if sampling.num_logprobs is not None:
        flags |= RowFlag.LOGPROBS
    if (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0):
        flags |= RowFlag.PENALTIES
    if sampling.logit_bias:
        flags |= RowFlag.BIAS
    if _banned(sequence):
        flags |= RowFlag.MIN_TOKENS
    if request.pools:
        flags |= RowFlag.POOLING
    return int(flags)
