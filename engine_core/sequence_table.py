"""The seated sequences: numpy columns by row, their token history, and the blocks they hold.

Row columns (one entry per row):
  known      tokens committed: prompt and outputs
  scheduled  positions whose computation has been planned
  computed   positions whose computation has returned
  limit      total length at which the sequence ends
  room       positions that its blocks hold
  hash_at    positions to compute until its next full block
  last_step  the last plan that names the row
A decoding row has scheduled + 1 - known tokens in plans that have not returned.
"""

import mmap
from typing import Any, NamedTuple

import numpy as np

from .block_pool import BlockPool
from .prefix_cache import PrefixCache
from .request import Sequence, State

MAX_FAST_ENDS = 8
_NO_TOKEN = -1  # pads `ends`; no token id is negative

Array = np.ndarray[Any, Any]


class Tenants(NamedTuple):
    """What stays as it is while some rows keep their tenants; parallel arrays."""

    rows: Array
    limit: Array
    ends: Array
    has_many_ends: bool
    request_id: Array
    choice: Array
    owner: Array
    has_masked: bool


class SequenceTable:
    """Rows, blocks and history of every seated sequence, and what must wait before it may be used again."""

    def __init__(
        self, *, num_rows: int, max_model_len: int, block_size: int, pool: BlockPool, cache: PrefixCache
    ) -> None:
        self.num_rows = num_rows
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.pool = pool
        self.cache = cache
        self.history = _reserve_int32(num_rows, max_model_len)
        self.known = np.zeros(num_rows, np.int32)
        self.scheduled = np.zeros(num_rows, np.int32)
        self.computed = np.zeros(num_rows, np.int32)
        self.limit = np.zeros(num_rows, np.int32)
        self.prompt_length = np.zeros(num_rows, np.int32)
        self.min_length = np.zeros(num_rows, np.int32)
        self.room = np.zeros(num_rows, np.int32)
        self.num_hashed = np.zeros(num_rows, np.int32)
        self.hash_at = np.zeros(num_rows, np.int32)
        self.last_step = np.zeros(num_rows, np.int64)
        self.last_token_s = np.zeros(num_rows, np.float64)
        self.request_id = np.zeros(num_rows, np.int64)
        self.choice = np.zeros(num_rows, np.int32)
        self.owner = np.zeros(num_rows, np.int32)
        self.alive = np.zeros(num_rows, np.bool_)
        self.decoding = np.zeros(num_rows, np.bool_)
        self.masked = np.zeros(num_rows, np.bool_)
        self.ends = np.full((num_rows, MAX_FAST_ENDS), _NO_TOKEN, np.int32)
        self.many_ends = np.zeros(num_rows, np.bool_)
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.running: list[Sequence] = []
        self.reserved_blocks = 0
        self.freed_rows: list[int] = []  # rows freed since the last plan, which must name them
        self._held_back: list[Sequence] = []
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._decode_rows: Array | None = None
        self._tenants: Tenants | None = None
        self._prefilling: list[Sequence] | None = None

    @property
    def num_free_rows(self) -> int:
        """Rows that `seat` can give."""
        return len(self._free_rows)

    @property
    def num_free_blocks(self) -> int:
        """Blocks free for sequences that have none set aside."""
        return self.pool.num_free - self.reserved_blocks

    @property
    def is_settled(self) -> bool:
        """No sequence waits for a plan in flight to return."""
        return not self._held_back

    @property
    def num_held_back_blocks(self) -> int:
        """Blocks that become free when the plans in flight have returned."""
        return sum(self.pool.num_freed_by(sequence.blocks) for sequence in self._held_back)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def decode_rows(self) -> Array:
        """Rows that decode, in the order in which they were seated, int32. The same array while they are the same."""
        if self._decode_rows is None:
            rows = [sequence.row for sequence in self.running if sequence.state is State.DECODE]
            self._decode_rows = np.array(rows, np.int32)
        return self._decode_rows

    def tenants(self, rows: Array) -> Tenants:
        """Of these rows; gathered once for an array that comes again, as `decode_rows` does step after step. No row
        gets another tenant while a plan in flight holds such an array.
        """
        if self._tenants is None or self._tenants.rows is not rows:
            self._tenants = Tenants(
                rows=rows,
                limit=self.limit[rows],
                ends=self.ends[rows],
                has_many_ends=bool(self.many_ends[rows].any()),
                request_id=self.request_id[rows],
                choice=self.choice[rows],
                owner=self.owner[rows],
                has_masked=bool(self.masked[rows].any()),
            )
        return self._tenants

    def prefilling(self) -> list[Sequence]:
        """Sequences whose known tokens are not all planned yet, in the order in which they were seated."""
        if self._prefilling is None:
            self._prefilling = [sequence for sequence in self.running if sequence.state is State.PREFILL]
        return self._prefilling

    def seat(self, sequence: Sequence, matched: list[int], now: float) -> None:
        """Give the sequence a row and the blocks `matched`, whose positions count as computed."""
        row = self._free_rows.pop()
        request, tokens = sequence.request, sequence.tokens
        sampling = request.sampling
        num_matched = len(matched) * self.block_size
        self.history[row, : len(tokens)] = tokens
        self.known[row] = len(tokens)
        self.scheduled[row] = self.computed[row] = num_matched
        self.limit[row] = self.limit_of(sequence)
        self.prompt_length[row] = request.prompt_length
        self.min_length[row] = request.prompt_length + (0 if request.grammar else sampling.min_tokens)
        self.room[row] = num_matched
        self._note_hashed(row, len(matched))
        self.last_step[row] = 0
        self.last_token_s[row] = now if len(tokens) == request.prompt_length else sequence.last_token_s
        self.request_id[row] = request.request_id
        self.choice[row] = sequence.choice
        self.owner[row] = request.owner
        self.alive[row] = True
        self.decoding[row] = False
        self.masked[row] = request.is_masked
        self._set_ends(row, request.end_token_ids + sampling.stop_token_ids)
        self.sequences[row] = sequence
        sequence.row, sequence.saved, sequence.blocks = row, None, matched
        sequence.state = State.PREFILL
        self.running.append(sequence)
        self._prefilling = None
        if sequence.reserved:
            self.reserved_blocks += self.blocks_for(int(self.limit[row])) - len(matched)

    def limit_of(self, sequence: Sequence) -> int:
        """Total length at which the sequence ends."""
        return min(sequence.request.prompt_length + sequence.request.sampling.max_tokens, self.max_model_len)

    def grant(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """Lengthen a seated sequence's block table by blocks that are free for it."""
        blocks = self.pool.take(num_blocks)
        sequence.blocks.extend(blocks)
        self.room[sequence.row] += num_blocks * self.block_size
        if sequence.reserved:
            self.reserved_blocks -= num_blocks
        return blocks

    def start_decoding(self, sequence: Sequence) -> None:
        """All known tokens are planned: from now on one token per step."""
        sequence.state = State.DECODE
        self.decoding[sequence.row] = True
        self._decode_rows = self._prefilling = None

    def start_pooling(self, sequence: Sequence) -> None:
        """All its tokens are planned, and no other will be: its vector comes with the step that ends it."""
        sequence.state = State.POOLING
        self._prefilling = None

    def end(self, sequence: Sequence) -> None:
        """The sequence is over; its row and blocks come back once no plan in flight names it."""
        if sequence.row < 0:
            sequence.state = State.ENDED
            return
        self.alive[sequence.row] = False
        self._leave(sequence, State.ENDED)

    def preempt(self, sequence: Sequence) -> None:
        """Take row and blocks from the sequence once its pending tokens are committed."""
        sequence.num_preemptions += 1
        self._leave(sequence, State.PREEMPTING)

    def give_back(self, returned_step: int) -> list[Sequence]:
        """Free what was held for plans up to `returned_step`; the preempted among them, ready to wait again."""
        ready = [sequence for sequence in self._held_back if self.last_step[sequence.row] <= returned_step]
        if not ready:
            return []
        self._held_back = [sequence for sequence in self._held_back if self.last_step[sequence.row] > returned_step]
        return [sequence for sequence in ready if self._unseat(sequence)]

    def remember(self, sequence: Sequence) -> None:
        """Register the sequence's newly committed full blocks with the prefix cache."""
        row = sequence.row
        num_full = min(int(self.computed[row]), int(self.known[row])) // self.block_size
        first = int(self.num_hashed[row])
        if num_full > first:
            self.cache.extend(sequence.hashes, sequence.request.root, self.history[row], num_full)
            self.cache.remember(sequence.blocks, sequence.hashes, first, num_full)
            self._note_hashed(row, num_full)

    def clear(self) -> list[Sequence]:
        """Forget every seated sequence at once, because the worker group that held them is gone."""
        seated = [sequence for sequence in self.sequences if sequence is not None]
        self._held_back.clear()
        for sequence in seated:
            sequence.state = State.ENDED
            self.alive[sequence.row] = False
            self._unseat(sequence)
        self.running.clear()
        self.freed_rows.clear()
        self.reserved_blocks = 0
        self._decode_rows = self._prefilling = None
        return seated

    def _leave(self, sequence: Sequence, state: State) -> None:
        assert sequence.state in (State.PREFILL, State.DECODE, State.POOLING, State.PREEMPTING)
        if sequence.state is State.PREEMPTING:  # already on its way out; it now ends instead of waiting again
            sequence.state = state
            return
        if sequence.reserved:
            self.reserved_blocks -= self.blocks_for(int(self.limit[sequence.row])) - len(sequence.blocks)
        self.running.remove(sequence)
        self.decoding[sequence.row] = False
        self._decode_rows = self._prefilling = None
        sequence.state = state
        self._held_back.append(sequence)

    def _unseat(self, sequence: Sequence) -> bool:
        row = sequence.row
        is_preempted = sequence.state is State.PREEMPTING
        if is_preempted:
            sequence.saved = self.history[row, : self.known[row]].copy()
            sequence.last_token_s = float(self.last_token_s[row])
            sequence.state = State.WAITING
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.row = -1
        self.alive[row] = False
        self.sequences[row] = None
        self._free_rows.append(row)
        self.freed_rows.append(row)
        return is_preempted

    def _note_hashed(self, row: int, num_blocks: int) -> None:
        self.num_hashed[row] = num_blocks
        self.hash_at[row] = (num_blocks + 1) * self.block_size

    def _set_ends(self, row: int, token_ids: tuple[int, ...]) -> None:
        self.many_ends[row] = len(token_ids) > MAX_FAST_ENDS
        self.ends[row] = _NO_TOKEN
        self.ends[row, : min(len(token_ids), MAX_FAST_ENDS)] = token_ids[:MAX_FAST_ENDS]


def _reserve_int32(num_rows: int, width: int) -> Array:
    """Zeros, [num_rows, width], whose pages the kernel provides only as they are written."""
    memory = mmap.mmap(-1, max(num_rows * width * 4, 4))
    return np.frombuffer(memory, np.int32, num_rows * width).reshape(num_rows, width)
