"""Finding the k-th largest of a row without sorting it: four passes that count digits of eight bits.

A float32 becomes an unsigned integer of the same order (its key), so that a threshold is exact and equal numbers have
equal keys.
"""

import triton
import triton.language as tl


@triton.jit
def ordered_key(x):
    """uint32 that order as the float32 do; both zeros alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def number_of_key(key):
    """The float32 that has this key."""
    return tl.where((key >> 31) != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def scaled(row, offsets, inside, temperature):
    """Entries divided by the temperature, as the reference rounds them; -inf outside."""
    return tl.div_rn(tl.load(row + offsets, mask=inside, other=float("-inf")).to(tl.float32), temperature)


@triton.jit
def _with_digit(row, num_entries, found, left, temperature, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """`found` with eight more bits, those from SHIFT on, and `left` less the entries above."""
    offsets = tl.arange(0, BLOCK)
    digits = tl.arange(0, 256)
    counts = tl.zeros([256], tl.int32)
    for begin in range(0, num_entries, BLOCK):
        inside = begin + offsets < num_entries
        key = ordered_key(scaled(row, begin + offsets, inside, temperature))
        if SHIFT < 24:
            inside = inside & ((key >> (SHIFT + 8)) == (found >> (SHIFT + 8)))
        counts += tl.histogram(((key >> SHIFT) & 255).to(tl.int32), 256, mask=inside)
    at_least = tl.cumsum(counts, 0, reverse=True)
    digit = tl.max(tl.where(at_least >= left, digits, 0), 0)
    left -= tl.sum(tl.where(digits > digit, counts, 0), 0)
    return found | (digit.to(tl.uint32) << SHIFT), left


@triton.jit
def key_of_rank(row, num_entries, rank, temperature, BLOCK: tl.constexpr):
    """`(key, left)`: the key of the rank-th largest entry (1 is the largest), and how many of those with this key are
    among the rank largest. rank is at least 1 and at most num_entries.
    """
    found = tl.zeros([], tl.uint32)
    left = rank
    for step in tl.static_range(4):
        found, left = _with_digit(row, num_entries, found, left, temperature, 24 - 8 * step, BLOCK)
    return found, left
