"""Matrix product with a weight. T tokens, K inputs, N outputs."""

from typing import Any

import torch

from ..implementation import PlainWeight


class ReferenceLinear:
    """out = x @ weight.T + bias. `out` may have a wider dtype than x: the result is then converted.

    A device's graphs record its calls; recordings of a processor hold launches of C++ kernels only.
    """

    workspace_bytes = 0

    def __init__(self, device: str = "cpu") -> None:
        self.capturable = device != "cpu"

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PlainWeight:
        return PlainWeight(weight, bias)

    def __call__(self, *arguments: Any) -> None:
        out_TN, x_TK, packed = arguments
        linear(out_TN, x_TK, *packed)


def linear(
    out_TN: torch.Tensor, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> None:
    """out = x @ weight.T + bias."""
    if bias_N is None and out_TN.dtype == x_TK.dtype:
        torch.mm(x_TK, weight_NK.t(), out=out_TN)
    else:
        out_TN.copy_(torch.nn.functional.linear(x_TK, weight_NK, bias_N))
