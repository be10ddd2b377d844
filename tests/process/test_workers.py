"""Real worker processes on the null platform and on the CPU: handshake, steps, faults, rings of a new generation."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from trimaran.device_workers.platforms.null_model import NullScript, expected_tokens
from trimaran.ipc.control import Fault, PhaseReport, Refused
from trimaran.ipc.plan import ResultFlag
from trimaran.ipc.worker_messages import Heartbeat, Settled, StepError, StepErrorKind, WorkerHello

from ..step_driver import Row, StepDriver
from ..worker_host import WorkerHost

SETTLED = Settled(block_size=16, max_num_seqs=16, max_batched_tokens=256, max_model_len=256)
VOCABULARY = 32_000


def null(tmp_path: Path, script: str = "", num_ranks: int = 1, **options: Any) -> WorkerHost:
    return WorkerHost(tmp_path, num_ranks, model="null", platform="null", null_script=script, **options)


async def decode(host: WorkerHost, driver: StepDriver, rows: list[Row], num_steps: int) -> None:
    for _ in range(num_steps):
        work = [(row, len(row.tokens) - row.computed) for row in rows]
        host.send_plan(driver.plan(work))
        driver.commit(work, (await host.results_of_step())[0])


async def test_null_worker_says_what_its_script_says(tmp_path: Path) -> None:
    async with null(tmp_path) as host:
        ready = await host.start(SETTLED)
        assert [phase.name for phase in ready[0].phases] == [
            "process",
            "detect",
            "device",
            "weights",
            "kv cache",
            "warm-up",
        ]
        rows = [Row(row=0, tokens=[7, 8, 9]), Row(row=5, tokens=list(range(40)))]
        await decode(host, StepDriver(), rows, 6)
        assert rows[0].tokens[3:] == expected_tokens([7, 8, 9], 6, VOCABULARY)
        assert rows[1].tokens[40:] == expected_tokens(list(range(40)), 6, VOCABULARY)
        host.stop()
        assert await host.ended() == [0]
    assert any(isinstance(message, PhaseReport) for message in host.controls)


async def test_null_process_imports_no_torch(tmp_path: Path) -> None:
    async with null(tmp_path) as host:
        await host.start(SETTLED)
        maps = Path(f"/proc/{host.processes[0].pid}/maps").read_text()
        assert "numpy" in maps
        assert "torch" not in maps


async def test_plans_and_results_too_large_for_a_slot(tmp_path: Path) -> None:
    async with null(tmp_path, slot_bytes=2048) as host:
        await host.start(SETTLED)
        driver, prompt = StepDriver(), list(range(1000, 1250))
        row = Row(row=0, tokens=list(prompt), parameters={"num_prompt_logprobs": 4})
        host.send_plan(driver.plan([(row, 250)], prompt_logprobs=True))
        result = (await host.results_of_step())[0]
        assert result.token_ids.tolist() == expected_tokens(prompt, 1, VOCABULARY)
        assert len(result.prompt_top_ids) == 4 * 249


async def test_masks_may_come_after_the_next_plan(tmp_path: Path) -> None:
    async with null(tmp_path) as host:
        await host.start(SETTLED)
        driver = StepDriver()
        masked, other = Row(row=0, tokens=[1, 2, 3]), Row(row=1, tokens=[4, 5])
        host.send_plan(driver.plan([(masked, 3)], masks={0: [77]}))
        step = driver.step
        host.send_plan(driver.plan([(other, 2)]))
        driver.step = step
        host.send_plan(driver.masks({0: [77]}, VOCABULARY))
        assert (await host.results_of_step())[0].token_ids.tolist() == [77]
        assert (await host.results_of_step())[0].token_ids.tolist() == expected_tokens([4, 5], 1, VOCABULARY)


async def test_masks_on_their_way_to_a_step_that_failed_are_dropped(tmp_path: Path) -> None:
    """Where no step waits for any, and where another does."""
    async with null(tmp_path, "error_at=1,2") as host:
        await host.start(SETTLED)
        driver = StepDriver()
        for _ in range(2):
            host.send_plan(driver.plan([(Row(row=driver.step, tokens=[1, 2, 3]), 3)], masks={driver.step: [77]}))
            assert isinstance((await host.outcomes_of_step())[0], StepError)
        late = [driver.masks({row: [77]}, VOCABULARY) for row in range(2)]
        late[0].step[0] = 1
        host.send_plan(late[0])
        host.send_plan(driver.plan([(Row(row=5, tokens=[4, 5]), 2)], masks={5: [33]}))
        host.send_plan(late[1])
        last = driver.masks({5: [33]}, VOCABULARY)
        host.send_plan(last)
        assert (await host.results_of_step())[0].token_ids.tolist() == [33]


@pytest.mark.user_pain("M6")
async def test_a_step_without_memory_fails_and_the_next_is_served(tmp_path: Path) -> None:
    async with null(tmp_path, "fail_at=2") as host:
        await host.start(SETTLED)
        driver = StepDriver()
        lost, served = Row(row=0, tokens=[1, 2, 3]), Row(row=1, tokens=[4, 5])
        await decode(host, driver, [lost], 1)
        host.send_plan(driver.plan([(lost, 1)]))
        error = (await host.outcomes_of_step())[0]
        assert isinstance(error, StepError)
        assert (error.step, error.kind) == (2, StepErrorKind.OUT_OF_MEMORY)
        await decode(host, driver, [served], 2)
        assert served.tokens[2:] == expected_tokens([4, 5], 2, VOCABULARY)


async def test_scripted_faults(tmp_path: Path) -> None:
    async with null(tmp_path, "nan_at=1 wrong_at=2 die_at=3", num_ranks=2) as host:
        await host.start(SETTLED)
        driver, row = StepDriver(), Row(row=0, tokens=[1, 2, 3])
        hashes = []
        for _ in range(2):
            work = [(row, len(row.tokens) - row.computed)]
            host.send_plan(driver.plan(work))
            results = await host.results_of_step()
            driver.commit(work, results[0])
            hashes.append([int(result.tokens_hash[0]) for result in results])
            if driver.step == 1:
                assert results[0].flags.tolist() == [ResultFlag.INVALID]
        assert hashes[0][0] == hashes[0][1]
        assert hashes[1][0] != hashes[1][1]
        host.send_plan(driver.plan([(row, 1)]))
        assert await host.ended() == [-signal.SIGKILL] * 2


async def test_a_hung_step_shows_in_the_heartbeats_and_a_long_one_does_not(tmp_path: Path) -> None:
    async with null(tmp_path, "step_ms=1500 hang_at=2") as host:
        await host.start(SETTLED)
        driver, row = StepDriver(), Row(row=0, tokens=[1, 2, 3])
        await decode(host, driver, [row], 1)
        beats = [message for _, message, _ in host.messages if isinstance(message, Heartbeat)]
        assert any(beat.step == 1 and beat.step_age_s > 0.4 for beat in beats)
        assert max(beat.progress_age_s for beat in beats) < 0.6
        host.send_plan(driver.plan([(row, 1)]))
        await asyncio.sleep(2.2)
        last = [message for _, message, _ in host.messages if isinstance(message, Heartbeat)][-1]
        assert last.step == 2
        assert last.progress_age_s > 1.0


async def test_a_worker_outlives_its_core(tmp_path: Path) -> None:
    """New rings: it says what it holds, drops its rows and serves the new core without loading again."""
    async with null(tmp_path) as host:
        await host.start(SETTLED, num_blocks=50)
        await decode(host, StepDriver(num_blocks=50), [Row(row=0, tokens=[1, 2, 3])], 2)
        seen = len(host.messages)
        host.attach_new_rings()
        hello = (await host.expect(WorkerHello, begin=seen))[0][1]
        assert (hello.generation, hello.settled, hello.num_blocks) == (2, SETTLED, 50)
        await host.go_on(begin=seen)
        row = Row(row=0, tokens=[9, 9])
        await decode(host, StepDriver(num_blocks=50), [row], 2)
        assert row.tokens[2:] == expected_tokens([9, 9], 2, VOCABULARY)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"null_script": "sing=1"}, "sing=1"),
        ({"platform": "abacus"}, "cpu, null"),
        ({"kernel_pins": {"paged_attention": "none"}}, "plain_paged_attention"),
        ({"platform": "cpu", "model": "/nowhere"}, "config.json"),
    ],
)
async def test_refusals_name_the_cure(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    async with WorkerHost(tmp_path, 1, **{"model": "null", "platform": "null"} | options) as host:
        refused = await host.expect_control(Refused)
        assert says in refused.text
        assert await host.ended() == [3]


async def test_a_worker_dies_with_its_supervisor(tmp_path: Path) -> None:
    async with null(tmp_path) as host:
        await host.expect(WorkerHello)
        host._links[0].close()
        assert await host.ended() != [0]


def test_script_and_pure_function_agree_on_ends() -> None:
    script = NullScript(mode="cycle", cycle=(5, 6), end_after=3, end_id=2)
    assert expected_tokens([1], 5, 100, script=script) == [5, 6, 5, 2, 2]
    assert expected_tokens([7, 8], 3, 100, script=NullScript(mode="echo")) == [7, 8, 7]


@pytest.mark.long
async def test_cpu_workers_in_parallel(tmp_path: Path) -> None:
    """Two ranks and the single one say the same, and the ranks agree on every hash."""
    from ..tiny_models import save, variants

    model = tmp_path / "model"
    save(variants()["qwen2"], model)
    said = {}
    for num_ranks in (1, 2):
        run_directory = tmp_path / str(num_ranks)
        run_directory.mkdir()
        async with WorkerHost(run_directory, num_ranks, model=str(model), platform="cpu", dtype="float32") as host:
            await host.start(SETTLED)
            driver, rows = StepDriver(), [Row(row=0, tokens=[7, 8, 9]), Row(row=1, tokens=list(range(40)))]
            for _ in range(8):
                work = [(row, len(row.tokens) - row.computed) for row in rows]
                host.send_plan(driver.plan(work))
                results = await host.results_of_step()
                assert len({int(result.tokens_hash[0]) for result in results}) == 1
                driver.commit(work, results[0])
            said[num_ranks] = [row.tokens for row in rows]
            host.stop()
            assert await host.ended() == [0] * num_ranks
    assert said[1] == said[2]


async def test_sizes_that_do_not_divide_are_refused_with_those_that_do(tmp_path: Path) -> None:
    from ..tiny_models import save, variants

    save(variants()["llama"], tmp_path / "model")
    began = time.monotonic()
    async with WorkerHost(tmp_path, 3, model=str(tmp_path / "model"), platform="cpu", dtype="float32") as host:
        assert "sizes that do: 1, 2, 4" in (await host.expect_control(Refused)).text
        assert time.monotonic() - began < 10


async def test_a_killed_rank_of_two_does_not_leave_the_other_waiting_for_ever(tmp_path: Path) -> None:
    from ..tiny_models import save, variants

    model = tmp_path / "model"
    save(variants()["llama"], model)
    options = {"model": str(model), "platform": "cpu", "dtype": "float32", "collective_timeout_s": 3.0}
    async with WorkerHost(tmp_path, 2, **options) as host:
        await host.start(SETTLED)
        os.kill(host.processes[1].pid, signal.SIGKILL)
        host.send_plan(StepDriver().plan([(Row(row=0, tokens=[1, 2, 3]), 3)]))
        assert await host.expect_control(Fault, timeout_s=15)
