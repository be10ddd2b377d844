"""Vectors of decoders (the last token's hidden state, as Qwen3-Embedding makes them) equal those of transformers."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from trimaran.device_workers.boot import describe, open_engine
from trimaran.device_workers.execution.contract import StepEngine
from trimaran.ipc.conditions import Refusal
from trimaran.ipc.sampling import Sampling

from ..embedding_models import reference_vector, save_headless, save_pooling
from ..engine_driver import EngineDriver
from ..step_driver import make_configuration, no_warning, start_engine
from ..tiny_models import SIZES

ONE = Sampling(max_tokens=1)
ALIKE = 1e-5


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[tuple[StepEngine, torch.nn.Module]]:
    folder = tmp_path_factory.mktemp("qwen3-embedding")
    reference = save_headless(Qwen3Config(**SIZES, head_dim=32), folder)
    save_pooling(folder, "last", normalizes=True)
    engine, facts = start_engine(folder, cache, dtype="float32")
    assert not any(resolution.demoted for resolution in facts.resolutions)
    assert engine.model.pooling is not None and engine.model.pooling.num_dimensions == 64
    assert not engine.model.generates
    yield engine, reference


def texts_of(lengths: list[int]) -> list[list[int]]:
    chance = random.Random(6)
    shared = [chance.randrange(3, 300) for _ in range(40)]
    return [
        [*shared[: length // 2], *(chance.randrange(3, 300) for _ in range(length - length // 2))] for length in lengths
    ]


@pytest.mark.user_pain("E3", "E4")
@pytest.mark.parametrize("budget", [512, 48])
def test_e3_last_token_vectors_equal_the_reference(qwen: tuple[StepEngine, torch.nn.Module], budget: int) -> None:
    """Alone, side by side, in chunks and on a cached prefix."""
    engine, reference = qwen
    driver = EngineDriver(engine, max_batched_tokens=budget)
    texts = texts_of([1, 5, 80, 33, 80, 200, 16, 17, 64])
    answers = [driver.submit(text, ONE, pools=True) for text in texts]
    driver.run()
    again = driver.submit(texts[5], ONE, pools=True)
    driver.run()
    assert again.cached_tokens > 100, "vectors share prefixes with earlier ones"
    for text, answer in zip([*texts, texts[5]], [*answers, again], strict=True):
        wanted = reference_vector(reference, text, "last")
        assert answer.vector is not None and not answer.tokens
        assert np.abs(answer.vector - wanted).max() < ALIKE * np.abs(wanted).max()


def test_few_blocks_and_preemptions_change_no_vector(qwen: tuple[StepEngine, torch.nn.Module]) -> None:
    engine, reference = qwen
    driver = EngineDriver(engine, num_blocks=20, max_batched_tokens=64, first_horizon=1)
    texts = texts_of([150, 120, 90, 200, 30, 30, 30, 110])
    answers = [driver.submit(text, ONE, pools=True) for text in texts]
    driver.run()
    for text, answer in zip(texts, answers, strict=True):
        wanted = reference_vector(reference, text, "last")
        assert answer.vector is not None
        assert np.abs(answer.vector - wanted).max() < ALIKE * np.abs(wanted).max()


def test_a_text_as_long_as_the_context_is_taken(qwen: tuple[StepEngine, torch.nn.Module]) -> None:
    engine, reference = qwen
    text = texts_of([256])[0]
    driver = EngineDriver(engine)
    answer = driver.submit(text, ONE, pools=True)
    driver.run()
    wanted = reference_vector(reference, text, "last")
    assert answer.vector is not None
    assert np.abs(answer.vector - wanted).max() < ALIKE * np.abs(wanted).max()


def test_a_decoder_that_pools_otherwise_is_refused(tmp_path: Path, cache: Path) -> None:
    save_headless(LlamaConfig(**SIZES), tmp_path)
    save_pooling(tmp_path, "mean")
    configuration = make_configuration(tmp_path, cache)
    with pytest.raises(Refusal, match="lasttoken"):
        open_engine(configuration, describe(configuration, no_warning), no_warning, lambda name: None)
