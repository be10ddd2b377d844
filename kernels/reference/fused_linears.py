"""Matrix products with what stands around them in a decoder's layer, in float32. T tokens, D residual channels, K
inputs, N outputs, I gated channels (J = 2 I).
"""

import torch
from torch.nn.functional import linear, silu

from .rms_norm import rms_norm


def norm_linear(
    out_TN: torch.Tensor,
    residual_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    weight_ND: torch.Tensor,
    bias_N: torch.Tensor | None,
    eps: float,
) -> None:
    """out = rms_norm(residual) @ weight.T + bias; nothing is rounded on the way."""
    out_TN.copy_(linear(_normed(residual_TD, norm_weight_D, eps), weight_ND.float(), _float(bias_N)))


def norm_gate_up(
    out_TI: torch.Tensor,
    residual_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    weight_JD: torch.Tensor,
    bias_J: torch.Tensor | None,
    eps: float,
) -> None:
    """out = silu(gate) * up, where the gate channels stand first in rms_norm(residual) @ weight.T + bias."""
    gate_up_TJ = linear(_normed(residual_TD, norm_weight_D, eps), weight_JD.float(), _float(bias_J))
    gate_TI, up_TI = gate_up_TJ.chunk(2, dim=-1)
    out_TI.copy_(silu(gate_TI) * up_TI)


def linear_add(
    residual_TD: torch.Tensor, x_TK: torch.Tensor, weight_DK: torch.Tensor, bias_D: torch.Tensor | None
) -> None:
    """residual += x @ weight.T + bias, in place."""
    residual_TD.add_(linear(x_TK.float(), weight_DK.float(), _float(bias_D)))


def _normed(residual_TD: torch.Tensor, norm_weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    residual_float = residual_TD.float()
    normed_TD = torch.empty_like(residual_float)
    rms_norm(normed_TD, residual_float, norm_weight_D.float(), eps)
    return normed_TD


def _float(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.float()
