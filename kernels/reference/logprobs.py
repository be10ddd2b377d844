"""Log probabilities of the raw logits. R rows, V vocabulary entries including padding, K most likely ones asked."""

import torch


def token_logprobs(
    logprobs_R: torch.Tensor,
    ranks_R: torch.Tensor,
    top_logprobs_RK: torch.Tensor,
    top_ids_RK: torch.Tensor,
    logits_RV: torch.Tensor,
    tokens_R: torch.Tensor,
    vocab_size: int,
) -> None:
    """Of each row's token: its log probability among ids below vocab_size, its rank (1 is the most likely; equals
    share the
    best rank), and the K most likely ids with theirs, most likely first. A negative token (broken row) counts as id 0.
    """
    all_RV = logits_RV[:, :vocab_size].float().log_softmax(-1)
    own_R1 = all_RV.gather(1, tokens_R.long().clamp(min=0).unsqueeze(1))
    logprobs_R.copy_(own_R1.squeeze(1))
    ranks_R.copy_((all_RV > own_R1).sum(-1) + 1)
    num_top = top_ids_RK.shape[1]
    if num_top:
        top = all_RV.topk(num_top, dim=-1)
        top_logprobs_RK.copy_(top.values)
        top_ids_RK.copy_(top.indices)
