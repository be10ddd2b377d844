"""Collectives between two real processes, to the last bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..platforms.contract import Clause, Found, Platform, WorkerGroup
from .command_line import PACKAGE
from .judgement import clause, demand, violated
from .subject import Subject

_LIMIT_S = 120
NUM_RANKS = 2


@clause("collectives.alone", Clause.COLLECTIVES)
def test_one_rank_needs_none(subject: Subject, tmp_path: Path) -> None:
    group = WorkerGroup(rank=0, num_ranks=1, generation=1, run_directory=str(tmp_path), timeout_s=10)
    demand(subject.backend.communicator(group) is None, "a group of one got a communicator; the contract says None")


@clause("collectives.two_ranks", Clause.COLLECTIVES)
def test_two_processes(platform: Platform, outcome: Found, tmp_path: Path, subject: Subject) -> None:
    """all_reduce and all_gather of several sizes and dtypes, twice: a group that is made again works too."""
    indices = [device.index for device in outcome.devices][:NUM_RANKS]
    if len(indices) < NUM_RANKS and not subject.backend.profile.memory_is_shared:
        pytest.skip("two ranks need two devices, and there is one")
    for generation in (1, 2):
        _run_ranks(platform.name, [indices[rank % len(indices)] for rank in range(NUM_RANKS)], generation, tmp_path)


def _run_ranks(name: str, indices: list[int], generation: int, folder: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE}.collective_rank", name, str(index), str(rank), str(generation), folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, index in enumerate(indices)
    ]
    try:
        ends = [rank.communicate(timeout=_LIMIT_S) for rank in ranks]
    except subprocess.TimeoutExpired:
        violated(f"two ranks did not finish a few collectives in {_LIMIT_S} s")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, (rank, (said, errors)) in enumerate(zip(ranks, ends, strict=True)):
        if rank.returncode:
            last = (said.strip() or errors.strip() or "nothing").splitlines()[-1]
            violated(f"rank {number} of {len(ranks)} says: {last}")
