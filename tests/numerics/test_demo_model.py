"""SmolLM2 against transformers in float32: greedy tokens, chunks, tensor parallel by three."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from trimaran.ipc.worker_messages import Settled

from ..step_driver import Row, StepDriver, start_engine
from ..worker_host import WorkerHost
from .greedy import count_ties

SETTLED = Settled(block_size=16, max_num_seqs=32, max_batched_tokens=256, max_model_len=256)
pytestmark = pytest.mark.model


@pytest.fixture(scope="session")
def reference(demo_folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32, local_files_only=True).eval()


def prompts(count: int) -> list[list[int]]:
    chance = random.Random(4)
    return [[chance.randrange(20, 49_000) for _ in range(chance.randrange(3, 40))] for _ in range(count)]


def test_greedy_tokens_of_a_mixed_batch(demo_folder: Path, reference: torch.nn.Module, tmp_path: Path) -> None:
    """Twenty prompts that start one after the other, in chunks of 16, beside those that decode already."""
    engine, _ = start_engine(demo_folder, tmp_path, settled=SETTLED, dtype="float32")
    driver, waiting, running = StepDriver(engine), prompts(20), []
    ends: dict[int, int] = {}
    while waiting or running:
        if waiting:
            tokens = waiting.pop()
            running.append(Row(row=len(ends), tokens=tokens))
            ends[len(ends)] = len(tokens) + 24
        driver.run([(row, min(16, len(row.tokens) - row.computed)) for row in running])
        done = [row for row in running if len(row.tokens) == ends[row.row]]
        assert sum(count_ties(reference, row.tokens[:-24], row.tokens[-24:]) for row in done) <= 1
        running = [row for row in running if row not in done]


async def test_three_ranks(demo_folder: Path, reference: torch.nn.Module, tmp_path: Path) -> None:
    async with WorkerHost(tmp_path, 3, model=str(demo_folder), platform="cpu", dtype="float32") as host:
        await host.start(SETTLED)
        driver = StepDriver(num_blocks=100)
        rows = [Row(row=row, tokens=tokens) for row, tokens in enumerate(prompts(3))]
        for _ in range(8):
            work = [(row, len(row.tokens) - row.computed) for row in rows]
            host.send_plan(driver.plan(work))
            results = await host.results_of_step()
            assert len({int(result.tokens_hash[0]) for result in results}) == 1
            driver.commit(work, results[0])
    assert sum(count_ties(reference, row.tokens[:-8], row.tokens[-8:]) for row in rows) <= 1
