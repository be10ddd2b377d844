"""The communicator over torch.distributed, between two processes. gloo stands in for the vendors' libraries."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trimaran.device_workers.platforms.contract import NotSupported, WorkerGroup
from trimaran.device_workers.platforms.torch_collectives import TorchCommunicator

RANK = """
import sys
import torch
from trimaran.device_workers.platforms.contract import WorkerGroup
from trimaran.device_workers.platforms.torch_collectives import TorchCommunicator
rank, folder = int(sys.argv[1]), sys.argv[2]
for generation in (1, 2):
    group = WorkerGroup(rank=rank, num_ranks=2, generation=generation, run_directory=folder, timeout_s=30.0)
    communicator = TorchCommunicator("gloo", group, torch.device("cpu"))
    total = torch.full((3,), float(rank + generation))
    communicator.all_reduce(total)
    gathered = torch.zeros(2, 2)
    communicator.all_gather(gathered, torch.full((2,), float(rank)))
    print(total.tolist(), gathered.tolist(), flush=True)
"""


def test_two_ranks_and_a_second_generation(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    expected = "[3.0, 3.0, 3.0] [[0.0, 0.0], [1.0, 1.0]]\n[5.0, 5.0, 5.0] [[0.0, 0.0], [1.0, 1.0]]\n"
    assert outputs == [expected, expected]


def test_a_library_that_this_torch_lacks(tmp_path: Path) -> None:
    group = WorkerGroup(rank=0, num_ranks=2, generation=1, run_directory=str(tmp_path), timeout_s=1.0)
    with pytest.raises(NotSupported, match="built without hccl"):
        TorchCommunicator("hccl", group, torch.device("cpu"))
