"""Tokens and log-probabilities against a reference model: equal, but for ties that the reference cannot tell apart."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

TIE = 1e-4
"""Two tokens whose reference logits lie this near may be swapped."""
NUM_TOP = 8


class Scores(NamedTuple):
    """Of a text's second to last token (one entry fewer than tokens), given what stands before each."""

    logits: torch.Tensor  # of the token that stands there
    logprobs: torch.Tensor
    top_ids: torch.Tensor  # [entries, NUM_TOP]
    top_logits: torch.Tensor
    top_logprobs: torch.Tensor


class Reference:
    """Scores of texts by a transformers model in float32, each text computed once."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self._known: dict[tuple[int, ...], Scores] = {}

    def scores(self, tokens: Sequence[int]) -> Scores:
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = self._compute(key)
        return self._known[key]

    def _compute(self, tokens: tuple[int, ...]) -> Scores:
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            logits = self.model(ids.to(self.device)).logits[0, :-1].float().cpu()
        targets = ids[0, 1:, None]
        norms = logits.logsumexp(-1, keepdim=True)
        own, top = logits.gather(1, targets), logits.topk(NUM_TOP, dim=-1)
        return Scores(own[:, 0], (own - norms)[:, 0], top.indices, top.values, top.values - norms)

    def count_ties(self, prompt: Sequence[int], output: Sequence[int]) -> int:
        """Number of accepted differences from greedy choice; after one, the comparison goes on from our tokens. Fails
        on any other difference.
        """
        scores, num_ties = self.scores([*prompt, *output]), 0
        for place in range(len(output)):
            entry = len(prompt) - 1 + place
            best = int(scores.top_ids[entry, 0])
            if output[place] == best:
                continue
            gap = float(scores.top_logits[entry, 0] - scores.logits[entry])
            assert gap <= TIE, f"token {place}: {output[place]} instead of {best}, whose logit is {gap:.2e} higher"
            num_ties += 1
        return num_ties

    def check_tops(self, entry: int, tokens: Sequence[int], tops: Sequence[tuple[int, float]], limit: float) -> None:
        """Alternatives at one entry: the reference's ids in its order, ties apart; values within `limit`."""
        scores = self.scores(tokens)
        ids, values = scores.top_ids[entry].tolist(), scores.top_logprobs[entry].tolist()
        expected = dict(zip(ids, values, strict=True))
        for place, (token, value) in enumerate(tops):
            assert abs(value - values[place]) <= limit, f"entry {entry}, place {place}: {value}, not {values[place]}"
            assert token == ids[place] or abs(expected.get(token, values[-1]) - values[place]) <= TIE, (
                f"entry {entry}, place {place}: {token} instead of {ids[place]}"
            )


def count_ties(reference: torch.nn.Module, prompt: list[int], output: list[int]) -> int:
    """`Reference.count_ties` of one text."""
    return Reference(reference).count_ties(prompt, output)
