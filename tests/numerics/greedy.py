"""Greedy tokens against a reference model: equal, but for ties that the reference itself cannot tell apart."""

import torch

TIE = 1e-4
"""Two tokens whose reference logits lie this near may be swapped."""


def count_ties(reference: torch.nn.Module, prompt: list[int], output: list[int]) -> int:
    """Number of accepted differences; the comparison goes on from our tokens. Fails on any other difference."""
    ids = torch.tensor([prompt + output])
    with torch.inference_mode():
        logits = reference(ids).logits[0, len(prompt) - 1 : -1].float()
    num_ties = 0
    for position, (token, row) in enumerate(zip(output, logits, strict=True)):
        best = int(row.argmax())
        if token == best:
            continue
        gap = float(row[best] - row[token])
        assert gap <= TIE, f"token {position}: {token} instead of {best}, whose logit is {gap:.2e} higher"
        num_ties += 1
    return num_ties
