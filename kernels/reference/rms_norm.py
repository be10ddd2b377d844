"""Root-mean-square norms. T tokens, D channels (any leading dimensions count as T)."""

import torch


def rms_norm(out_TD: torch.Tensor, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> None:
    """out = weight * x / sqrt(mean(x^2) + eps), the mean in float32, rounded to the dtype before the weight."""
    x_float = x_TD.float()
    scale = torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + eps)
    out_TD.copy_(weight_D * (x_float * scale).to(x_TD.dtype))


def fused_add_rms_norm(
    out_TD: torch.Tensor, residual_TD: torch.Tensor, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> None:
    """residual += x, in place; out = rms_norm(residual)."""
    residual_TD.add_(x_TD)
    rms_norm(out_TD, residual_TD, weight_D, eps)
