"""LLM and AsyncLLM over the real supervisor, core and worker; the null platform makes the tokens."""

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from trimaran import LLM, AsyncLLM, SamplingParams
from trimaran.frontend.client.refusals import RequestFailed, RequestRefused
from trimaran.frontend.launch.options import OptionError
from trimaran.ipc.conditions import Refusal

NULL: dict[str, Any] = {"platform": "null", "null_script": "step_ms=1", "max_model_len": 512}
SHORT = SamplingParams(max_tokens=4, temperature=0)
ENGINE = ("engine_core.process", "device_workers.process")


def engine_processes(of: int | None = None) -> list[psutil.Process]:
    """Living cores and workers under a process, this one if none is given."""
    found = []
    for child in psutil.Process(of).children(recursive=True):
        try:
            if any(role in " ".join(child.cmdline()) for role in ENGINE) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(scope="module")
def llm(demo_folder: Path) -> Iterator[LLM]:
    assert not engine_processes()
    with LLM(str(demo_folder), **NULL, max_logprobs=25, max_n=6) as llm:
        assert len(engine_processes()) == 2
        yield llm
    assert not engine_processes(), "nothing is left after the end"


def ask(llm: LLM, prompts: Any, params: Any = SHORT) -> list[Any]:
    return llm.generate(prompts, params, show_progress=False)


def test_generate_chat_n_and_stop(llm: LLM) -> None:
    [output] = ask(llm, "The sea is")
    (choice,) = output.outputs
    assert len(choice.token_ids) == 4 and choice.finish_reason == "length" and output.prompt == "The sea is"
    [stopped] = ask(llm, "The sea is", SamplingParams(max_tokens=50, temperature=0, stop=choice.text[3:]))
    assert stopped.outputs[0].text == choice.text[:3] and stopped.outputs[0].finish_reason == "stop"
    [three] = ask(llm, "x", SamplingParams(n=3, seed=-1, max_tokens=6))
    assert len({tuple(one.token_ids) for one in three.outputs}) == 3
    assert [one.token_ids for one in ask(llm, "x", SamplingParams(n=3, seed=-1, max_tokens=6))[0].outputs] == [
        one.token_ids for one in three.outputs
    ]
    [answer] = llm.chat([{"role": "user", "content": "Hello"}], SHORT, show_progress=False)
    assert len(answer.prompt_token_ids) > 20 and len(answer.outputs[0].token_ids) == 4


def test_a_batch_keeps_its_order(llm: LLM) -> None:
    prompts = [f"prompt number {index}" for index in range(50)]
    outputs = ask(llm, prompts)
    assert [output.prompt for output in outputs] == prompts
    assert outputs[17].outputs[0].token_ids == ask(llm, prompts[17])[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "prompts",
    [
        *("", [""], [[]], [[-1]], [[2**40]], [[1.5, 2]], [1.5], None, 5, b"abc", "\ud800"),
        ["fine", [1] * 600, "fine"],
        [[1] * 512],
    ],
    ids=repr,
)
def test_a_refused_prompt_names_the_fault_and_leaves_the_engine_well(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestRefused, match=r"prompt|context"):
        ask(llm, prompts)
    assert len(ask(llm, "x")[0].outputs[0].token_ids) == 4


def test_token_ids_of_any_integer_kind(llm: LLM) -> None:
    numpy = pytest.importorskip("numpy")
    by_list, by_tuple, by_array = (ask(llm, ids)[0] for ids in ([5, 6, 7], (5, 6, 7), numpy.array([5, 6, 7])))
    assert by_list.outputs == by_tuple.outputs == by_array.outputs
    assert by_array.prompt_token_ids == [5, 6, 7] and type(by_array.prompt_token_ids[0]) is int
    assert len(ask(llm, numpy.array([[5, 6], [7, 8]]))) == 2


def test_wrong_arguments_say_what_is_right(llm: LLM) -> None:
    with pytest.raises(RequestRefused, match="give SamplingParams, not dict"):
        ask(llm, "x", {"max_tokens": 3})
    with pytest.raises(RequestRefused, match="messages: give a list of"):
        llm.chat("hello", show_progress=False)  # type: ignore[arg-type]
    with pytest.raises(RequestRefused, match="surrogate"):
        llm.chat([{"role": "user", "content": "\udfff"}], show_progress=False)
    with pytest.raises(ValueError, match="1 sampling params were given for 2 prompts"):
        ask(llm, ["x", "y"], [SHORT])


def test_limits_are_those_of_the_options(llm: LLM) -> None:
    assert len(ask(llm, "x", SamplingParams(max_tokens=1, logprobs=25))[0].outputs[0].logprobs[0].top) == 25
    for params, name in ((SamplingParams(logprobs=26), "logprobs"), (SamplingParams(n=7), "n")):
        with pytest.raises(RequestRefused, match=f"{name}: . ?.* is above"):
            ask(llm, "x", params)


def test_inside_a_running_loop(llm: LLM) -> None:
    async def main() -> int:
        return len(ask(llm, ["a", "b"]))

    assert asyncio.run(main()) == 2


def test_a_closed_one_says_so_and_another_can_follow(demo_folder: Path) -> None:
    before = len(engine_processes())
    for length in (3, 5):
        llm = LLM(str(demo_folder), **NULL, default_max_tokens=length)
        assert len(ask(llm, "x", SamplingParams())[0].outputs[0].token_ids) == length
        llm.close()
        llm.close()
        assert len(engine_processes()) == before
        with pytest.raises(RequestFailed, match="was closed"):
            ask(llm, "x")


@pytest.mark.parametrize(("asked", "seconds"), [({}, "1"), ({"prompt_step": 0.125}, "0.125")])
def test_steps_are_long_where_nobody_reads_along(
    demo_folder: Path, capfd: pytest.CaptureFixture[str], asked: dict[str, Any], seconds: str
) -> None:
    with LLM(str(demo_folder), **NULL, **asked):
        pass
    assert f"prompt_step_s = {seconds}: as asked" in capfd.readouterr().err


def test_options_of_serving_are_refused_not_ignored(demo_folder: Path, tmp_path: Path) -> None:
    for keyword, value in (("port", 80), ("api_key", "x"), ("frontends", 2)):
        with pytest.raises(OptionError, match=f"keyword {keyword}: only for `trimaran serve`"):
            LLM(str(demo_folder), **NULL, **{keyword: value})
    (tmp_path / "options.yaml").write_text("max_model_len: nonsense")
    with pytest.raises(OptionError, match="option file"):
        LLM(str(demo_folder), config=str(tmp_path / "options.yaml"))
    with pytest.raises(Refusal, match="there is no such file or folder"):
        LLM("/no/model", **NULL)


def test_an_engine_that_cannot_be_kept_ends_every_call(demo_folder: Path) -> None:
    """No call hangs, and later ones say why."""
    before = {process.pid for process in engine_processes()}
    slow = {**NULL, "null_script": "step_ms=20"}
    with LLM(str(demo_folder), **slow, max_restarts=0) as llm:
        core = next(p for p in engine_processes() if p.pid not in before and ENGINE[0] in " ".join(p.cmdline()))
        llm._loop.call_soon_threadsafe(llm._loop.call_later, 0.3, core.kill)
        with pytest.raises(RequestFailed, match="killed by SIGKILL"):
            ask(llm, "x", SamplingParams(max_tokens=400))
        deadline_s = time.monotonic() + 10
        while llm._thread.is_alive():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        with pytest.raises(RequestFailed, match="has ended: .*SIGKILL"):
            ask(llm, "x")
    assert {process.pid for process in engine_processes()} == before


INTERRUPTED = """
    import os, signal, sys, threading, psutil
    from trimaran import LLM, SamplingParams

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background has it ignored

    def interrupt(after_s):
        timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()

    if {during!r} == "start":
        interrupt(1.5)
    try:
        with LLM({model!r}, platform="null", null_script={script!r}, max_num_seqs=3) as llm:
            interrupt(0.4)
            try:
                llm.generate(["x"] * 3, SamplingParams(max_tokens=2000), show_progress=False)
            except KeyboardInterrupt:
                print("interrupted")
            print(len(llm.generate("x", SamplingParams(max_tokens=2), show_progress=False)))
    except KeyboardInterrupt:
        print("interrupted")
    print([child.cmdline() for child in psutil.Process().children(recursive=True)])
"""


@pytest.mark.parametrize(("during", "script"), [("generate", "step_ms=10"), ("start", "load_ms=30000")])
def test_an_interrupt_ends_the_call_and_leaves_nothing(demo_folder: Path, during: str, script: str) -> None:
    """Also not in the engine, which has room for the three requests that were interrupted and no more."""
    text = textwrap.dedent(INTERRUPTED).format(during=during, model=str(demo_folder), script=script)
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    expected = ["interrupted", "1", "[]"] if during == "generate" else ["interrupted", "[]"]
    assert done.stdout.splitlines() == expected
    assert time.monotonic() - began_s < 15


async def test_async_side_by_side_and_streams_that_are_left(demo_folder: Path) -> None:
    async with AsyncLLM(str(demo_folder), **NULL) as llm:
        both = await asyncio.gather(llm.generate("a", SHORT), llm.generate("b", SHORT))
        assert [len(output.outputs[0].token_ids) for output in both] == [4, 4]
        [whole] = [output.outputs[0].text for output in [await llm.generate("a", SHORT)]]
        assert "".join([piece async for piece in llm.stream("a", SHORT)]) == whole
        stream = llm.stream("a", SamplingParams(max_tokens=500))
        await anext(stream)
        await stream.aclose()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await llm.generate("a", SamplingParams(max_tokens=500))
        with pytest.raises(RequestRefused):
            await llm.generate([1] * 600)
        assert len((await llm.generate("a", SHORT)).outputs[0].token_ids) == 4
    assert not [p for p in engine_processes() if p.create_time() > time.time() - 1]
