"""SmolLM2 in float32 on the GPU through the engine core, against transformers on the same GPU.

Every test of tests/numerics/test_whole_engine.py, with recordings, chunks, prefix cache, preemption and mixed batches;
the fixtures of this folder put engine and reference on the device.

python -m pytest -m gpu tests/gpu/test_whole_engine.py
"""

import pytest
import torch

from ..numerics.test_whole_engine import *  # noqa: F403
from ..numerics.test_whole_engine import judge, prompts  # noqa: F401  (fixtures)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.model,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]
