"""Choosing a token from logits. R rows, V vocabulary entries including padding."""

import torch

from .philox import uniform_draw

GREEDY_TEMPERATURE = 1e-4
"""Below this temperature a row takes its most likely token."""

INVALID_TOKEN = -1
"""Written for a row whose logits hold a NaN or nothing finite."""


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

    Logits are divided by the temperature, then kept: the top_k largest (0: all); of their probabilities, the
    smallest set
    from the largest down whose sum reaches top_p; of these, the ones of at least min_p times the largest. Entries
    equal to
    the last one kept are kept too. The token is the first in id order whose running sum of kept probabilities (float64)
    exceeds draw * sum. Greedy rows and broken rows as in `greedy_sample`.
    """
    valid_RV = logits_RV[:, :vocab_size]
    greedy_R = temperature_R < GREEDY_TEMPERATURE
    scaled_RV = valid_RV.float() / torch.where(greedy_R, 1.0, temperature_R).unsqueeze(1)
    probabilities_RV = _kept(scaled_RV, top_k_R, top_p_R, min_p_R)
    sums_RV = probabilities_RV.cumsum(-1)
    targets_R = uniform_draw(seeds_R, choices_R, positions_R) * sums_RV[:, -1]
    drawn_R = (sums_RV <= targets_R.unsqueeze(1)).sum(-1).clamp(max=vocab_size - 1)
    chosen_R = torch.where(greedy_R, valid_RV.argmax(-1), drawn_R)
    tokens_R.copy_(torch.where(_broken(valid_RV), INVALID_TOKEN, chosen_R))


def _kept(scaled_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor, min_p_R: torch.Tensor) -> torch.Tensor:
    """Unnormalised float64 probabilities, zero where not kept."""
    vocab_size = scaled_RV.shape[1]
    if bool((top_k_R > 0).any()):
        sorted_RV = scaled_RV.sort(-1, descending=True).values
        last_R = torch.where(top_k_R > 0, top_k_R, vocab_size).long().clamp(max=vocab_size) - 1
        scaled_RV = scaled_RV.masked_fill(scaled_RV < sorted_RV.gather(1, last_R.unsqueeze(1)), float("-inf"))
    probabilities_RV = scaled_RV.double().softmax(-1)
    if bool((top_p_R < 1).any()):
        probabilities_RV = _nucleus(probabilities_RV, top_p_R.double())
    largest_R = probabilities_RV.max(-1, keepdim=True).values
    return probabilities_RV.masked_fill(probabilities_RV < min_p_R.double().unsqueeze(1) * largest_R, 0.0)


def _nucleus(probabilities_RV: torch.Tensor, top_p_R: torch.Tensor) -> torch.Tensor:
    sorted_RV = probabilities_RV.sort(-1, descending=True).values
    before_RV = sorted_RV.cumsum(-1) - sorted_RV
    num_kept_R = (before_RV < top_p_R.unsqueeze(1)).sum(-1).clamp(min=1)
    cutoff_R = sorted_RV.gather(1, (num_kept_R - 1).unsqueeze(1))
    outside_RV = (probabilities_RV < cutoff_R) & (top_p_R < 1).unsqueeze(1)
    return probabilities_RV.masked_fill(outside_RV, 0.0)


def _broken(logits_RV: torch.Tensor) -> torch.Tensor:
    """True for rows that hold a NaN or no finite maximum."""
    return ~torch.isfinite(logits_RV.amax(-1))
