"""The random draw: one uniform number per (seed, choice index, position), whatever else is in the batch.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). This file defines a draw;
every other implementation must give the same bits.
"""

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_NUM_ROUNDS = 10


def philox(counters_R4: torch.Tensor, keys_R2: torch.Tensor) -> torch.Tensor:
    """Four 32-bit words per row, as int64 `[R, 4]`, from counters and keys given likewise."""
    c0, c1, c2, c3 = counters_R4.unbind(-1)
    k0, k1 = keys_R2.unbind(-1)
    for _ in range(_NUM_ROUNDS):
        high0, low0 = _multiplied(c0, _MULTIPLIERS[0])
        high1, low1 = _multiplied(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return torch.stack((c0, c1, c2, c3), dim=-1)


def _multiplied(word_R: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a 64-bit product; int64 wraps, which keeps all 64 bits right."""
    product = word_R * multiplier
    return (product >> 32) & _WORD, product & _WORD


def uniform_draw(seeds_R: torch.Tensor, choices_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
    """One float64 in [0, 1) per row, of 53 random bits. `positions` is the index of the token drawn, in its
    sequence.
    """
    seeds, choices, positions = seeds_R.long(), choices_R.long(), positions_R.long()
    zeros = torch.zeros_like(positions)
    counters_R4 = torch.stack((positions & _WORD, choices & _WORD, zeros, zeros), dim=-1)
    keys_R2 = torch.stack((seeds & _WORD, (seeds >> 32) & _WORD), dim=-1)
    words_R4 = philox(counters_R4, keys_R2)
    bits = (words_R4[:, 0] << 21) | (words_R4[:, 1] >> 11)
    return bits.double() * 2.0**-53
