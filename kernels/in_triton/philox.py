"""The random draw, bit for bit as `reference/philox.py` defines it: Philox4x32-10, 53 bits of its first two words."""

import triton
import triton.language as tl


@triton.jit
def _halves(word, multiplier):
    """High and low 32 bits of a product, as uint64."""
    product = word * multiplier
    return product >> 32, product & 0xFFFFFFFF


@triton.jit
def uniform_draw(seed, choice, position):
    """One float64 in [0, 1) of scalars: seed int64, choice and position integers."""
    mask = tl.full([], 0xFFFFFFFF, tl.uint64)
    first_multiplier = tl.full([], 0xD2511F53, tl.uint64)
    second_multiplier = tl.full([], 0xCD9E8D57, tl.uint64)
    c0 = position.to(tl.int64).to(tl.uint64, bitcast=True) & mask
    c1 = choice.to(tl.int64).to(tl.uint64, bitcast=True) & mask
    c2 = mask & 0
    c3 = mask & 0
    key = seed.to(tl.int64).to(tl.uint64, bitcast=True)
    k0 = key & mask
    k1 = key >> 32
    for _ in tl.static_range(10):
        high0, low0 = _halves(c0, first_multiplier)
        high1, low1 = _halves(c2, second_multiplier)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + 0x9E3779B9) & mask
        k1 = (k1 + 0xBB67AE85) & mask
    bits = ((c0 << 21) | (c1 >> 11)).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16
