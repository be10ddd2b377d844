"""Gated activations. T tokens, I intermediate channels."""

import torch


def silu_and_mul(out_TI: torch.Tensor, gate_up_TJ: torch.Tensor) -> None:
    """out = silu(gate) * up, where J = 2 I holds the gate channels first."""
    gate_TI, up_TI = gate_up_TJ.chunk(2, dim=-1)
    torch.mul(torch.nn.functional.silu(gate_TI), up_TI, out=out_TI)
