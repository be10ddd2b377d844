"""Penalties on what was said before. P penalised rows, V vocabulary entries, R rows of logits."""

import torch


def apply_penalties(
    logits_RV: torch.Tensor,
    rows_P: torch.Tensor,
    output_counts_PV: torch.Tensor,
    in_prompt_PV: torch.Tensor,
    presence_P: torch.Tensor,
    frequency_P: torch.Tensor,
    repetition_P: torch.Tensor,
) -> None:
    """Change, in place, the rows of logits that `rows` names.

    Repetition divides positive and multiplies negative logits of ids seen in prompt or output; frequency subtracts
    itself times the output count; presence subtracts itself once from ids in the output.
    """
    rows = rows_P.long()
    logits_PV = logits_RV[rows]
    in_output_PV = output_counts_PV > 0
    repetition = repetition_P.unsqueeze(1)
    repeated_PV = torch.where(logits_PV > 0, logits_PV / repetition, logits_PV * repetition)
    logits_PV = torch.where(in_output_PV | in_prompt_PV.bool(), repeated_PV, logits_PV)
    logits_PV = logits_PV - frequency_P.unsqueeze(1) * output_counts_PV - presence_P.unsqueeze(1) * in_output_PV
    logits_RV[rows] = logits_PV
