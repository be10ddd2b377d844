"""Token embedding lookup. T tokens, R rows, V ids held here, D channels."""

import torch


def embed(
    out_TD: torch.Tensor,
    token_ids_T: torch.Tensor,
    last_tokens_R: torch.Tensor,
    table_VD: torch.Tensor,
    first_id: int,
) -> None:
    """out[t] = table[id - first_id]; zeros where the id is not held here (another rank holds it).

    The id is token_ids[t]; a negative one, -1 - r, stands for last_tokens[r]: what row r sampled last.
    """
    given_T = token_ids_T.long()
    ids_T = torch.where(given_T < 0, last_tokens_R[(-1 - given_T).clamp(0)].long(), given_T)
    local_T = ids_T - first_id
    held_T = (local_T >= 0) & (local_T < table_VD.shape[0])
    rows_TD = torch.nn.functional.embedding(local_T.clamp(0, table_VD.shape[0] - 1), table_VD)
    out_TD.copy_(rows_TD.masked_fill_(~held_T.unsqueeze(-1), 0))
