"""The start: weights arrive whole, and after it nothing is compiled. `pytest -m gpu tests/gpu/test_start.py`"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trimaran.device_workers.execution.tensor_engine import TensorEngine
from trimaran.device_workers.models.parameters import Parameter
from trimaran.device_workers.platforms.cuda import CudaPlatform
from trimaran.device_workers.weights.safetensors_source import SafetensorsSource
from trimaran.device_workers.weights.upload import Upload

from ..mixed_work import work
from ..step_driver import SETTLED, start_engine
from ..tiny_models import save, variants

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here"),
]


@pytest.mark.parametrize("is_eager", [False, True], ids=["recorded", "eager"])
@pytest.mark.parametrize("variant", ["qwen3", "llama"])
def test_a_mixed_workload_compiles_nothing(
    variant: str, is_eager: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(variants()[variant], tmp_path / "model")
    settled = type(SETTLED)(
        block_size=16, max_num_seqs=40, max_batched_tokens=512, max_model_len=256, graph_buckets=(1, 2, 4, 8, 16, 32)
    )
    engine, _ = start_engine(
        tmp_path / "model", tmp_path, settled=settled, dtype="bfloat16", platform="cuda", enforce_eager=is_eager
    )
    assert isinstance(engine, TensorEngine)
    assert any(resolution.chosen.startswith("triton_") for resolution in engine._kernels.resolutions)
    with caplog.at_level(logging.WARNING, "trimaran.worker"):
        work(engine)
    late = [record.getMessage() for record in caplog.records if "compiled" in record.getMessage()]
    assert engine.progress.compiled_after_ready == 0, "\n".join(late)


COUNTS = """
import sys
from pathlib import Path
from trimaran.tests.step_driver import Row, StepDriver, start_engine
from trimaran.tests.tiny_models import save, variants
folder = Path(sys.argv[1])
save(variants()["qwen3"], folder / "model")
from trimaran.device_workers.execution import tensor_engine
tensor_engine.rehearse = lambda *arguments, **options: None
engine, _ = start_engine(folder / "model", folder, dtype="bfloat16", platform="cuda", enforce_eager=True)
StepDriver(engine).generate([Row(row=0, tokens=[1, 2, 3], parameters={"num_logprobs": 2, "row_flags": 3})], 3)
print("counted", engine.progress.compiled_after_ready)
"""


def test_what_was_not_rehearsed_is_counted(tmp_path: Path) -> None:
    """In a process of its own, which has compiled nothing yet."""
    command = [sys.executable, "-c", COUNTS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert int(done.stdout.split("counted")[1]) > 0


def test_uploaded_weights_are_the_files(tmp_path: Path) -> None:
    """Tensors of several pieces, with every buffer used again."""
    backend = CudaPlatform().open(0, num_threads=4, cache_dir=None, warn=lambda text: None)
    weights = {f"w{index}": torch.randn(1000, 500 + index) for index in range(20)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = SafetensorsSource(tmp_path, upload=Upload(backend, 1 << 16))
    read = {name: source.read(Parameter(name=name, shape=tuple(tensor.shape))) for name, tensor in weights.items()}
    backend.synchronize()
    assert all(read[name].is_cuda and torch.equal(read[name].cpu(), tensor) for name, tensor in weights.items())
