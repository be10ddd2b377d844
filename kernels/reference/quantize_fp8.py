"""Quantisation of activations to 8-bit floats (e4m3, finite). T tokens, D channels."""

import torch

LARGEST = 448.0
"""The largest finite value of e4m3."""

SMALLEST_SCALE = 2.0**-100
"""Keeps a row of zeros from dividing by zero, and every quotient a normal float32 number."""


def quantize_fp8(out_TD: torch.Tensor, scales: torch.Tensor, x_TD: torch.Tensor, is_static: bool) -> None:
    """out = x / scale, cut to what e4m3 holds and rounded to nearest even; x is about out * scale.

    Static: `scales` `[1]` is given, one for the whole tensor. Dynamic: `scales` `[T]` is written, max |x| / 448 of
    each row. Scales are float32. A NaN stays one; a dynamic row that holds one has a NaN for its scale.
    """
    x_float = x_TD.float()
    if is_static:
        scale = scales.reshape(1, 1)
    else:
        largest = torch.full((), LARGEST, device=x_float.device)  # a number would be multiplied by its inverse on CUDA
        scale = (x_float.abs().amax(-1, keepdim=True) / largest).clamp(min=SMALLEST_SCALE)
        scales.copy_(scale.squeeze(-1))
    out_TD.copy_((x_float / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn))
