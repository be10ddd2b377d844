"""Random words, bit for bit as `reference/philox.py` defines them, and the noise made of them.

The logarithms are polynomials in float32, since those of the devices differ and the fast ones fail near 1, where the
largest noise comes from.
"""

import triton
import triton.language as tl


@triton.jit
def random_words(seed, choice, position, numbers):
    """Four uint32 for each counter number: seed int64, choice and position int32 scalars, numbers an int32 block."""
    c2 = numbers.to(tl.uint32, bitcast=True)
    c0 = (c2 & 0) | position.to(tl.uint32, bitcast=True)
    c1 = (c2 & 0) | choice.to(tl.uint32, bitcast=True)
    c3 = c2 & 0
    key = seed.to(tl.uint64, bitcast=True)
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    first_multiplier = tl.full([], 0xD2511F53, tl.uint32)
    second_multiplier = tl.full([], 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, first_multiplier), c0 * first_multiplier
        high1, low1 = tl.umulhi(c2, second_multiplier), c2 * second_multiplier
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _halving(x):
    """How often 2 is in a positive float32, such that what is left lies from sqrt(1/2) to sqrt(2)."""
    return (x.to(tl.int32, bitcast=True) - 0x3F3504F3) >> 23


@triton.jit
def _rest(x, exponent):
    """What is left, less 1."""
    return (x.to(tl.int32, bitcast=True) - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _log(exponent, rest):
    """log(2^exponent (1 + rest)), to 1e-7 of itself also near 1."""
    square = rest * rest
    series = 7.0376836292e-2 * rest - 1.1514610310e-1
    series = series * rest + 1.1676998740e-1
    series = series * rest - 1.2420140846e-1
    series = series * rest + 1.4249322787e-1
    series = series * rest - 1.6668057665e-1
    series = series * rest + 2.0000714765e-1
    series = series * rest - 2.4999993993e-1
    series = series * rest + 3.3333331174e-1
    return exponent.to(tl.float32) * 0.6931471805599453 + (rest + (series * rest * square - 0.5 * square))


@triton.jit
def gumbel(word):
    """-log(-log(1 - v)) of uint32 words; v and 1 - v are both as fine as float32 can be."""
    v = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    other = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponent = _halving(other)
    waited = -_log(exponent, tl.where(exponent == 0, -v, _rest(other, exponent)))
    exponent = _halving(waited)
    return -_log(exponent, _rest(waited, exponent))
