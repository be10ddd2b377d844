"""The null model reads content through the block table, so a wrong block gives wrong tokens."""

import numpy as np
import pytest

from trimaran.device_workers.platforms.null_engine import parse_script
from trimaran.device_workers.platforms.null_model import NullModel, NullScript, expected_tokens
from trimaran.ipc.conditions import Refusal
from trimaran.ipc.plan import RowFlag

from ..step_driver import Row, StepDriver

VOCABULARY = 5000


def make(script: NullScript | None = None) -> NullModel:
    return NullModel(num_blocks=60, block_size=4, max_model_len=80, vocab_size=VOCABULARY, script=script)


def generate(model: NullModel, rows: list[Row], num_tokens: int, chunk: int = 80) -> None:
    driver = StepDriver(block_size=4, num_blocks=60)
    ends = {row.row: len(row.tokens) + num_tokens for row in rows}
    while work := [
        (row, min(chunk, len(row.tokens) - row.computed)) for row in rows if len(row.tokens) < ends[row.row]
    ]:
        driver.commit(work, model.run(driver.plan(work)))


@pytest.mark.parametrize("reads", ["all", "last"])
@pytest.mark.parametrize("chunk", [1, 3, 80])
def test_tokens_are_a_pure_function_of_the_prompt(reads: str, chunk: int) -> None:
    rows = [Row(row=3, tokens=list(range(10))), Row(row=70, tokens=[5, 4, 3]), Row(row=0, tokens=[1])]
    prompts = [list(row.tokens) for row in rows]
    generate(make(NullScript(reads=reads)), rows, 9, chunk)
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.tokens == prompt + expected_tokens(prompt, 9, VOCABULARY)


def test_seeds_and_choices_count_unless_greedy() -> None:
    asks = [
        {"row_flags": np.uint32(0), "seeds": np.uint64(seed), "choices": choice} for seed, choice in ((5, 0), (5, 1))
    ]
    rows = [Row(row=row, tokens=[1, 2], parameters=ask) for row, ask in enumerate(asks)]
    rows.append(Row(row=2, tokens=[1, 2], parameters={"row_flags": RowFlag.GREEDY, "seeds": np.uint64(5)}))
    generate(make(), rows, 4)
    assert rows[0].tokens[2:] == expected_tokens([1, 2], 4, VOCABULARY, seed=5)
    assert rows[1].tokens[2:] == expected_tokens([1, 2], 4, VOCABULARY, seed=5, choice=1)
    assert rows[2].tokens[2:] == expected_tokens([1, 2], 4, VOCABULARY)
    assert len({tuple(row.tokens) for row in rows}) == 3


@pytest.mark.parametrize("overwritten", [0, 1, 2])
def test_a_block_overwritten_by_another_sequence_shows(overwritten: int) -> None:
    model, driver = make(), StepDriver(block_size=4, num_blocks=60)
    victim, thief = Row(row=0, tokens=list(range(12))), Row(row=1, tokens=[9, 9, 9])
    blocks = driver.free[-3:][::-1]
    work = [(victim, 12)]
    driver.commit(work, model.run(driver.plan(work)))
    driver.free.append(blocks[overwritten])
    work = [(thief, 3)]
    driver.commit(work, model.run(driver.plan(work)))
    work = [(victim, 1)]
    driver.commit(work, model.run(driver.plan(work)))
    assert victim.tokens[12:13] == expected_tokens(list(range(12)), 1, VOCABULARY)
    assert victim.tokens[13] != expected_tokens(list(range(12)), 2, VOCABULARY)[1]


def test_masks_give_the_next_allowed_id() -> None:
    model, driver = make(NullScript(mode="cycle", cycle=(50,))), StepDriver(block_size=4, num_blocks=60)
    said = []
    for row, allowed in enumerate(([7, 60, 90], [3, 9], [50])):
        work = [(Row(row=row, tokens=[1, 2]), 2)]
        result = model.run(driver.plan(work, masks={row: allowed}), driver.masks({row: allowed}, VOCABULARY))
        said += result.token_ids.tolist()
    assert said == [60, 3, 50]


def test_ends_bans_and_echo() -> None:
    row = Row(row=0, tokens=[11, 12], parameters={"row_flags": RowFlag.MIN_TOKENS, "min_lengths": 5}, banned=[2])
    generate(make(NullScript(mode="echo", end_after=2)), [row], 5)
    assert row.tokens[2:] == [11, 12, 3, 2, 2]


def test_scripts() -> None:
    settings = parse_script(
        "step_ms=10 prefill_us_per_token=3 mode=cycle:1,2,3;end_after=4 hang_at=5,9 until_generation=1"
    )
    assert settings.pace.step_s == 0.01
    assert settings.script == NullScript(mode="cycle", cycle=(1, 2, 3), end_after=4)
    assert settings.faults.hang == {5, 9}
    assert settings.faults.act_in(1) and not settings.faults.act_in(2)
    assert parse_script("").script == NullScript()


@pytest.mark.parametrize("text", ["sing=1", "step_ms", "step_ms=slow", "mode=cycle", "mode=rhyme", "reads=none"])
def test_scripts_that_cannot_be(text: str) -> None:
    with pytest.raises(Refusal, match="null script"):
        parse_script(text)
