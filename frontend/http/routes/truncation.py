"""Cutting a prompt to its end, where the request asks for that."""

from typing import NamedTuple

from ...client.refusals import RequestRefused
from ..serving import Serving


class CutPrompt(NamedTuple):
    """`num_cut` None: it was not asked for."""

    token_ids: list[int]
    num_cut: int | None


def cut_prompt(token_ids: list[int], kept: int | None, max_tokens: int | None, serving: Serving) -> CutPrompt:
    """The last `kept` tokens; -1: as many as leave room for `max_tokens`, or for one. Raises RequestRefused."""
    if kept is None:
        return CutPrompt(token_ids, None)
    if kept == 0:
        raise RequestRefused(
            "truncate_prompt_tokens: 0 leaves no prompt; give at least 1, or -1 for what fits",
            param="truncate_prompt_tokens",
        )
    if kept < 0:
        limits = serving.client.limits
        assert limits is not None, "a request is taken when the limits are known"
        kept = max(limits.max_model_len - (max_tokens or 1), 1)
    cut = token_ids[-kept:]
    return CutPrompt(cut, len(token_ids) - len(cut))
