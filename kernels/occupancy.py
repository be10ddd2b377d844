"""Counts thread blocks that run at the same moment: what `diagnose` measures, and no step uses."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_NUM_PROGRAMS = 16_384
_NUM_TURNS = 2_000


@triton.jit
def count_kernel(running, most, sink, num_turns):
    """Each program enters, notes how many are inside, works for a while without memory traffic, and leaves."""
    inside = tl.atomic_add(running, 1) + 1
    tl.atomic_max(most, inside)
    value = inside.to(tl.float32)
    for _ in range(num_turns):
        value = value * 0.999 + 1.0
    tl.store(sink + tl.program_id(0), value)
    tl.atomic_add(running, -1)


def concurrent_blocks(device: str) -> int:
    """The most programs of four warps that were inside at once."""
    running, most = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    sink = torch.empty(_NUM_PROGRAMS, dtype=torch.float32, device=device)
    for _ in range(2):
        count_kernel[(_NUM_PROGRAMS,)](running, most, sink, _NUM_TURNS, num_warps=4)
    return int(most.item())
