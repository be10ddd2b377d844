"""The rows of a worker: for each sequence its block table and what sampling needs of it. Numpy only.

A row's number comes from the core. The table grows to the highest row seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...ipc.plan import RowFlag, StepPlan

Array = np.ndarray[Any, np.dtype[Any]]

_PARAMETERS = {
    # table column: (plan column, dtype)
    "flags": ("row_flags", np.uint32),
    "choices": ("choices", np.int32),
    "temperatures": ("temperatures", np.float32),
    "top_ps": ("top_ps", np.float32),
    "top_ks": ("top_ks", np.int32),
    "min_ps": ("min_ps", np.float32),
    "presence_penalties": ("presence_penalties", np.float32),
    "frequency_penalties": ("frequency_penalties", np.float32),
    "repetition_penalties": ("repetition_penalties", np.float32),
    "seeds": ("seeds", np.uint64),
    "num_logprobs": ("num_logprobs", np.int32),
    "num_prompt_logprobs": ("num_prompt_logprobs", np.int32),
    "prompt_lengths": ("prompt_lengths", np.int32),
    "min_lengths": ("min_lengths", np.int32),
}


@dataclass(frozen=True)
class Bias:
    """Additions to the logits of some ids."""

    ids: Array
    values: Array


@dataclass(frozen=True)
class History:
    """Tokens a penalised row has seen when it starts: prompt, then output (after a preemption)."""

    row: int
    prompt_ids: Array
    output_ids: Array


class RowTable:
    """Host side of the rows. `blocks[row]` is the block table; other columns are by row too."""

    def __init__(self, max_blocks: int, num_rows: int) -> None:
        self._max_blocks = max_blocks
        self.blocks = np.zeros((num_rows, max_blocks), np.int32)
        self.num_granted = np.zeros(num_rows, np.int32)
        self.columns: dict[str, Array] = {name: np.zeros(num_rows, dtype) for name, (_, dtype) in _PARAMETERS.items()}
        self.biases: dict[int, Bias] = {}
        self.banned: dict[int, Array] = {}

    @property
    def num_rows(self) -> int:
        return len(self.blocks)

    def apply(self, plan: StepPlan) -> list[History]:
        """Freed rows, new rows, block grants, in this order. Returns the histories of new rows with penalties."""
        for row in plan.freed_rows.tolist():
            self.biases.pop(row, None)
            self.banned.pop(row, None)
        histories = self._add(plan) if len(plan.new_rows) else []
        if len(plan.block_rows):
            self._grant(plan)
        return histories

    def check(self, plan: StepPlan, num_blocks: int, block_size: int) -> None:
        """A plan that would read or write outside the cache, or in blocks its row was not granted, is the core's bug;
        kernels do not look.
        """
        ids, ends = plan.block_ids, plan.starts + plan.counts
        assert not len(ids) or (ids.min() >= 0 and ids.max() < num_blocks), f"step {plan.step[0]} names unknown blocks"
        assert not len(ends) or (plan.starts.min() >= 0 and plan.counts.min() > 0), f"step {plan.step[0]} is malformed"
        reach = self.num_granted[plan.rows] * block_size
        assert (ends <= reach).all(), f"step {plan.step[0]} computes positions without blocks"

    def granted_places(self, plan: StepPlan) -> Array:
        """Where in the flat block tables the plan's `block_ids` go."""
        counts = plan.block_counts
        begins = plan.block_rows.astype(np.int64) * self._max_blocks + plan.block_firsts
        places: Array = np.arange(len(plan.block_ids)) + np.repeat(begins - np.cumsum(counts) + counts, counts)
        return places

    def clear(self) -> None:
        self.biases.clear()
        self.banned.clear()

    def _add(self, plan: StepPlan) -> list[History]:
        self._grow(int(plan.new_rows.max()) + 1)
        self.num_granted[plan.new_rows] = 0
        for name, (source, _) in _PARAMETERS.items():
            self.columns[name][plan.new_rows] = getattr(plan, source)
        biases = _split(plan.bias_ids, plan.bias_counts), _split(plan.bias_values, plan.bias_counts)
        for row, ids, values in zip(plan.new_rows.tolist(), *biases, strict=False):
            if len(ids):
                self.biases[row] = Bias(ids.copy(), values.copy())
        for row, ids in zip(plan.new_rows.tolist(), _split(plan.banned_ids, plan.banned_counts), strict=False):
            if len(ids):
                self.banned[row] = ids.copy()
        return self._histories(plan)

    def _histories(self, plan: StepPlan) -> list[History]:
        rows = plan.new_rows[(plan.row_flags & RowFlag.PENALTIES) != 0].tolist()
        lengths = np.stack((plan.history_prompt_counts, plan.history_output_counts), axis=1).reshape(-1)
        parts = list(_split(plan.history_ids, lengths))
        return [History(row, parts[2 * i].copy(), parts[2 * i + 1].copy()) for i, row in enumerate(rows)]

    def _grant(self, plan: StepPlan) -> None:
        self._grow(int(plan.block_rows.max()) + 1)
        self.blocks.reshape(-1)[self.granted_places(plan)] = plan.block_ids
        self.num_granted[plan.block_rows] = plan.block_firsts + plan.block_counts

    def _grow(self, num_rows: int) -> None:
        if num_rows <= self.num_rows:
            return
        added = max(num_rows, 2 * self.num_rows) - self.num_rows
        self.blocks = np.concatenate((self.blocks, np.zeros((added, self._max_blocks), np.int32)))
        self.num_granted = np.concatenate((self.num_granted, np.zeros(added, np.int32)))
        self.columns = {
            name: np.concatenate((column, np.zeros(added, column.dtype))) for name, column in self.columns.items()
        }


def _split(flat: Array, counts: Array) -> Iterator[Array]:
    """Runs of `flat`, of the given lengths."""
    end = 0
    for count in counts.tolist():
        yield flat[end : end + count]
        end += count
