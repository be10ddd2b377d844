"""What a row may ask of sampling, through the whole engine, against the reference's logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trimaran.device_workers.execution.contract import StepEngine
from trimaran.ipc.plan import RowFlag

from ..step_driver import Row, StepDriver, start_engine
from ..tiny_models import save, variants

PROMPT = [5, 6, 7, 8, 5, 6]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    directory = tmp_path_factory.mktemp("model")
    return save(variants()["llama"], directory), directory


@pytest.fixture(params=[True, False], ids=["C++", "plain"])
def engine(
    request: pytest.FixtureRequest, reference: tuple[torch.nn.Module, Path], tmp_path_factory: pytest.TempPathFactory
) -> StepEngine:
    cache = tmp_path_factory.getbasetemp() / "sampling-cache"
    without = () if request.param else ("cpp_sample", "cpp_greedy_sample")
    return start_engine(reference[1], cache, dtype="float32", without_kernels=without)[0]


def logits_after(reference: tuple[torch.nn.Module, Path], tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = reference[0](torch.tensor([tokens])).logits[0, -1]
    return found


def asking(flags: RowFlag, **parameters: Any) -> dict[str, Any]:
    return {"row_flags": np.uint32(flags), **parameters}


def run(engine: StepEngine, rows: list[Row], num_tokens: int) -> None:
    StepDriver(engine).generate(rows, num_tokens)


def test_penalties_count_what_was_said(engine: StepEngine, reference: tuple[torch.nn.Module, Path]) -> None:
    values = {"presence_penalties": 0.7, "frequency_penalties": 0.4, "repetition_penalties": 1.3}
    row = Row(row=1, tokens=list(PROMPT), parameters=asking(RowFlag.GREEDY | RowFlag.PENALTIES, **values))
    run(engine, [Row(row=0, tokens=[9, 9, 9]), row], 12)
    for place in range(len(PROMPT), len(row.tokens)):
        logits, output = logits_after(reference, row.tokens[:place]), row.tokens[len(PROMPT) : place]
        seen = torch.tensor(sorted(set(row.tokens[:place])))
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.3, logits[seen] * 1.3)
        counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=300)
        logits -= 0.4 * counts + 0.7 * (counts > 0)
        assert float(logits.max() - logits[row.tokens[place]]) < 1e-4


def test_penalties_survive_a_preemption(engine: StepEngine) -> None:
    """A row resumed with its history goes on as if nothing had been."""
    asks = asking(RowFlag.GREEDY | RowFlag.PENALTIES, repetition_penalties=1.5, frequency_penalties=0.5)
    whole = Row(row=0, tokens=list(PROMPT), parameters=dict(asks))
    run(engine, [whole], 10)
    engine.drop_rows()
    resumed = Row(row=3, tokens=whole.tokens[: len(PROMPT) + 4], parameters=asks | {"prompt_lengths": len(PROMPT)})
    run(engine, [resumed], 6)
    assert resumed.tokens == whole.tokens


def test_a_penalised_row_that_is_freed_leaves_nothing_behind(engine: StepEngine) -> None:
    asks = asking(RowFlag.GREEDY | RowFlag.PENALTIES, repetition_penalties=1.5)
    driver, said = StepDriver(engine), []
    for row in (0, 1, 0, 0):
        sequence = Row(row=row, tokens=list(PROMPT), parameters=dict(asks))
        work = [(sequence, len(PROMPT))]
        plan = driver.plan(work, freed=[0, 1])
        engine.forward(plan)
        driver.commit(work, engine.sample(None).result())
        said.append(sequence.tokens[-1])
    assert len(set(said)) == 1


def test_bias_and_bans(engine: StepEngine, reference: tuple[torch.nn.Module, Path]) -> None:
    best = int(logits_after(reference, PROMPT).argmax())
    rows = [
        Row(row=0, tokens=list(PROMPT), parameters=asking(RowFlag.GREEDY | RowFlag.BIAS), bias={42: 1e3}),
        Row(row=1, tokens=list(PROMPT), parameters=asking(RowFlag.GREEDY | RowFlag.BIAS), bias={best: -1e3}),
        Row(row=2, tokens=list(PROMPT), parameters=asking(RowFlag.GREEDY)),
    ]
    ban = asking(RowFlag.GREEDY | RowFlag.MIN_TOKENS, min_lengths=len(PROMPT) + 1)
    rows.append(Row(row=3, tokens=list(PROMPT), parameters=ban, banned=[best]))
    late = asking(RowFlag.GREEDY | RowFlag.MIN_TOKENS, min_lengths=len(PROMPT))
    rows.append(Row(row=4, tokens=list(PROMPT), parameters=late, banned=[best]))
    run(engine, rows, 1)
    said = [row.tokens[-1] for row in rows]
    assert said[0] == 42
    assert said[1] != best
    assert said[2] == best
    assert said[3] == said[1]
    assert said[4] == best


def test_masks(engine: StepEngine) -> None:
    driver = StepDriver(engine)
    masked, free = Row(row=1, tokens=list(PROMPT)), Row(row=0, tokens=list(PROMPT))
    driver.run([(free, 6), (masked, 6)], masks={1: [33]})
    driver.run([(free, 1), (masked, 1)], masks={1: [250, 251]})
    assert masked.tokens[6] == 33
    assert masked.tokens[7] in (250, 251)
    alone = Row(row=2, tokens=list(PROMPT))
    run(engine, [alone], 2)
    assert free.tokens == alone.tokens


@pytest.mark.user_pain("Q4")
def test_seeds_do_not_depend_on_neighbours(engine: StepEngine) -> None:
    def make(row: int, seed: int, choice: int = 0) -> Row:
        asks = asking(RowFlag(0), temperatures=1.0, top_ps=0.9, seeds=np.uint64(seed), choices=choice)
        return Row(row=row, tokens=list(PROMPT), parameters=asks)

    alone = make(0, 7)
    run(engine, [alone], 10)
    rows = [make(0, 1), make(1, 7), make(2, 7, 1), Row(row=3, tokens=[9, 9]), make(4, 2**64 - 1)]
    run(engine, rows, 10)
    assert rows[1].tokens == alone.tokens
    assert rows[2].tokens != alone.tokens
    assert len({tuple(row.tokens) for row in rows}) == 5


@pytest.mark.user_pain("S8")
def test_logprobs_are_finite_beside_minus_infinity(engine: StepEngine) -> None:
    asks = asking(RowFlag.LOGPROBS, temperatures=0.01, top_ps=0.05, num_logprobs=20)
    driver, row = StepDriver(engine), Row(row=0, tokens=list(PROMPT), parameters=asks)
    result = driver.run([(row, 6)], masks={0: [33]})
    assert result.token_ids.tolist() == [33]
    assert np.isfinite(result.logprobs).all()
    assert np.isfinite(result.top_logprobs).all()
    assert len(result.top_ids) == 20
    assert result.ranks[0] > 1
