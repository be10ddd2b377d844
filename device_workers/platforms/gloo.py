"""Collectives over the loopback interface between the workers of one machine; they meet at a file."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from .contract import WorkerGroup

_LOOPBACK = "127.0.0.1"


class GlooCommunicator:
    """One worker group's collectives. Every rank gets the same bits."""

    def __init__(self, group: WorkerGroup) -> None:
        distributed: Any = torch.distributed  # its types leave out most of what gloo offers
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=group.timeout_s)
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        store = distributed.FileStore(str(Path(group.run_directory) / f"meet-{group.generation}"), group.num_ranks)
        store.set_timeout(timedelta(seconds=group.timeout_s))
        self._group = distributed.ProcessGroupGloo(store, group.rank, group.num_ranks, options)
        self.rank = group.rank
        self.num_ranks = group.num_ranks

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place; halves are summed in float32."""
        if tensor.dtype == torch.float32:
            self._group.allreduce([tensor]).wait()
            return
        wide = tensor.float()
        self._group.allreduce([wide]).wait()
        tensor.copy_(wide)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """out[r] = rank r's tensor."""
        self._group.allgather([list(out.unbind(0))], [tensor]).wait()
