"""Token embedding lookup. T tokens, V ids held here, D channels."""

import torch


def embed(out_TD: torch.Tensor, token_ids_T: torch.Tensor, table_VD: torch.Tensor, first_id: int) -> None:
    """out[t] = table[token_ids[t] - first_id]; zeros where the id is not held here (another rank holds it)."""
    local_T = token_ids_T.long() - first_id
    held_T = (local_T >= 0) & (local_T < table_VD.shape[0])
    rows_TD = torch.nn.functional.embedding(local_T.clamp(0, table_VD.shape[0] - 1), table_VD)
    out_TD.copy_(rows_TD.masked_fill_(~held_T.unsqueeze(-1), 0))
