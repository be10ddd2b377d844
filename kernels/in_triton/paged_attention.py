"""Attention over the paged cache, in three ways of walking it; every way takes prefill and decode mixed.

- tiled: single queries by programs that share a sequence's keys among them (a second kernel merges the parts), longer
  chunks by tiles of queries. Keys and values are gathered slot by slot, so any block size will do.
- bulk: the same walk; the tiles take keys and values by bulk copies of whole runs of a block (host-side tensor
  descriptors). Single queries do not: they have little to do with each run, and gathering starts sooner.
- lean: one launch for everything, small tiles, few warps, no scratch memory: a device with few multiprocessors or
  little shared memory.

T query tokens, N sequences (n has the block table of row rows_of[n]), H query heads, G key/value heads, D head size
(DP: padded to a power of two), S slots per block. GROUP = H / G query heads that share a key/value head are rows of one
program. Where there are no more tokens than sequences, each token is a place of its own (BY_TOKEN) and finds its
sequence; otherwise each sequence is one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ...ipc.facts import DeviceProfile, Problem
from .configurations import (
    Configuration,
    channels_of_chunk,
    dot_precision,
    keys_of_head,
    register_limit,
    rows_of_head,
    warps_of_head,
)
from .launching import TritonKernel, next_power_of_two

_LOG2_E = 1.4426950408889634
_NOTHING = tl.constexpr(-1.0e30)  # below every score: the maximum of no scores at all


@triton.jit
def _last_at_most(starts, wanted, num_sequences, PER_TILE: tl.constexpr):
    """The last sequence whose first token (or first tile of PER_TILE tokens) is at most `wanted`."""
    low = tl.zeros([], tl.int32)
    high = low + num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(starts + middle)
        if PER_TILE > 0:
            first = first // PER_TILE + middle
        if first <= wanted:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _place(starts, place, num_sequences, BY_TOKEN: tl.constexpr):
    """`(sequence, token)` of a place in a decode launch; a negative token where there is nothing to do."""
    if BY_TOKEN:
        sequence = place
        begin = tl.load(starts + sequence)
        end = tl.load(starts + sequence + 1)
        if (begin > place) | (end <= place):  # padding or a longer chunk stands before it
            sequence = _last_at_most(starts, place, num_sequences, 0)
        token = tl.where(place < tl.load(starts + num_sequences), place, -1)
    else:
        sequence = place
        begin = tl.load(starts + sequence)
        token = tl.where(tl.load(starts + sequence + 1) - begin == 1, begin, -1)
    return sequence, token


@triton.jit
def _scores_and_values(
    query, q_rows, has_query, num_channels, keys, values, table, start, end, group, k_strides, v_strides, scale,
    D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
    BULK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of the positions from `start`: scaled scores `[ROWS, KEYS]` and values `[KEYS, DP]`; values are zeros from `end`
    on.

    Slots beyond a sequence's end may hold anything, NaN too, and nothing times NaN is NaN. Where a head is wider than
    CHUNK channels, its queries (at `q_rows`) and keys are multiplied a chunk at a time: the whole would not fit the
    registers.
    """
    positions = start + tl.arange(0, KEYS)
    channels = tl.arange(0, DP)
    inside = positions < end
    if BULK:
        slot = tl.load(table + start // S) * S + start % S
        k = keys.load([group, slot, 0]).reshape(KEYS, DP).T
        scores = tl.dot(query, k, input_precision=PRECISION)
        v = values.load([group, slot, 0]).reshape(KEYS, DP)
        v = tl.where(inside[:, None], v, tl.zeros_like(v))
    else:
        block = tl.load(table + positions // S, mask=inside, other=0).to(tl.int64)
        k_at = block * k_strides[0] + (positions % S) * k_strides[1] + group * k_strides[2]
        v_at = block * v_strides[0] + (positions % S) * v_strides[1] + group * v_strides[2]
        if CHUNK < DP:
            scores = tl.zeros([query.shape[0], KEYS], tl.float32)
            for first in range(0, num_channels, CHUNK):  # a bound the compiler knew would be unrolled
                some = first + tl.arange(0, CHUNK)
                q_mask = has_query[:, None] & (some < D)[None, :]
                k_mask = inside[None, :] & (some < D)[:, None]
                q = tl.load(q_rows[:, None] + some[None, :], mask=q_mask, other=0.0)
                k = tl.load(keys + k_at[None, :] + some[:, None], mask=k_mask, other=0.0)
                scores = tl.dot(q, k, scores, input_precision=PRECISION)
        else:
            k_mask = inside[None, :] if D == DP else inside[None, :] & (channels < D)[:, None]
            k = tl.load(keys + k_at[None, :] + channels[:, None], mask=k_mask, other=0.0)
            scores = tl.dot(query, k, input_precision=PRECISION)
        v_mask = inside[:, None] if D == DP else inside[:, None] & (channels < D)[None, :]
        v = tl.load(values + v_at[:, None] + channels[None, :], mask=v_mask, other=0.0)
    return scores * scale, v


@triton.jit
def _weighed(scores, v, most, total, acc, PRECISION: tl.constexpr):
    """One step of the running softmax: `scores` are in powers of two, -inf where not seen."""
    higher = tl.maximum(most, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrunk = tl.exp2(most - higher)
    total = total * shrunk + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrunk[:, None], input_precision=PRECISION)
    return higher, total, acc


@triton.jit(do_not_specialize=["window", "num_channels", "num_sequences", "num_splits"])
def decode_kernel(
    out, q, keys, values, tables, rows_of, starts, lengths, parts, most_of_parts, total_of_parts,
    scale, window, num_channels, num_sequences, num_splits,
    out_stride, q_token_stride, q_head_stride, table_stride,
    k_block_stride, k_slot_stride, k_head_stride, v_block_stride, v_slot_stride, v_head_stride,
    G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr,
    KEYS: tl.constexpr, CHUNK: tl.constexpr, BY_TOKEN: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_WHOLE: tl.constexpr,
    BULK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (places x G, splits): one query token, one key/value head, one share of its keys."""
    place = tl.program_id(0) // G
    group = tl.program_id(0) % G
    split = tl.program_id(1)
    sequence, token = _place(starts, place, num_sequences, BY_TOKEN)
    if token < 0:
        return
    position = tl.load(lengths + sequence) - (tl.load(starts + sequence + 1) - token)
    first = tl.zeros([], tl.int32)
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0)
    aligned = first // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(position + 1 - aligned, num_splits), KEYS) * KEYS
    begin = aligned + split * share
    end = tl.minimum(begin + share, position + 1)

    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, DP)
    has_query = rows < GROUP
    real = has_query[:, None] & (channels < D)[None, :]
    q_rows = q + token.to(tl.int64) * q_token_stride + (group * GROUP + rows) * q_head_stride
    query = tl.load(q_rows[:, None] + channels[None, :], mask=real, other=0.0)
    table = tables + tl.load(rows_of + sequence).to(tl.int64) * table_stride
    most = tl.full([ROWS], _NOTHING, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    k_strides = (k_block_stride, k_slot_stride, k_head_stride)
    v_strides = (v_block_stride, v_slot_stride, v_head_stride)
    for start in range(begin, end, KEYS):
        scores, v = _scores_and_values(
            query, q_rows, has_query, num_channels, keys, values, table, start, end, group, k_strides, v_strides, scale,
            D, DP, S, KEYS, CHUNK, BULK, PRECISION,
        )  # fmt: skip
        positions = start + tl.arange(0, KEYS)
        seen = positions < end
        if HAS_WINDOW:
            seen = seen & (positions >= first)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        most, total, acc = _weighed(scores, v, most, total, acc, PRECISION)

    if IS_WHOLE:
        out_row = out + token.to(tl.int64) * out_stride + (group * GROUP + rows)[:, None] * D
        tl.store(out_row + channels[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=real)
    else:
        part = ((place * G + group) * num_splits + split).to(tl.int64) * GROUP + rows
        tl.store(most_of_parts + part, most, mask=rows < GROUP)
        if begin < end:
            tl.store(total_of_parts + part, total, mask=rows < GROUP)
            tl.store(parts + part[:, None] * D + channels[None, :], acc, mask=real)


@triton.jit(do_not_specialize=["num_sequences", "num_splits"])
def merge_kernel(
    out, parts, most_of_parts, total_of_parts, starts, num_sequences, num_splits, out_stride,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Grid (places x H): one head of one query token, from its parts."""
    place = tl.program_id(0) // (G * GROUP)
    head = tl.program_id(0) % (G * GROUP)
    _, token = _place(starts, place, num_sequences, BY_TOKEN)
    if token < 0:
        return
    splits = tl.arange(0, SPLITS)
    channels = tl.arange(0, DP)
    part = ((place * G + head // GROUP) * num_splits + splits).to(tl.int64) * GROUP + head % GROUP
    most = tl.load(most_of_parts + part, mask=splits < num_splits, other=_NOTHING)
    has_keys = most > _NOTHING
    share = tl.exp2(most - tl.max(most, 0))
    total = tl.load(total_of_parts + part, mask=has_keys, other=0.0) * share
    real = has_keys[:, None] & (channels < D)[None, :]
    acc = tl.load(parts + part[:, None] * D + channels[None, :], mask=real, other=0.0) * share[:, None]
    whole = tl.sum(acc, 0) / tl.sum(total, 0)
    out_row = out + token.to(tl.int64) * out_stride + head * D
    tl.store(out_row + channels, whole.to(out.dtype.element_ty), mask=channels < D)


@triton.jit
def _rows_of_cache(
    cache, block, slots, strides, group, channels, inside,
    D: tl.constexpr, CUT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`[slots, channels]` of one key/value head; zeros beyond its D channels (if any are: CUT), and of slots that are
    not `inside` (if any: MASKED).
    """
    rows = cache + block * strides[0] + (slots * strides[1] + group * strides[2])
    places = rows[:, None] + channels[None, :]
    if MASKED and CUT:
        found = tl.load(places, mask=inside[:, None] & (channels < D)[None, :], other=0.0)
    elif MASKED:
        found = tl.load(places, mask=inside[:, None], other=0.0)
    elif CUT:
        found = tl.load(places, mask=(channels < D)[None, :], other=0.0)
    else:
        found = tl.load(places)
    return found


@triton.jit
def _tile_step(
    query, q_rows, has_query, positions_of_rows, keys, values, table, start, end, group, k_strides, v_strides,
    scale, window, num_channels, most, total, acc,
    D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, BULK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the running softmax: the keys and values of KEYS positions from `start`.

    Unless MASKED every row sees every one of them: nothing is compared, and no value passes through registers on its
    way from the cache to the matrix units. Slots from `end` on may hold anything, NaN too, and nothing times NaN is
    NaN: their values become zeros. `scale` is positive: the highest score stays the highest. Where a head is wider than
    CHUNK channels, its queries (at `q_rows`) and keys are multiplied a chunk at a time: the whole would not fit the
    registers.
    """
    channels = tl.arange(0, DP)
    positions = start + tl.arange(0, KEYS)
    inside = positions < end
    if S % KEYS == 0:  # within one block
        block = tl.load(table + start // S)
        slots = start % S + tl.arange(0, KEYS)
    else:
        if MASKED:
            block = tl.load(table + positions // S, mask=inside, other=0)
        else:
            block = tl.load(table + positions // S)
        slots = positions % S
    if BULK:
        k = keys.load([group, block * S + start % S, 0]).reshape(KEYS, DP)
        scores = tl.dot(query, k.T, input_precision=PRECISION)
    else:
        block = block.to(tl.int64)
        if CHUNK < DP:
            scores = tl.zeros([query.shape[0], KEYS], tl.float32)
            for first in range(0, num_channels, CHUNK):  # a bound the compiler knew would be unrolled
                some = first + tl.arange(0, CHUNK)
                q_mask = has_query[:, None] & (some < D)[None, :]
                q = tl.load(q_rows[:, None] + some[None, :], mask=q_mask, other=0.0)
                k = _rows_of_cache(keys, block, slots, k_strides, group, some, inside, D, True, MASKED)
                scores = tl.dot(q, k.T, scores, input_precision=PRECISION)
        else:
            k = _rows_of_cache(keys, block, slots, k_strides, group, channels, inside, D, D < DP, MASKED)
            scores = tl.dot(query, k.T, input_precision=PRECISION)
    if BULK:
        v = values.load([group, block * S + start % S, 0]).reshape(KEYS, DP)
        if MASKED:
            v = tl.where(inside[:, None], v, tl.zeros_like(v))
    else:
        v = _rows_of_cache(values, block, slots, v_strides, group, channels, inside, D, D < DP, MASKED)
    if MASKED:
        distance = positions_of_rows[:, None] - positions[None, :]
        seen = (distance >= 0) & inside[None, :]
        if HAS_WINDOW:
            seen = seen & (distance < window)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    shrunk = tl.exp2(most - higher)
    total = total * shrunk + tl.sum(weights, 1)
    acc = acc * shrunk[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return higher, total, acc


@triton.jit(do_not_specialize=["window", "num_channels", "num_sequences"])
def tile_kernel(
    out, q, keys, values, tables, rows_of, starts, lengths, scale, window, num_channels, num_sequences,
    out_stride, q_token_stride, q_head_stride, table_stride,
    k_block_stride, k_slot_stride, k_head_stride, v_block_stride, v_slot_stride, v_head_stride,
    G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, S: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, SKIPS_SINGLES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, BULK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles x G): TOKENS queries of one sequence, times the heads of one group. Sequence n has the tiles from
    starts[n] // TOKENS + n on, of which those beyond its last query have nothing to do. Last tiles go first: they see
    the most keys.
    """
    tile = tl.num_programs(0) // G - 1 - tl.program_id(0) // G
    group = tl.program_id(0) % G
    sequence = _last_at_most(starts, tile, num_sequences, TOKENS)
    sequence_start = tl.load(starts + sequence)
    sequence_end = tl.load(starts + sequence + 1)
    num_queries = sequence_end - sequence_start
    before = (tile - sequence_start // TOKENS - sequence) * TOKENS
    if (before >= num_queries) | ((num_queries == 1) & SKIPS_SINGLES):
        return
    length = tl.load(lengths + sequence)
    lowest = length - num_queries + before
    end = tl.minimum(lowest + TOKENS, length)

    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, DP)
    tokens = before + rows // GROUP
    heads = group * GROUP + rows % GROUP
    positions_of_rows = lowest + rows // GROUP
    has_query = (rows < TOKENS * GROUP) & (tokens < num_queries)
    real = has_query[:, None] & (channels < D)[None, :]
    at = (sequence_start + tokens).to(tl.int64)
    q_rows = q + at * q_token_stride + heads * q_head_stride
    query = tl.load(q_rows[:, None] + channels[None, :], mask=real, other=0.0)
    table = tables + tl.load(rows_of + sequence).to(tl.int64) * table_stride
    most = tl.full([ROWS], _NOTHING, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    k_strides = (k_block_stride, k_slot_stride, k_head_stride)
    v_strides = (v_block_stride, v_slot_stride, v_head_stride)
    begin = tl.zeros([], tl.int32)
    whole = begin
    all_see = (lowest + 1) // KEYS * KEYS
    if HAS_WINDOW:
        begin = tl.maximum(lowest - window + 1, 0) // KEYS * KEYS
        if BULK:
            whole = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), KEYS) * KEYS, all_see)
        else:  # masks cost the least there, and one more loop more scalar registers than AMD's devices have
            all_see = begin
    FIRST: tl.constexpr = 1 if not HAS_WINDOW else (0 if BULK else 2)
    bounds = (begin, whole, all_see, end)
    for part in tl.static_range(FIRST, 3):  # some rows see no more; all rows see; some do not yet
        for start in range(bounds[part], bounds[part + 1], KEYS):
            most, total, acc = _tile_step(
                query, q_rows, has_query, positions_of_rows, keys, values, table, start, end, group, k_strides,
                v_strides, scale, window, num_channels, most, total, acc,
                D, DP, S, KEYS, CHUNK, part != 1, HAS_WINDOW, BULK, PRECISION,
            )  # fmt: skip

    out_at = (at * out_stride + heads * D)[:, None] + channels[None, :]
    tl.store(out + out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)


class _PagedAttention(TritonKernel):
    """What the three have in common: sizes that are settled when it is loaded."""

    bulk = False

    def __init__(self, configuration: Configuration, profile: DeviceProfile, problem: Problem, device: str) -> None:
        self.configuration = configuration
        self._group = problem.num_heads // problem.num_kv_heads
        self._dtype = problem.dtype
        self._padded = next_power_of_two(problem.head_dim)
        self._head_bytes = self._padded * (4 if problem.dtype == "float32" else 2)
        self._architecture = architecture = profile.capability.architecture
        self._precision = dot_precision(architecture)
        self._chunk = channels_of_chunk(architecture, self._padded, self._head_bytes, problem.dtype)
        self._block_size = problem.block_size

    def _is_bulk(self, kind: str) -> bool:
        return self.bulk and kind == "tile"

    def _num_keys(self, kind: str) -> int:
        """Keys that a program takes at once; a bulk copy stays within one block."""
        num_keys = keys_of_head(self.configuration[f"{kind}_keys"], self._head_bytes, self._dtype)
        return min(num_keys, self._block_size) if self._is_bulk(kind) else num_keys

    def _resources(self, kind: str) -> dict[str, int]:
        num_warps = warps_of_head(self.configuration[f"{kind}_warps"], self._head_bytes)
        limit = register_limit(self._architecture, num_warps)
        return {"num_warps": num_warps, "num_stages": self.configuration[f"{kind}_stages"], **limit}

    def _sizes(self, kind: str, q: torch.Tensor, k_cache: torch.Tensor) -> dict[str, Any]:
        head_dim = q.shape[2]
        return {
            "G": k_cache.shape[2],
            "GROUP": self._group,
            "D": head_dim,
            "DP": self._padded,
            "S": k_cache.shape[1],
            "CHUNK": self._chunk,
            "BULK": self._is_bulk(kind),
            "PRECISION": self._precision,
        }

    def _caches(self, kind: str, *caches: torch.Tensor) -> tuple[Any, ...]:
        """What a kernel reads each by: its address, or a descriptor of `[G, slots, D]` cut into runs."""
        return tuple(self._descriptor(cache) for cache in caches) if self._is_bulk(kind) else caches

    def _descriptor(self, cache: torch.Tensor) -> Any:
        num_blocks, block_size, num_kv_heads, head_dim = cache.shape
        assert cache.stride(0) == block_size * cache.stride(1)
        shape, strides = [num_kv_heads, num_blocks * block_size, head_dim], [cache.stride(2), cache.stride(1), 1]
        return TensorDescriptor(cache, shape, strides, [1, self._num_keys("tile"), self._padded])

    def _tiles(self, arguments: tuple[Any, ...], *, takes_singles: bool) -> None:
        out, q, k_cache, v_cache, tables, rows_of, starts, lengths, scale, window, *_ = arguments
        num_tokens, num_sequences, num_keys = q.shape[0], lengths.shape[0], self._num_keys("tile")
        num_rows = rows_of_head(self.configuration["tile_rows"], self._head_bytes, self._dtype)
        num_rows = max(num_rows, next_power_of_two(self._group))
        tokens = num_rows // self._group
        grid = ((num_tokens // tokens + num_sequences) * k_cache.shape[2],)
        self.launch(
            tile_kernel,
            grid,
            *(out, q, *self._caches("tile", k_cache, v_cache), tables, rows_of, starts, lengths),
            *(scale * _LOG2_E, window, q.shape[2], num_sequences),
            *(out.stride(0), q.stride(0), q.stride(1), tables.stride(0)),
            *(*k_cache.stride()[:3], *v_cache.stride()[:3]),
            **self._sizes("tile", q, k_cache),
            ROWS=num_rows,
            TOKENS=tokens,
            KEYS=num_keys,
            SKIPS_SINGLES=not takes_singles,
            HAS_WINDOW=window > 0,
            **self._resources("tile"),
        )


class TritonPagedAttentionLean(_PagedAttention):
    def __call__(self, *arguments: Any) -> None:
        if arguments[1].shape[0]:
            self._tiles(arguments, takes_singles=True)


class TritonPagedAttentionTiled(_PagedAttention):
    """Scratch memory holds the parts of single queries whose keys several programs share."""

    def __init__(self, configuration: Configuration, profile: DeviceProfile, problem: Problem, device: str) -> None:
        super().__init__(configuration, profile, problem, device)
        self._wanted_programs = 2 * (profile.capability.num_multiprocessors or 64)
        self._kv_heads = problem.num_kv_heads
        num_parts = self._wanted_programs * self._group  # shared among any number of places, see num_splits
        sizes = (num_parts * problem.head_dim, num_parts, num_parts)
        self._scratch = tuple(torch.empty(size, dtype=torch.float32, device=device) for size in sizes)
        self.workspace_bytes = sum(tensor.nbytes for tensor in self._scratch)

    def num_splits(self, num_places: int, max_length: int) -> int:
        """How many programs share the keys of one query: enough to fill the device, each with some keys to do."""
        wanted = self._wanted_programs // max(1, num_places * self._kv_heads)
        most = max(1, max_length // (4 * self._num_keys("decode")))
        return 1 << (max(1, min(wanted, most, self.configuration["max_splits"])).bit_length() - 1)

    def __call__(self, *arguments: Any) -> None:
        num_tokens, num_sequences = arguments[1].shape[0], arguments[7].shape[0]
        if num_tokens == 0 or num_sequences == 0:
            return
        self._singles(arguments, by_token=num_tokens <= num_sequences)
        if num_tokens > num_sequences:
            self._tiles(arguments, takes_singles=False)

    def _singles(self, arguments: tuple[Any, ...], *, by_token: bool) -> None:
        out, q, k_cache, v_cache, tables, rows_of, starts, lengths, scale, window, *_ = arguments
        num_places = q.shape[0] if by_token else lengths.shape[0]
        num_sequences, num_kv_heads, num_keys = lengths.shape[0], k_cache.shape[2], self._num_keys("decode")
        num_splits = self.num_splits(num_places, tables.shape[1] * k_cache.shape[1])
        sizes = self._sizes("decode", q, k_cache)
        assert num_splits == 1 or num_places * num_kv_heads * num_splits * self._group <= self._scratch[1].numel()
        self.launch(
            decode_kernel,
            (num_places * num_kv_heads, num_splits),
            *(out, q, *self._caches("decode", k_cache, v_cache), tables, rows_of, starts, lengths),
            *(*self._scratch, scale * _LOG2_E, window, q.shape[2], num_sequences, num_splits),
            *(out.stride(0), q.stride(0), q.stride(1), tables.stride(0)),
            *(*k_cache.stride()[:3], *v_cache.stride()[:3]),
            **sizes,
            ROWS=max(16, next_power_of_two(self._group)),
            KEYS=num_keys,
            BY_TOKEN=by_token,
            HAS_WINDOW=window > 0,
            IS_WHOLE=num_splits == 1,
            **self._resources("decode"),
        )
        if num_splits > 1:
            self._merge(out, starts, num_places, num_sequences, num_splits, sizes, by_token=by_token)

    def _merge(
        self,
        out: torch.Tensor,
        starts: torch.Tensor,
        num_places: int,
        num_sequences: int,
        num_splits: int,
        sizes: dict[str, Any],
        *,
        by_token: bool,
    ) -> None:
        self.launch(
            merge_kernel,
            (num_places * out.shape[1],),
            *(out, *self._scratch, starts, num_sequences, num_splits, out.stride(0)),
            **{name: sizes[name] for name in ("G", "GROUP", "D", "DP")},
            SPLITS=next_power_of_two(self.configuration["max_splits"]),
            BY_TOKEN=by_token,
            num_warps=4,
            **register_limit(self._architecture, 4),
        )


class TritonPagedAttentionBulk(TritonPagedAttentionTiled):
    bulk = True
