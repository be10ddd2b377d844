"""From a plan to the tensors of one step: positions, slots, lengths, computed in numpy and pushed in one copy.

W work items, T tokens. Step inputs lie at fixed addresses, so that recorded forward passes find them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...ipc.plan import StepPlan, WorkFlag
from ..memory.staging import Staging
from ..models.decoder import StepTensors
from ..platforms.contract import Backend
from .row_table import RowTable

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Batch:
    """One step. Host columns per work item; `ends` is each item's last token plus one."""

    num_tokens: int
    rows: Array
    lengths: Array
    flags: Array
    ends: Array

    @property
    def num_sequences(self) -> int:
        return len(self.rows)

    def sampled_items(self) -> Array:
        """Indexes of the items that sample."""
        return np.nonzero(self.flags & WorkFlag.SAMPLES)[0]


class BatchBuilder:
    """Owns the step's input buffers. A batch is valid until the next `build`."""

    def __init__(self, max_tokens: int, max_sequences: int, max_blocks: int, block_size: int, backend: Backend) -> None:
        self._block_size = block_size
        self._max_tokens, self._max_sequences = max_tokens, max_sequences
        self._staging = Staging(
            {
                "token_ids": (max_tokens,),
                "positions": (max_tokens,),
                "slots": (max_tokens,),
                "query_starts": (max_sequences + 1,),
                "kv_lengths": (max_sequences,),
                "block_tables": (max_sequences, max_blocks),
            },
            backend,
        )

    @property
    def num_bytes(self) -> int:
        return self._staging.num_bytes

    def build(self, plan: StepPlan, table: RowTable, last_tokens: torch.Tensor, padded: int = 0) -> Batch:
        """Fill the inputs. Tokens of FROM_DEVICE items come from `last_tokens`, on the device.

        A step of one token a sequence may be `padded` to more sequences, which touch no slot of the cache.
        """
        counts, starts, rows, flags = plan.counts, plan.starts, plan.rows, plan.flags
        ends = np.cumsum(counts)
        num_tokens, num_sequences = int(ends[-1]) if len(ends) else 0, len(rows)
        assert num_tokens <= self._max_tokens and num_sequences <= self._max_sequences, (num_tokens, num_sequences)
        self._staging.begin()
        host = self._staging.host
        item_of_token = np.repeat(np.arange(num_sequences), counts)
        positions = np.arange(num_tokens) - (ends - counts)[item_of_token] + starts[item_of_token]
        blocks = table.blocks[rows[item_of_token], positions // self._block_size]
        host["positions"][:num_tokens] = positions
        host["slots"][:num_tokens] = blocks * self._block_size + positions % self._block_size
        from_device = (flags & WorkFlag.FROM_DEVICE) != 0
        host["token_ids"][:num_tokens][~from_device[item_of_token]] = plan.token_ids
        host["query_starts"][1 : num_sequences + 1] = ends
        lengths = starts + counts
        host["kv_lengths"][:num_sequences] = lengths
        self._fill_tables(table, rows, lengths)
        if padded > num_sequences:
            self._pad(num_sequences, padded)
        self._staging.push()
        self._feed_back(from_device, ends, rows, last_tokens)
        return Batch(num_tokens, rows.copy(), lengths, flags.copy(), ends)

    def _pad(self, begin: int, end: int) -> None:
        """Sequences of one token at position 0, whose key and value are not written."""
        host = self._staging.host
        for name, value in (("token_ids", 0), ("positions", 0), ("slots", -1), ("kv_lengths", 1)):
            host[name][begin:end] = value
        host["query_starts"][begin + 1 : end + 1] = np.arange(begin + 1, end + 1)
        host["block_tables"][begin:end] = 0

    def tensors(self, batch: Batch, padded: int = 0) -> StepTensors:
        """The inputs cut to the batch's sizes, or to those it was padded to."""
        if padded > batch.num_sequences:
            return self._cut(padded, padded)
        return self._cut(batch.num_tokens, batch.num_sequences)

    def whole(self, max_tokens: int) -> StepTensors:
        """The inputs for any batch of up to `max_tokens` tokens, for recording."""
        return self._cut(max_tokens, self._max_sequences)

    def idle(self, num_tokens: int, max_sequences: int) -> StepTensors:
        """Inputs of a step that touches no cache slot: sequences of one token each, as many as there may be."""
        self._staging.begin()
        num_sequences = min(num_tokens, max_sequences)
        self._pad(0, num_sequences)
        self._staging.push()
        return self._cut(num_sequences, num_sequences)

    def _cut(self, num_tokens: int, num_sequences: int) -> StepTensors:
        device = self._staging.device
        return StepTensors(
            token_ids=device["token_ids"][:num_tokens],
            positions=device["positions"][:num_tokens],
            slots=device["slots"][:num_tokens],
            block_tables=device["block_tables"][:num_sequences],
            query_starts=device["query_starts"][: num_sequences + 1],
            kv_lengths=device["kv_lengths"][:num_sequences],
            is_decode=num_tokens == num_sequences,
        )

    def _fill_tables(self, table: RowTable, rows: Array, lengths: Array) -> None:
        if len(rows):
            width = -(-int(lengths.max()) // self._block_size)
            self._staging.host["block_tables"][: len(rows), :width] = table.blocks[rows, :width]

    def _feed_back(self, from_device: Array, ends: Array, rows: Array, last_tokens: torch.Tensor) -> None:
        """Each FROM_DEVICE item has one token: its row's last one."""
        if from_device.any():
            places = torch.from_numpy(ends[from_device] - 1).to(last_tokens.device)
            sources = torch.from_numpy(rows[from_device].astype(np.int64)).to(last_tokens.device)
            self._staging.device["token_ids"][places] = last_tokens[sources]
