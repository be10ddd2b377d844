"""The fused path of decodes, computed by the plain references, gives the logits of the ordinary path."""

from pathlib import Path
from typing import Any

import pytest
import torch

from trimaran.device_workers.execution.tensor_engine import TensorEngine
from trimaran.device_workers.models.decoder import Decoder
from trimaran.device_workers.models.fused_decode import FusedDecode, FusedKernels
from trimaran.ipc.facts import Problem
from trimaran.kernels.catalog import CATALOG
from trimaran.kernels.implementation import Services
from trimaran.kernels.registry import Registry

from ..step_driver import Row, StepDriver, start_engine
from ..tiny_models import save, variants

VARIANTS = variants()
NUM_TOKENS = 12


def plain_kernels(profile: Any) -> FusedKernels:
    registry, problem = Registry(CATALOG), Problem(dtype="float32")
    chains = {name: registry.chain(name)[-1] for name in FusedKernels.__dataclass_fields__}
    return FusedKernels(**{name: last.load(profile, problem, Services()) for name, last in chains.items()})


def started(model: Path, cache: Path, *, fuses: bool, attends: bool = False) -> tuple[TensorEngine, list[torch.Tensor]]:
    """An engine, and the logits that it will have computed. `attends`: decodes take the one kernel of attention."""
    plain = ("cpp_linear",)
    engine, _ = start_engine(model, cache, dtype="float32", without_kernels=plain, enforce_eager=True)
    assert isinstance(engine, TensorEngine)
    assert not engine._decoder.fuses_decodes, "plain references do not pay"
    old = engine._decoder
    if fuses:
        parts = (old.config, old.shard, old._weights, old._kernels, old._activations, 256, None, torch.device("cpu"))
        engine._decoder = Decoder(*parts, plain_kernels(engine.profile))
        assert engine._decoder.fuses_decodes
    if attends:
        engine._decoder.decode_attention = plain_kernels(engine.profile).decode_attention
    made: list[torch.Tensor] = []
    compute = engine._decoder.logits

    def logits(residual: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        made.append(compute(residual, delta).clone())
        return made[-1]

    engine._decoder.logits = logits  # type: ignore[method-assign]
    return engine, made


@pytest.mark.parametrize("name", ["qwen3", "qwen3_biases", "llama", "llama_biases", "mistral_window"])
def test_logits_are_those_of_the_ordinary_path(
    tmp_path: Path, cache: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(VARIANTS[name], tmp_path)
    num_fused = 0
    forward = FusedDecode.forward

    def counted(self: FusedDecode, *arguments: Any) -> torch.Tensor:
        nonlocal num_fused
        num_fused += 1
        return forward(self, *arguments)

    monkeypatch.setattr(FusedDecode, "forward", counted)
    found = []
    for fuses in (False, True):
        engine, logits = started(tmp_path, cache, fuses=fuses)
        rows = [Row(row=index, tokens=list(range(5 + index, 35))) for index in range(2)]
        StepDriver(engine).generate(rows, NUM_TOKENS)
        found.append(([row.tokens for row in rows], logits))
    assert num_fused >= NUM_TOKENS - 1
    assert found[0][0] == found[1][0]
    for ordinary, fused in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(fused, ordinary, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["qwen3", "llama_biases", "mistral_window"])
def test_one_kernel_of_attention_gives_the_same_logits(tmp_path: Path, cache: Path, name: str) -> None:
    save(VARIANTS[name], tmp_path)
    found = []
    for attends in (False, True):
        engine, logits = started(tmp_path, cache, fuses=False, attends=attends)
        rows = [Row(row=7 - index, tokens=list(range(5 + index, 35))) for index in range(5)]
        StepDriver(engine).generate(rows, NUM_TOKENS)
        found.append(([row.tokens for row in rows], logits))
    assert found[0][0] == found[1][0]
    for ordinary, attended in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(attended, ordinary, rtol=0, atol=2e-4)


def test_packed_weights_leave_the_ordinary_path(tmp_path: Path, cache: Path) -> None:
    save(VARIANTS["llama"], tmp_path)
    engine, facts = start_engine(tmp_path, cache, dtype="float32")
    if {found.kernel: found.chosen for found in facts.resolutions}["linear"] != "cpp_linear":
        pytest.skip("no C++ compiler here packs weights")
    assert isinstance(engine, TensorEngine)
    assert not FusedDecode.can_read(engine._decoder._weights)
