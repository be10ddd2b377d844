"""The tensor engine on accelerators' backends, simulated: the same tokens as on the processor, and a step that runs out
of memory. CPU tensors lie behind each surface; `test_any_device.py` shows that no tensor is on the wrong device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trimaran.device_workers.boot as boot
from trimaran.device_workers.execution.contract import StepEngine
from trimaran.ipc.conditions import Refusal
from trimaran.ipc.facts import Feature
from trimaran.ipc.plan import RowFlag

from ..step_driver import SETTLED, Row, StepDriver, make_configuration
from ..surfaces.machines import A10, VENDORS, Machine, cuda_properties, xpu_properties
from ..tiny_models import save, variants

PROMPTS = ([5, 6, 7, 8], list(range(20, 57)), [9])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save(variants()["qwen3"], folder)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def engine_of(configuration: Any, warn: Any) -> StepEngine:
    engine = boot.open_engine(configuration, boot.describe(configuration, warn), warn, lambda name: None)
    engine.load(SETTLED, lambda name, fraction: None)
    engine.allocate(100)
    engine.warm_up()
    return engine


def no_warning(text: str) -> None:
    raise AssertionError(text)


def on_machine(
    machine: Machine, patch: pytest.MonkeyPatch, model: Path, cache: Path, warn: Any = no_warning, **options: Any
) -> StepEngine:
    platform = machine.install(patch)
    patch.setattr(boot, "platforms", lambda host: (platform,))
    return engine_of(make_configuration(model, cache, **({"dtype": "float32"} | options)), warn)


def tokens_of(engine: StepEngine) -> list[list[int]]:
    """Greedy rows in chunks, then drawn rows with penalties, a bias and log-probabilities."""
    driver = StepDriver(engine, num_blocks=100)
    rows = [Row(row=index, tokens=list(prompt)) for index, prompt in enumerate(PROMPTS)]
    driver.generate(rows, 6, chunk=16)
    flags = RowFlag.PENALTIES | RowFlag.BIAS | RowFlag.LOGPROBS | RowFlag.MIN_TOKENS
    drawn = Row(
        row=7,
        tokens=[3, 4, 5],
        parameters={
            "row_flags": flags,
            "temperatures": 0.9,
            "top_ks": 50,
            "seeds": 11,
            "presence_penalties": 0.5,
            "repetition_penalties": 1.2,
            "num_logprobs": 3,
            "min_lengths": 100,
        },
        bias={17: 2.0},
        banned=(2, 23),
    )
    driver.generate([drawn], 6)
    masked = Row(row=8, tokens=[1, 2])
    driver.run([(masked, 2)], masks={8: [40, 41]})
    scored = Row(row=9, tokens=[1, 2, 3, 4], parameters={"num_prompt_logprobs": 2})
    result = driver.run([(scored, 4)], prompt_logprobs=True)
    return [*(row.tokens for row in (*rows, drawn, masked)), result.prompt_top_ids.tolist()]


@pytest.fixture(scope="module")
def expected(model: Path, cache: Path) -> list[list[int]]:
    return tokens_of(engine_of(make_configuration(model, cache, dtype="float32", platform="cpu"), no_warning))


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_same_tokens_on_every_surface(
    vendor: str, expected: list[list[int]], model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = on_machine(Machine(vendor, tmp_path), monkeypatch, model, cache)
    assert tokens_of(engine) == expected
    assert engine.profile.platform == vendor
    graphs = next(decision for decision in engine.decisions if decision.name == "graphs")
    assert graphs.value == "eager" and graphs.reason


def test_a_device_without_float64_draws_on_the_host(
    expected: list[list[int]], model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine("xpu", tmp_path)
    name = "Intel(R) Arc(TM) A770 Graphics"
    machine.devices[0].properties = xpu_properties(name, 16 << 30, has_fp64=False)
    engine = on_machine(machine, monkeypatch, model, cache)
    assert Feature.FP64 not in engine.profile.capability.features
    copies: list[torch.Tensor] = []
    to_host = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copies.append(tensor) or to_host(tensor))
    assert tokens_of(engine) == expected
    assert sum(copy.dim() == 2 for copy in copies) == 6, (
        "one for each of the drawn tokens, and none for the greedy ones"
    )


@pytest.mark.user_pain("M6")
@pytest.mark.parametrize("vendor", ["cuda", "ascend", "metal"])
def test_one_step_without_memory_fails_and_the_next_one_works(
    vendor: str, model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(vendor, tmp_path)
    engine = on_machine(machine, monkeypatch, model, cache)
    driver, row = StepDriver(engine, num_blocks=100), Row(row=0, tokens=[1, 2, 3])
    driver.run([(row, 3)])
    memory = machine.devices[0].memory
    memory.fail_next = True
    trims = memory.num_trims
    again = Row(row=1, tokens=[4, 5])
    with pytest.raises(MemoryError, match="out of memory"):
        driver.run([(again, 2)])
    assert memory.num_trims > trims
    driver.run([(row, 1)])
    assert len(row.tokens) == 5


@pytest.mark.user_pain("D7")
def test_a_device_without_bfloat16_runs_in_float16_with_one_warning(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (model / "config.json").read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"')
    assert "bfloat16" in text
    folder = tmp_path / "half"
    folder.mkdir()
    (folder / "config.json").write_text(text)
    (folder / "model.safetensors").symlink_to(model / "model.safetensors")
    machine = Machine("cuda", tmp_path / "machine")
    machine.devices[0].properties = cuda_properties("Tesla T4", 7, 5, A10)
    warnings: list[str] = []
    engine = on_machine(machine, monkeypatch, folder, cache, warnings.append, dtype="auto")
    assert engine.model.dtype == "float16"
    assert [text for text in warnings if "float16" in text] == warnings and len(warnings) == 1
    assert "bfloat16 is not available on Tesla T4" in warnings[0]
    with pytest.raises(Refusal, match="--dtype bfloat16: Tesla T4"):
        boot.describe(make_configuration(folder, cache, dtype="bfloat16"), warnings.append)
    assert torch.get_default_dtype() is torch.float32
