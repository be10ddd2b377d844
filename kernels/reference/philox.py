"""Random words: 32 bits for each entry of a vocabulary by (seed, choice index, position), whatever else is in a batch.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). This file defines the words;
every other implementation must give the same bits.
"""

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_NUM_ROUNDS = 10


def philox(counters_X4: torch.Tensor, keys_X2: torch.Tensor) -> torch.Tensor:
    """Four 32-bit words each, as int64 `[..., 4]`, from counters and keys given likewise."""
    c0, c1, c2, c3 = counters_X4.unbind(-1)
    k0, k1 = keys_X2.unbind(-1)
    for _ in range(_NUM_ROUNDS):
        high0, low0 = _multiplied(c0, _MULTIPLIERS[0])
        high1, low1 = _multiplied(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return torch.stack((c0, c1, c2, c3), dim=-1)


def _multiplied(word_X: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a 64-bit product; int64 wraps, which keeps all 64 bits right."""
    product = word_X * multiplier
    return (product >> 32) & _WORD, product & _WORD


def random_words(
    seeds_R: torch.Tensor, choices_R: torch.Tensor, positions_R: torch.Tensor, num_words: int
) -> torch.Tensor:
    """`[R, num_words]` 32-bit words as int64. `positions` is the index of the token drawn, in its sequence.

    One counter gives the words of four entries that lie 1024 apart: entry i has word i // 1024 % 4 of counter number
    i // 4096 * 1024 + i % 1024. Processors of all kinds thus read entries that lie side by side.
    """
    num_rows, num_groups = len(seeds_R), -(-num_words // 4096)
    numbers = torch.arange(num_groups * 1024, device=seeds_R.device).expand(num_rows, -1)
    seeds, choices, positions = (tensor.long().unsqueeze(1) for tensor in (seeds_R, choices_R, positions_R))
    zeros = torch.zeros_like(numbers)
    counters_RN4 = torch.stack((zeros + (positions & _WORD), zeros + (choices & _WORD), numbers, zeros), dim=-1)
    keys_RN2 = torch.stack((zeros + (seeds & _WORD), zeros + ((seeds >> 32) & _WORD)), dim=-1)
    words_RN4 = philox(counters_RN4, keys_RN2)
    return words_RN4.view(num_rows, num_groups, 1024, 4).transpose(2, 3).flatten(1)[:, :num_words]
