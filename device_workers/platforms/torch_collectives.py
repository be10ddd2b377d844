"""Collectives of a vendor's library through torch.distributed: nccl, rccl (named nccl), xccl, hccl."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from .contract import NotSupported, WorkerGroup


class TorchCommunicator:
    """One worker group's collectives on its devices. The ranks meet at a file in the run directory, one a generation.

    Results are the same bits on every rank: each library reduces in one order and hands the result round.
    """

    def __init__(self, backend: str, group: WorkerGroup, device: torch.device) -> None:
        if not torch.distributed.is_available() or not _has_backend(backend):
            raise NotSupported(f"this PyTorch is built without {backend}")
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        distributed: Any = torch.distributed  # its types leave the store out
        store = distributed.FileStore(str(Path(group.run_directory) / f"meet-{group.generation}"), group.num_ranks)
        torch.distributed.init_process_group(
            backend,
            store=store,
            rank=group.rank,
            world_size=group.num_ranks,
            timeout=timedelta(seconds=group.timeout_s),
            device_id=None if device.type == "cpu" else device,
        )
        self.rank = group.rank
        self.num_ranks = group.num_ranks

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place."""
        torch.distributed.all_reduce(tensor)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """out[r] = rank r's tensor."""
        torch.distributed.all_gather(list(out.unbind(0)), tensor)


def _has_backend(name: str) -> bool:
    return torch.distributed.is_backend_available(name)
