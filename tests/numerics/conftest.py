"""What the numeric tests of the demo model share: its reference in float32 and one step engine, both made once."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from trimaran.device_workers.execution.contract import StepEngine
from trimaran.ipc.worker_messages import Settled

from ..step_driver import start_engine
from .greedy import Reference

DEMO_SETTLED = Settled(block_size=16, max_num_seqs=40, max_batched_tokens=512, max_model_len=512)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels and their verdicts, made once for all engines of the numeric tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def demo_model(demo_folder: Path) -> torch.nn.Module:
    """SmolLM2 by transformers in float32."""
    return AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32, local_files_only=True).eval()


@pytest.fixture(scope="session")
def demo_reference(demo_model: torch.nn.Module) -> Reference:
    return Reference(demo_model)


@pytest.fixture(scope="session")
def demo_engine(demo_folder: Path, cache: Path) -> StepEngine:
    """SmolLM2 in float32, for one driver at a time."""
    engine, facts = start_engine(demo_folder, cache, settled=DEMO_SETTLED, num_blocks=400, dtype="float32")
    assert not any(resolution.demoted for resolution in facts.resolutions)
    return engine
