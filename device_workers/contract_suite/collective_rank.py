"""One rank of the collectives clause, a process: `python -m … PLATFORM DEVICE RANK GENERATION FOLDER`.

Prints what is wrong and exits with 1, or exits with 0.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ...kernels.implementation import Communicator
from ..platforms.contract import Backend, WorkerGroup
from ..platforms.detection import platforms
from .judgement import Violation, demand
from .test_collectives import NUM_RANKS

_SIZES = (1, 7, 1000, 65_536)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def main(name: str, device: str, rank: str, generation: str, folder: str) -> int:
    platform = next(platform for platform in platforms() if platform.name == name)
    backend = platform.open(int(device), num_threads=1, cache_dir=Path(folder), warn=lambda text: None)
    group = WorkerGroup(
        rank=int(rank), num_ranks=NUM_RANKS, generation=int(generation), run_directory=folder, timeout_s=60
    )
    try:
        with torch.inference_mode():
            communicator = backend.communicator(group)
            if communicator is None:
                raise Violation(f"a group of {NUM_RANKS} got no communicator")
            judge(backend, communicator, group.rank)
            backend.synchronize()
    except Violation as violation:
        sys.stdout.write(f"{violation}\n")
        return 1
    return 0


def judge(backend: Backend, communicator: Communicator, rank: int) -> None:
    """Whole numbers, small enough that every dtype adds them without rounding."""
    place = (communicator.rank, communicator.num_ranks)
    demand(place == (rank, NUM_RANKS), f"the communicator says it is rank {place[0]} of {place[1]}")
    for dtype in _DTYPES:
        for size in _SIZES:
            _check_sum(backend, communicator, rank, size, dtype)
            _check_gather(backend, communicator, rank, size, dtype)


def _numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(size) * (rank + 1) + rank) % 60).to(dtype)


def _check_sum(backend: Backend, communicator: Communicator, rank: int, size: int, dtype: torch.dtype) -> None:
    tensor = _numbers(rank, size, dtype).to(backend.torch_device)
    communicator.all_reduce(tensor)
    expected = torch.stack([_numbers(other, size, dtype) for other in range(NUM_RANKS)]).sum(0)
    _same(tensor, expected.to(dtype), f"all_reduce of {size} numbers of {dtype}")


def _check_gather(backend: Backend, communicator: Communicator, rank: int, size: int, dtype: torch.dtype) -> None:
    tensor = _numbers(rank, size, dtype).to(backend.torch_device)
    out = tensor.new_zeros(NUM_RANKS, size)
    communicator.all_gather(out, tensor)
    _same(out, torch.stack([_numbers(other, size, dtype) for other in range(NUM_RANKS)]), f"all_gather of {dtype}")


def _same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    host = got.cpu()
    wrong = host != expected
    if bool(wrong.any()):
        first = int(wrong.flatten().nonzero()[0])
        has, wanted = host.flatten()[first].item(), expected.flatten()[first].item()
        raise Violation(f"{what} is wrong: element {first} is {has}, not {wanted}")


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
