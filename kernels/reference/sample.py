"""Choosing a token from logits. R rows, V vocabulary entries including padding."""

import torch

from .philox import random_words

GREEDY_TEMPERATURE = 1e-4
"""Below this temperature a row takes its most likely token."""

INVALID_TOKEN = -1
"""Written for a row whose logits hold a NaN or nothing finite, or overflow when divided by the temperature."""

_ROWS_AT_ONCE = 16
"""Words and sums take some ten times the memory of the logits."""


def greedy_sample(tokens_R: torch.Tensor, logits_RV: torch.Tensor, vocab_size: int) -> None:
    """The first most likely id below vocab_size of each row; INVALID_TOKEN for a broken row."""
    valid_RV = logits_RV[:, :vocab_size]
    best_R = valid_RV.argmax(-1)
    tokens_R.copy_(torch.where(_broken(valid_RV), INVALID_TOKEN, best_R))


def sample(
    tokens_R: torch.Tensor,
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    seeds_R: torch.Tensor,
    choices_R: torch.Tensor,
    positions_R: torch.Tensor,
    vocab_size: int,
) -> None:
    """Draw one id below vocab_size per row.

    Logits are divided by the temperature (float32), then kept: the top_k largest (0: all); of their probabilities
    (float64), the smallest set from the largest down whose sum reaches top_p; of these, the ones of at least min_p
    times the largest. Entries equal to the last one kept are kept too. The token is the first id with the largest sum
    (float32) of its scaled logit and its Gumbel noise, which draws from the probabilities of what is kept. Rows below
    GREEDY_TEMPERATURE have no noise; broken rows as in `greedy_sample`.

    Other implementations may compute the noise in float32, to 1e-6 of itself or absolutely: another token is then drawn
    only where the best two sums are that close, about once in a million draws.
    """
    rows = (logits_RV[:, :vocab_size], temperature_R, top_k_R, top_p_R, min_p_R, seeds_R, choices_R, positions_R)
    for begin in range(0, len(tokens_R), _ROWS_AT_ONCE):
        some = slice(begin, begin + _ROWS_AT_ONCE)
        tokens_R[some] = _drawn(*(tensor[some] for tensor in rows))


def _drawn(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    seeds_R: torch.Tensor,
    choices_R: torch.Tensor,
    positions_R: torch.Tensor,
) -> torch.Tensor:
    greedy_R = temperature_R < GREEDY_TEMPERATURE
    scaled_RV = logits_RV.float() / torch.where(greedy_R, 1.0, temperature_R).unsqueeze(1)
    noise_RV = gumbel(random_words(seeds_R, choices_R, positions_R, logits_RV.shape[1]))
    sums_RV = scaled_RV + noise_RV.masked_fill(greedy_R.unsqueeze(1), 0.0)
    sums_RV = sums_RV.masked_fill(~_kept(scaled_RV, top_k_R, top_p_R, min_p_R), float("-inf"))
    is_broken_R = _broken(logits_RV) | _broken(scaled_RV)
    return torch.where(is_broken_R, INVALID_TOKEN, sums_RV.argmax(-1))


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """Gumbel noise (float32) of 32-bit words: the middle v of the word's share of [0, 1], then -log(-log(1 - v)). The
    largest comes from the smallest words, so that its tail is fine: 22.9 at most, -3.2 at least.
    """
    v = (words.double() + 0.5) * 2.0**-32
    return -(-torch.log1p(-v)).log().float()


def _kept(scaled_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor, min_p_R: torch.Tensor) -> torch.Tensor:
    least_R1 = (scaled_RV.amax(-1).double() + min_p_R.double().log()).unsqueeze(1)
    is_kept_RV = scaled_RV.double() >= least_R1
    takes_k_R, takes_p_R = top_k_R > 0, top_p_R < 1
    if bool((takes_k_R | takes_p_R).any()):
        sorted_RV = scaled_RV.sort(-1, descending=True).values
        last_R = torch.where(takes_k_R, top_k_R, scaled_RV.shape[1]).long().clamp(max=scaled_RV.shape[1]) - 1
        lowest_R1 = sorted_RV.gather(1, last_R.unsqueeze(1))
        nucleus_R1 = _lowest_of_nucleus(sorted_RV.masked_fill(sorted_RV < lowest_R1, float("-inf")), top_p_R.double())
        is_kept_RV &= scaled_RV >= torch.where(takes_p_R.unsqueeze(1), nucleus_R1, lowest_R1)
    return is_kept_RV


def _lowest_of_nucleus(sorted_RV: torch.Tensor, top_p_R: torch.Tensor) -> torch.Tensor:
    """`[R, 1]`: the smallest logit of the nucleus; of sorted rows."""
    probabilities_RV = sorted_RV.double().softmax(-1)
    before_RV = probabilities_RV.cumsum(-1) - probabilities_RV
    num_kept_R1 = (before_RV < top_p_R.unsqueeze(1)).sum(-1, keepdim=True).clamp(min=1)
    return sorted_RV.gather(1, num_kept_R1 - 1)


def _broken(logits_RV: torch.Tensor) -> torch.Tensor:
    """True for rows that hold a NaN or no finite maximum."""
    return ~torch.isfinite(logits_RV.amax(-1))
