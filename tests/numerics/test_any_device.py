"""The tensor engine on a strict device: the same tokens, and no tensor on the host where the device's was meant.

The device is registered for a whole process, so the engine runs in one of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ..step_driver import make_configuration
from ..tiny_models import save, variants
from .test_accelerator_engines import engine_of, no_warning, tokens_of

RUN = """
import json, sys
from pathlib import Path
from trimaran.tests.surfaces import shadow_device
import trimaran.device_workers.boot as boot
from trimaran.tests.numerics.test_accelerator_engines import engine_of, no_warning, tokens_of
from trimaran.tests.step_driver import make_configuration

model, cache = sys.argv[1:]
boot.platforms = lambda host: (shadow_device.ShadowPlatform(host),)
engine = engine_of(make_configuration(Path(model), Path(cache), dtype="float32"), no_warning)
print(json.dumps([engine.profile.platform, sum(shadow_device.num_operations.values()), tokens_of(engine)]))
"""


def run(model: Path, cache: Path) -> tuple[str, int, list[list[int]]]:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(model), str(cache)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    name, num_operations, tokens = json.loads(done.stdout.splitlines()[-1])
    return name, num_operations, tokens


@pytest.mark.parametrize(
    "variant", ["qwen3", *(pytest.param(name, marks=pytest.mark.long) for name in ("mistral_window", "llama_biases"))]
)
def test_the_same_tokens_and_nothing_on_the_host(variant: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save(variants()[variant], model)
    name, num_operations, tokens = run(model, tmp_path)
    assert name == "shadow" and num_operations > 100, "the engine did run there"
    cpu = make_configuration(model, tmp_path, dtype="float32", platform="cpu")
    assert tokens == tokens_of(engine_of(cpu, no_warning))


def test_the_device_is_strict(tmp_path: Path) -> None:
    code = """
import torch
from trimaran.tests.surfaces import shadow_device
x = torch.zeros(3, device="shadow")
try:
    x[torch.tensor([0, 1])]
except RuntimeError as error:
    assert "different devices" in str(error)
    try:
        x + torch.ones(3)
    except RuntimeError:
        print("strict")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "strict", done.stderr[-2000:]
