"""Graphs for buckets of decodes and for steps with prompts: padded steps give the tokens of eager ones, and what is
not recorded runs eagerly.

The device here is the processor with recordings that hold one size, as accelerators' do; real ones are in
tests/gpu/test_cuda_platform.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from trimaran.device_workers import boot
from trimaran.device_workers.execution.tensor_engine import TensorEngine
from trimaran.device_workers.platforms.contract import NotSupported

from ..step_driver import SETTLED, Row, StepDriver, make_configuration
from ..tiny_models import save, variants
from .test_accelerator_engines import tokens_of

BUCKETS = (1, 2, 4, 8)


Size = tuple[int, int]


class Recording:
    """Runs what was recorded again, on the tensors of then. Counts."""

    num_launches = None

    def __init__(self, run: Callable[[], None], replays: list[Size]) -> None:
        self._run, self._replays = run, replays

    def replay(self, num_tokens: int, num_sequences: int, progress: object) -> None:
        self._replays.append((num_tokens, num_sequences))
        self._run()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save(variants()["qwen3"], folder)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def make_engine(
    model: Path,
    cache: Path,
    replays: list[Size],
    *,
    refuse_at: int | None = None,
    buckets: tuple[int, ...] = BUCKETS,
    gain: Callable[[Size], float] = lambda size: 1.2 if size[0] <= 8 else 1.0,
) -> TensorEngine:
    """`refuse_at`: the recording that the device refuses, counted from 0; `gain`: what measuring a size says."""
    configuration = make_configuration(model, cache, dtype="float32", platform="cpu")
    described = boot.describe(configuration, lambda text: None)
    engine = boot.open_engine(configuration, described, lambda text: None, lambda name: None)
    assert isinstance(engine, TensorEngine)
    backend: Any = engine._parts.backend
    numbers = itertools.count()

    def capture(run: Callable[[], None]) -> Recording:
        if next(numbers) == refuse_at:
            raise NotSupported("the recording failed: on purpose")
        return Recording(run, replays)

    backend.graphs_take_any_size, backend.capture_graph = False, capture
    engine.load(replace(SETTLED, graph_buckets=buckets), lambda name, fraction: None)
    engine._graphs._gain = lambda size, graph: gain(size)  # type: ignore[method-assign]
    engine.allocate(100)
    engine.warm_up()
    replays.clear()
    return engine


def eager(model: Path, cache: Path) -> TensorEngine:
    configuration = make_configuration(model, cache, dtype="float32", platform="cpu", enforce_eager=True)
    described = boot.describe(configuration, lambda text: None)
    engine = boot.open_engine(configuration, described, lambda text: None, lambda name: None)
    assert isinstance(engine, TensorEngine)
    engine.load(SETTLED, lambda name, fraction: None)
    engine.allocate(100)
    engine.warm_up()
    return engine


def decision(engine: TensorEngine) -> tuple[str, str]:
    found = next(found for found in engine.decisions if found.name == "graphs")
    return found.value, found.reason


def test_tokens_are_those_of_eager_steps(model: Path, cache: Path) -> None:
    replays: list[Size] = []
    engine = make_engine(model, cache, replays)
    assert decision(engine)[0] == "4 of decodes of up to 8 sequences, 1 with prompts of up to 32 tokens"
    assert tokens_of(engine) == tokens_of(eager(model, cache))
    assert {(1, 1), (4, 4)} <= set(replays), "three sequences are padded to four, and a lone one has its own"


def all_tokens(engine: TensorEngine, num_rows: int, *, prompt: int, chunk: int) -> list[list[int]]:
    rows = [Row(row=index, tokens=[3 + index + place % 7 for place in range(prompt)]) for index in range(num_rows)]
    StepDriver(engine, num_blocks=100).generate(rows, 5, chunk=chunk)
    return [row.tokens for row in rows]


def test_steps_beyond_what_is_recorded_run_eagerly(model: Path, cache: Path) -> None:
    """Eleven sequences are more than the largest bucket, and than a step of 32 tokens has room for after sixteen."""
    replays: list[Size] = []
    engine = make_engine(model, cache, replays)
    tokens = [all_tokens(found, 17, prompt=3, chunk=2) for found in (engine, eager(model, cache))]
    assert tokens[0] == tokens[1]
    assert not replays


def test_prompts_beside_decodes_are_padded_to_a_recording(model: Path, cache: Path) -> None:
    replays: list[Size] = []
    engine = make_engine(model, cache, replays, gain=lambda size: 1.2 if size[0] <= 64 else 1.0)
    assert decision(engine)[0].endswith("3 with prompts of up to 128 tokens"), "the first without gain is kept"
    for num_rows, chunk in ((5, 4), (3, 9), (11, 1), (1, 40)):
        tokens = [all_tokens(found, num_rows, prompt=40, chunk=chunk) for found in (engine, eager(model, cache))]
        assert tokens[0] == tokens[1], (num_rows, chunk)
    mixed = {size for size in replays if size[0] != size[1]}
    assert mixed == {(32, 16), (64, 32)}


def test_nothing_is_recorded_where_it_gains_nothing(model: Path, cache: Path) -> None:
    engine = make_engine(model, cache, [], gain=lambda size: 1.04)
    assert decision(engine) == ("eager", "replaying a decode gains 4% over launching it, less than 10%")


def test_padding_writes_nothing(model: Path, cache: Path) -> None:
    """Block 0, which padded sequences name, keeps its content, whoever owns it."""
    replays: list[Size] = []
    engine = make_engine(model, cache, replays)
    driver = StepDriver(engine, num_blocks=100)
    rows = [Row(row=index, tokens=[7 + index, 8]) for index in range(3)]
    driver.generate(rows, 1)
    before = [tensor[0].clone() for layer in engine._cache.layers for tensor in layer]
    owner = next((row for row in rows if 0 in getattr(row, "blocks", ())), None)
    driver.generate(rows, 3)
    after = [tensor[0] for layer in engine._cache.layers for tensor in layer]
    assert (4, 4) in replays
    if owner is None:
        assert all(bool((a == b).all()) for a, b in zip(before, after, strict=True))


def test_a_refused_recording_leaves_it_all_eager(model: Path, cache: Path) -> None:
    replays: list[Size] = []
    engine = make_engine(model, cache, replays, refuse_at=2)
    assert decision(engine) == ("eager", "the recording failed: on purpose")
    assert tokens_of(engine) == tokens_of(eager(model, cache))
    assert not replays


def test_no_buckets_no_graphs(model: Path, cache: Path) -> None:
    engine = make_engine(model, cache, [], buckets=())
    assert decision(engine) == ("eager", "no sizes were negotiated to be captured")


def test_a_replaced_kernel_ends_the_recordings(model: Path, cache: Path) -> None:
    replays: list[Size] = []
    engine = make_engine(model, cache, replays)
    engine._kernel_changed("rms_norm")
    assert tokens_of(engine) == tokens_of(eager(model, cache))
    assert not replays
