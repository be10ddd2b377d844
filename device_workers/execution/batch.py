"""From a plan to the tensors of one step: positions, slots, lengths, sampling parameters, pushed in one copy.

W work items, T tokens, S sampled items. Step inputs lie at fixed addresses for each size, so that recorded passes find
them. What the rows keep between steps (block tables, last tokens) stays on the device; a step sends what changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from ...ipc.plan import RowFlag, StepPlan, WorkFlag
from ...kernels.implementation import HostLengths
from ..memory.staging import Layout, Staging
from ..models.decoder import StepTensors
from ..platforms.contract import Backend
from .row_table import RowTable

Array = np.ndarray[Any, np.dtype[Any]]

_SAMPLED: dict[str, tuple[type[np.generic], str]] = {
    # parameter of the sampling kernel: its element type, the row table's column
    "temperatures": (np.float32, "temperatures"),
    "top_ks": (np.int32, "top_ks"),
    "top_ps": (np.float32, "top_ps"),
    "min_ps": (np.float32, "min_ps"),
    "seeds": (np.int64, "seeds"),
    "choices": (np.int32, "choices"),
}
_SAMPLES, _FROM_DEVICE, _GREEDY = int(WorkFlag.SAMPLES), int(WorkFlag.FROM_DEVICE), int(RowFlag.GREEDY)
"""As numbers: numpy is slow with the enums themselves."""
DRAW_PARAMETERS = (*_SAMPLED, "draw_positions")
_NONE: Array = np.empty(0, np.int64)
_MOST_CHANGES = 4096  # block table entries that one copy carries; more go in several


@dataclass(frozen=True)
class Batch:
    """One step. Host columns per work item; `ends` is each item's last token plus one, `sampled` the indexes of the
    items that sample, `size` what the tensors were padded to. `is_plain`: those that sample do so greedily, and ask for
    nothing else.
    """

    num_tokens: int
    rows: Array
    lengths: Array
    flags: Array
    ends: Array
    sampled: Array
    size: StepSize
    is_greedy: bool
    is_plain: bool

    @property
    def num_sequences(self) -> int:
        return len(self.rows)

    @property
    def host(self) -> HostLengths | None:
        """Starts and lengths for kernels that treat long chunks apart; none where all are decodes."""
        if self.size.is_decode:
            return None
        return HostLengths(np.concatenate(([0], self.ends)), self.lengths)


@dataclass(frozen=True)
class SampledTensors:
    """Of the sampled items: the place of their hidden state, their row (int64 both), what draws take; () if greedy."""

    places_S: torch.Tensor
    rows_S: torch.Tensor
    draws: tuple[torch.Tensor, ...]


class StepSize(NamedTuple):
    """Tokens and sequences that a step's tensors have room for."""

    num_tokens: int
    num_sequences: int

    @property
    def is_decode(self) -> bool:
        """One token of each sequence."""
        return self.num_tokens == self.num_sequences


@lru_cache(maxsize=128)
def _layout(size: StepSize, num_changes: int = 0) -> Layout:
    """What a step's inputs are: of the model, of sampling, and changes of the block tables."""
    tokens, sequences = (size.num_tokens,), (size.num_sequences,)
    return Layout(
        {
            "token_ids": (np.int32, tokens),
            "positions": (np.int32, tokens),
            "slots": (np.int32, tokens),
            "query_starts": (np.int32, (size.num_sequences + 1,)),
            "kv_lengths": (np.int32, sequences),
            "rows": (np.int32, sequences),
            "sampled_places": (np.int64, sequences),
            "sampled_rows": (np.int64, sequences),
            **{name: (kind, sequences) for name, (kind, _) in _SAMPLED.items()},
            "draw_positions": (np.int32, sequences),
            "change_places": (np.int64, (num_changes,)),
            "change_blocks": (np.int32, (num_changes,)),
        }
    )


class BatchBuilder:
    """Owns the step's inputs and the device's side of the rows. A batch is valid until the next `build`.

    Where a recording takes any size (`backend.graphs_take_any_size`) inputs lie as for the largest step, always.
    """

    def __init__(self, max_tokens: int, max_sequences: int, table: RowTable, block_size: int, backend: Backend) -> None:
        self._block_size = block_size
        self._largest = StepSize(max_tokens, max_sequences)
        self._is_fixed = backend.graphs_take_any_size
        self._table = table
        most_changes = 0 if backend.torch_device.type == "cpu" else _MOST_CHANGES
        self._staging = Staging(_layout(self._largest, most_changes).num_bytes, backend)
        device = backend.torch_device
        on_host = torch.from_numpy(table.blocks)
        self.block_tables = on_host if self._staging.is_host else torch.zeros_like(on_host, device=device)
        self._no_row = table.num_rows  # its last token is nobody's: padded sequences leave theirs there
        self.last_tokens = torch.zeros(table.num_rows + 1, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        return self._staging.num_bytes + self.block_tables.nbytes + self.last_tokens.nbytes

    def build(self, plan: StepPlan, size: StepSize, *, only_last: bool = False) -> Batch:
        """Fill the inputs of a step of this size, or padded to it. The table has the plan's changes already.

        `only_last`: the pass will leave hidden states of each sequence's last token alone.
        """
        counts, starts, rows, flags = plan.counts, plan.starts, plan.rows.copy(), plan.flags.copy()
        ends = np.cumsum(counts)
        num_tokens, num_sequences = int(ends[-1]) if len(ends) else 0, len(rows)
        assert num_tokens <= size.num_tokens <= self._largest.num_tokens, (num_tokens, size, self._largest)
        assert num_sequences <= size.num_sequences <= self._largest.num_sequences, (num_sequences, size, self._largest)
        places, blocks = self._changes(plan)
        host = self._staging.write(_layout(self._laid(size), len(places)))
        host["change_places"][:], host["change_blocks"][:] = places, blocks
        self._fill_tokens(host, plan, rows, ends, num_tokens)
        lengths = starts + counts
        host["query_starts"][0] = 0
        host["query_starts"][1 : num_sequences + 1] = ends
        host["kv_lengths"][:num_sequences] = lengths
        host["rows"][:num_sequences] = rows
        sampled = np.nonzero(flags & _SAMPLES)[0]
        row_flags = self._table.columns["flags"][rows[sampled]]
        places_of_hidden = sampled if only_last else ends[sampled] - 1
        is_greedy = self._fill_sampled(host, rows[sampled], row_flags, places_of_hidden, lengths[sampled])
        is_plain = bool((row_flags == _GREEDY).all())
        if size.num_tokens > num_tokens or size.num_sequences > num_sequences:
            _pad(host, StepSize(num_tokens, num_sequences), size)
        self._push(size, len(places))
        return Batch(num_tokens, rows, lengths, flags, ends, sampled, size, is_greedy, is_plain)

    def _fill_tokens(
        self, host: Mapping[str, Array], plan: StepPlan, rows: Array, ends: Array, num_tokens: int
    ) -> None:
        """A token that the device has sampled itself is named by its row: see the kernel `embed`."""
        starts, from_device = plan.starts, (plan.flags & _FROM_DEVICE) != 0
        if num_tokens == len(rows):
            positions, rows_of_tokens, is_sampled = starts, rows, from_device
        else:
            item_of_token = np.repeat(np.arange(len(rows)), plan.counts)
            positions = np.arange(num_tokens) - (ends - plan.counts)[item_of_token] + starts[item_of_token]
            rows_of_tokens, is_sampled = rows[item_of_token], from_device[item_of_token]
        blocks = self._table.blocks[rows_of_tokens, positions // self._block_size]
        host["positions"][:num_tokens] = positions
        host["slots"][:num_tokens] = blocks * self._block_size + positions % self._block_size
        token_ids = host["token_ids"][:num_tokens]
        if is_sampled.all():
            token_ids[:] = -1 - rows_of_tokens
        else:
            token_ids[is_sampled] = -1 - rows_of_tokens[is_sampled]
            token_ids[~is_sampled] = plan.token_ids

    def _fill_sampled(
        self, host: Mapping[str, Array], rows: Array, row_flags: Array, places: Array, lengths: Array
    ) -> bool:
        """What sampling reads; returns whether all rows are greedy, which takes no parameters."""
        num_sampled, columns = len(rows), self._table.columns
        host["sampled_places"][:num_sampled] = places
        host["sampled_places"][num_sampled:] = 0
        host["sampled_rows"][:num_sampled] = rows
        host["sampled_rows"][num_sampled:] = self._no_row
        greedy = (row_flags & _GREEDY) != 0
        if greedy.all():
            return True
        for name, (kind, column) in _SAMPLED.items():
            host[name][:num_sampled] = columns[column][rows].view(kind)
        host["temperatures"][:num_sampled][greedy] = 0.0
        host["draw_positions"][:num_sampled] = lengths
        return False

    def _changes(self, plan: StepPlan) -> tuple[Array, Array]:
        """Entries of the device's block tables that this step must set; those beyond one copy's room are set here."""
        if self._staging.is_host or not len(plan.block_ids):
            return _NONE, _NONE
        places, blocks = self._table.granted_places(plan), plan.block_ids
        while len(places) > _MOST_CHANGES:
            self._send_changes(places[:_MOST_CHANGES], blocks[:_MOST_CHANGES])
            places, blocks = places[_MOST_CHANGES:], blocks[_MOST_CHANGES:]
        return places, blocks

    def _send_changes(self, places: Array, blocks: Array) -> None:
        size = StepSize(0, 0)
        host = self._staging.write(_layout(size, len(places)))
        host["change_places"][:], host["change_blocks"][:] = places, blocks
        self._push(size, len(places))

    def _push(self, size: StepSize, num_changes: int) -> None:
        sizes = _layout(self._laid(size), num_changes)
        self._staging.push(sizes.num_bytes)
        if num_changes:
            places, blocks = self._staging.read(sizes, "change_places", "change_blocks")
            self.block_tables.view(-1).index_copy_(0, places, blocks)

    def _laid(self, size: StepSize) -> StepSize:
        return self._largest if self._is_fixed else size

    def tensors(self, size: StepSize, host: HostLengths | None = None, *, only_last: bool = False) -> StepTensors:
        """The inputs of a step's forward pass; with what the host knows of it, the inputs of this step alone."""
        num_tokens, num_sequences = size.num_tokens, size.num_sequences
        token_ids, positions, slots, rows, query_starts, kv_lengths = self._staging.read(
            _layout(self._laid(size)), "token_ids", "positions", "slots", "rows", "query_starts", "kv_lengths"
        )
        return StepTensors(
            token_ids=token_ids[:num_tokens],
            last_tokens=self.last_tokens,
            positions=positions[:num_tokens],
            slots=slots[:num_tokens],
            block_tables=self.block_tables,
            rows=rows[:num_sequences],
            query_starts=query_starts[: num_sequences + 1],
            kv_lengths=kv_lengths[:num_sequences],
            is_decode=size.is_decode,
            only_last=only_last and not size.is_decode,
            host=host,
        )

    def sampled(self, size: StepSize) -> tuple[torch.Tensor, torch.Tensor]:
        """`[N]` int64 each: the places and the rows of the sampled items, then place 0 and nobody's row, whose last
        token is never read.
        """
        places, rows = self._staging.read(_layout(self._laid(size)), "sampled_places", "sampled_rows")
        return places[: size.num_sequences], rows[: size.num_sequences]

    def sampling(self, batch: Batch) -> SampledTensors:
        """The inputs of sampling."""
        names = ("sampled_places", "sampled_rows", *(() if batch.is_greedy else DRAW_PARAMETERS))
        places, rows, *draws = self._staging.read(_layout(self._laid(batch.size)), *names)
        num_sampled = len(batch.sampled)
        return SampledTensors(
            places[:num_sampled], rows[:num_sampled], tuple(parameter[:num_sampled] for parameter in draws)
        )

    def idle(self, size: StepSize) -> StepSize:
        """Make the inputs those of a step of this size that touches no cache slot. Returns the size."""
        host = self._staging.write(_layout(self._laid(size)))
        host["query_starts"][0] = 0
        host["sampled_places"][:] = 0
        host["sampled_rows"][:] = self._no_row
        _pad(host, StepSize(0, 0), size)
        self._push(size, 0)
        return size

    def whole(self, max_tokens: int) -> StepSize:
        """For any batch of up to `max_tokens` tokens, for recording."""
        return StepSize(max_tokens, self._largest.num_sequences)


def _pad(host: Mapping[str, Array], used: StepSize, size: StepSize) -> None:
    """Tokens at position 0 whose key and value are not written; they are sequences of one token each in a step of
    decodes, else they belong to no sequence, and sequences have no tokens.
    """
    for name, value in (("token_ids", 0), ("positions", 0), ("slots", -1)):
        host[name][used.num_tokens : size.num_tokens] = value
    begin, end = used.num_sequences, size.num_sequences
    host["kv_lengths"][begin:end] = 1
    host["rows"][begin:end] = 0
    is_decode = size.is_decode and used.is_decode
    host["query_starts"][begin + 1 : end + 1] = np.arange(begin + 1, end + 1) if is_decode else used.num_tokens
