"""The fused path of decodes, computed by the plain references, gives the logits of the ordinary path."""

from pathlib import Path
from typing import Any

import pytest
import torch

from trimaran.device_workers.execution.tensor_engine import TensorEngine
from trimaran.device_workers.models import fused_decode
from trimaran.device_workers.models.decoder import Decoder, DecoderWeights, LayerWeights
from trimaran.device_workers.models.fused_decode import FusedDecode, FusedKernels, max_fused_tokens
from trimaran.ipc.facts import Problem
from trimaran.kernels.catalog import CATALOG
from trimaran.kernels.implementation import PlainWeight, Services
from trimaran.kernels.registry import Registry

from ..step_driver import Row, StepDriver, start_engine
from ..tiny_models import save, variants

VARIANTS = variants()
NUM_TOKENS = 12


def plain_kernels(profile: Any) -> FusedKernels:
    registry, problem = Registry(CATALOG), Problem(dtype="float32")
    chains = {name: registry.chain(name)[-1] for name in FusedKernels.__dataclass_fields__}
    return FusedKernels(**{name: last.load(profile, problem, Services()) for name, last in chains.items()})


def started(
    model: Path, cache: Path, *, fuses: bool, attends: bool = False, dtype: str = "float32"
) -> tuple[TensorEngine, list[torch.Tensor]]:
    """An engine, and the logits that it will have computed. `attends`: decodes take the one kernel of attention."""
    plain = ("cpp_linear", "cpp_embed")  # which packs weights; which does not widen
    engine, _ = start_engine(model, cache, dtype=dtype, without_kernels=plain, enforce_eager=True)
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


@pytest.mark.parametrize(
    ("name", "num_sequences"),
    [
        *((name, 2) for name in ("qwen3", "qwen3_biases", "llama", "llama_biases", "mistral_window")),
        *((name, num_sequences) for name in ("qwen3", "llama_biases") for num_sequences in (3, 20)),
    ],
)
def test_logits_are_those_of_the_ordinary_path(
    tmp_path: Path, cache: Path, name: str, num_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(VARIANTS[name], tmp_path)
    monkeypatch.setattr(fused_decode, "max_fused_tokens", lambda weights: num_sequences)
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
        rows = [Row(row=index, tokens=list(range(5 + index, 35))) for index in range(num_sequences)]
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


def test_between_products_of_more_than_a_few_tokens_all_is_of_the_models_dtype(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(VARIANTS["qwen3"], tmp_path)
    found, dtypes = [], set()
    forward = FusedDecode._attend

    def noted(self: FusedDecode, attended: torch.Tensor, qkv: torch.Tensor, *rest: Any) -> None:
        dtypes.add((len(qkv), attended.dtype, qkv.dtype))
        forward(self, attended, qkv, *rest)

    monkeypatch.setattr(FusedDecode, "_attend", noted)
    for fuses in (False, True):
        engine, logits = started(tmp_path, cache, fuses=fuses, dtype="bfloat16")
        StepDriver(engine).generate([Row(row=index, tokens=list(range(5 + index, 35))) for index in range(5)], 2)
        found.append(logits[1])
    assert dtypes == {(5, torch.bfloat16, torch.bfloat16)}
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0.03 * float(found[0].abs().max()))


@pytest.mark.parametrize(
    ("hidden_size", "dtype", "most"),
    [
        (1024, torch.bfloat16, 64),
        (4096, torch.bfloat16, 16),
        (1024, torch.float16, 2),
        (1024, torch.float32, 2),
    ],
)
def test_how_many_tokens_are_fused(hidden_size: int, dtype: torch.dtype, most: int) -> None:
    """By what a layer's weights are."""

    def weight(num_outputs: int, num_inputs: int) -> PlainWeight:
        return PlainWeight(torch.empty(num_outputs, num_inputs, dtype=dtype, device="meta"), None)

    norm = torch.empty(hidden_size, dtype=dtype, device="meta")
    layer = LayerWeights(
        input_norm=norm,
        qkv=weight(4 * hidden_size, hidden_size),
        q_norm=None,
        k_norm=None,
        output=weight(hidden_size, 2 * hidden_size),
        post_norm=norm,
        gate_up=weight(6 * hidden_size, hidden_size),
        down=weight(hidden_size, 3 * hidden_size),
    )
    head = weight(1000, hidden_size)
    weights = DecoderWeights(embedding=head.weight_NK, layers=(layer,), final_norm=norm, head=head, num_bytes=0)
    assert max_fused_tokens(weights) == most


def test_packed_weights_leave_the_ordinary_path(tmp_path: Path, cache: Path) -> None:
    save(VARIANTS["llama"], tmp_path)
    engine, facts = start_engine(tmp_path, cache, dtype="float32")
    if {found.kernel: found.chosen for found in facts.resolutions}["linear"] != "cpp_linear":
        pytest.skip("no C++ compiler here packs weights")
    assert isinstance(engine, TensorEngine)
    assert not FusedDecode.can_read(engine._decoder._weights)
