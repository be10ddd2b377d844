"""LLM and AsyncLLM over a scripted core, without HTTP."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trimaran.frontend.client.async_llm import AsyncLLM
from trimaran.frontend.client.engine_host import EngineHost, OpenHost, Watch
from trimaran.frontend.client.llm import LLM
from trimaran.frontend.client.refusals import RequestFailed, RequestRefused
from trimaran.frontend.client.sampling import SamplingParams
from trimaran.frontend.text.model_text import ModelText
from trimaran.ipc.conditions import Refusal
from trimaran.ipc.control import CoreLost, CoreStarted, ModelKnown
from trimaran.tests.api.conftest import limits_of
from trimaran.tests.api.fake_core import FakeCore, echo
from trimaran.tests.pure import vocabularies
from trimaran.tests.pure.parsed_answers import HARD, written


class ScriptedHost:
    """Says what a supervisor says, about a core that runs already."""

    def __init__(self, core: FakeCore, directory: Path, watch: Watch, refusal: str | None = None) -> None:
        self.core_address = core.address
        self.watch = watch
        self._core, self._directory, self._refusal = core, directory, refusal
        self._ending = asyncio.Event()

    async def run(self) -> None:
        if self._refusal is not None:
            raise Refusal(self._refusal)
        self.watch(ModelKnown(str(self._directory), "model"))
        await asyncio.sleep(0.05)
        self.watch(CoreStarted(self._core.incarnation))
        await self._ending.wait()

    async def wait_ready(self) -> None:
        await asyncio.sleep(0)

    def terminate(self) -> None:
        self._ending.set()


HOSTS: list[ScriptedHost] = []


def opening(core: FakeCore, directory: Path, refusal: str | None = None) -> OpenHost:
    def open_host(watch: Watch) -> EngineHost:
        HOSTS.append(ScriptedHost(core, directory, watch, refusal))
        return HOSTS[-1]

    return open_host


@pytest.fixture(scope="module")
def core(model_directory: Path) -> Iterator[FakeCore]:
    with tempfile.TemporaryDirectory(prefix="tri") as directory:
        core = FakeCore(Path(directory), limits_of(ModelText.load(model_directory))).start()
        yield core
        core.stop()


@pytest.fixture
def llm(core: FakeCore, model_directory: Path) -> Iterator[LLM]:
    core.script, core.step_s, core.max_queued = echo, 0.001, None
    core.submits.clear()
    with LLM(host=opening(core, model_directory)) as llm:
        yield llm


def test_generate_keeps_the_order(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [f"prompt {index} " * (1 + index % 3) for index in range(50)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=100, logprobs=1))
    assert [output.outputs[0].text for output in outputs] == prompts == [output.prompt for output in outputs]
    first = outputs[0].outputs[0]
    assert first.finish_reason == "stop" and first.logprobs is not None
    assert first.token_ids[:-1] == outputs[0].prompt_token_ids
    assert len(first.logprobs) == len(first.token_ids) - 1
    assert "50/50" in capsys.readouterr().err


def test_prompts_of_every_form(llm: LLM) -> None:
    [by_text] = llm.generate("hello", show_progress=False)
    [by_ids] = llm.generate(by_text.prompt_token_ids, show_progress=False)
    assert by_ids.outputs[0].text == "hello" and by_ids.prompt is None
    [three] = llm.generate(["x"], SamplingParams(n=3, prompt_logprobs=2), show_progress=False)
    assert [choice.index for choice in three.outputs] == [0, 1, 2]
    assert three.prompt_logprobs is not None and three.prompt_logprobs[0] is None
    each = llm.generate(
        ["a b c", "a b c"], [SamplingParams(max_tokens=1), SamplingParams(stop="c")], show_progress=False
    )
    assert [output.outputs[0].finish_reason for output in each] == ["length", "stop"]
    assert each[1].outputs[0].stop_reason == "c"


def test_chat(llm: LLM) -> None:
    [answer] = llm.chat([{"role": "user", "content": "Hi"}], show_progress=False)
    assert "Hi" in answer.outputs[0].text
    two = llm.chat([[{"role": "user", "content": "1"}], [{"role": "user", "content": "2"}]], show_progress=False)
    assert len(two) == 2


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (SamplingParams(temperature=3.0), "temperature"),
        (SamplingParams(temperature=float("nan")), "temperature"),
        (SamplingParams(top_p=0.0), "top_p"),
        (SamplingParams(n=0), "n"),
        (SamplingParams(max_tokens=-1), "max_tokens"),
        (SamplingParams(stop=("",)), "stop"),
        (SamplingParams(logit_bias={10**6: 1.0}), "logit_bias"),
        (SamplingParams(logit_bias={5: float("inf")}), "logit_bias"),
        (SamplingParams(logprobs=10**6), "logprobs"),
        (SamplingParams(min_tokens=9, max_tokens=3), "min_tokens"),
        (SamplingParams(seed="x"), "seed"),  # type: ignore[arg-type]
        (SamplingParams(stop="x", detokenize=False), "stop: .*stop_token_ids, or leave detokenize True"),
    ],
)
def test_wrong_sampling_names_the_field(llm: LLM, params: SamplingParams, named: str) -> None:
    with pytest.raises(RequestRefused, match=named):
        llm.generate("x", params, show_progress=False)
    assert llm.generate("x", show_progress=False)[0].outputs[0].text == "x"


def test_t1_t4_tools_and_reasoning(tmp_path: Path) -> None:
    """As over HTTP: the prompt tells of the tools, the answer is parted, grammars and budgets are asked for."""
    directory = vocabularies.byte_level_tools(tmp_path)
    model = ModelText.load(directory)
    [end] = model.tokenizer.encode("</think>", add_special_tokens=False)
    said = "<think>Hm.</think>I look. " + written("hermes", [("write-file", HARD), ("write-file", {})])
    ids = model.tokenizer.encode(said, add_special_tokens=False)
    tools = [{"type": "function", "function": {"name": "write-file", "parameters": {"type": "object"}}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    with tempfile.TemporaryDirectory(prefix="tri") as run_directory:
        core = FakeCore(Path(run_directory), limits_of(model)).start()
        core.script = lambda submit, prompt, choice: [*ids, *submit.sampling.end_token_ids[:1]]
        with LLM(host=opening(core, directory)) as llm:
            [output] = llm.chat(messages, SamplingParams(n=2), tools=tools, thinking_token_budget=9)
            for choice in output.outputs:
                assert (choice.reasoning, choice.text, choice.finish_reason) == ("Hm.", "I look.", "tool_calls")
                called = [(call.function.name, json.loads(call.function.arguments)) for call in choice.tool_calls]
                assert called == [("write-file", HARD), ("write-file", {})]
            thought, grammar = core.submits[-1].sampling.thought, core.submits[-1].grammar
            assert thought is not None and (thought.max_tokens, thought.end_id) == (9, end) and grammar is None
            calls = [msgspec.to_builtins(call) for call in choice.tool_calls[:1]]
            messages += [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "ok"}]
            [output] = llm.chat(messages, tools=tools, tool_choice="required", parallel_tool_calls=False)
            assert len(output.outputs[0].tool_calls) == 1
            grammar = core.submits[-1].grammar
            assert grammar is not None and grammar.kind == "tool_calls" and grammar.starts_after == (end,)
            prompt = model.tokenizer.decode(core.prompts[-1], skip_special_tokens=False)
            assert '"name": "write-file"' in prompt and '<tool_call>write-file {"tags": ' in prompt
            [output] = llm.chat(messages, tools=tools, tool_choice="none")
            assert not output.outputs[0].tool_calls and "</tool_call>" in output.outputs[0].text
            assert len(core.prompts[-1]) < len(core.prompts[-2]), "tools that may not be called are not in the prompt"
            for wrong, named in (
                ({"tools": [{"type": "search"}]}, "tools"),
                ({"tools": tools, "tool_choice": "often"}, "tool_choice"),
                ({"tool_choice": "required"}, "tool_choice"),
                ({"thinking_token_budget": -1}, "thinking_token_budget"),
            ):
                with pytest.raises(RequestRefused, match=named) as refused:
                    llm.chat(messages, **wrong)
                assert (refused.value.param or "").startswith(named)
        core.stop()


def test_without_detokenizing_there_are_ids_alone(llm: LLM) -> None:
    [with_text] = llm.generate("one two three", SamplingParams(logprobs=0), show_progress=False)
    [output] = llm.generate("one two three", SamplingParams(logprobs=0, detokenize=False, n=2), show_progress=False)
    [chat] = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(detokenize=False), show_progress=False)
    assert chat.outputs[0].text == "" and chat.outputs[0].token_ids
    for choice in output.outputs:
        assert choice.text == "" and choice.finish_reason == "stop"
        assert choice.token_ids == with_text.outputs[0].token_ids
        assert choice.logprobs == with_text.outputs[0].logprobs


def test_a_full_queue_is_waited_for(llm: LLM, core: FakeCore) -> None:
    core.max_queued = 3
    outputs = llm.generate([f"p {index}" for index in range(12)], show_progress=False)
    assert [output.outputs[0].text for output in outputs] == [f"p {index}" for index in range(12)]


def test_core_lost_fails_the_call(llm: LLM, core: FakeCore) -> None:
    core.step_s = 0.05
    core.script = lambda submit, prompt, choice: [5] * 1000
    llm._loop.call_later(0.3, HOSTS[-1].watch, CoreLost(core.incarnation, "killed"))
    with pytest.raises(RequestFailed, match="killed"):
        llm.generate("x", show_progress=False)
    core.live.clear()


def test_a_refused_start_says_why(core: FakeCore, model_directory: Path) -> None:
    with pytest.raises(Refusal, match="no such model"):
        LLM(host=opening(core, model_directory, "no such model; name another"))


async def test_async_stream(core: FakeCore, model_directory: Path) -> None:
    core.script, core.step_s, core.max_queued = echo, 0.001, None
    core.incarnation = 1
    async with AsyncLLM(host=opening(core, model_directory)) as llm:
        pieces = [piece async for piece in llm.stream("one two three")]
        assert "".join(pieces) == "one two three" and len(pieces) > 1
        core.script = lambda submit, prompt, choice: [5] * 2000
        before = len(core.aborts)
        stream = llm.stream("x")
        await anext(stream)
        await stream.aclose()
        both = await asyncio.gather(
            llm.generate("a", SamplingParams(max_tokens=3)), llm.generate("b", SamplingParams(max_tokens=3))
        )
        assert [len(output.outputs[0].token_ids) for output in both] == [3, 3]
        assert len(core.aborts) == before + 1


async def test_a_stream_of_token_ids(core: FakeCore, model_directory: Path) -> None:
    core.script, core.step_s, core.max_queued = echo, 0.001, None
    core.incarnation = 1
    async with AsyncLLM(host=opening(core, model_directory)) as llm:
        whole = await llm.generate("one two three")
        lists = [new async for new in llm.stream_token_ids("one two three", SamplingParams(logprobs=0))]
        assert all(lists) and len(lists) > 1
        assert [id for new in lists for id in new] == whole.outputs[0].token_ids
        late = []
        async for new in llm.stream_token_ids(whole.prompt_token_ids):
            late.append(new)
            await asyncio.sleep(0.1)
        assert len(late) <= 3 and [id for new in late for id in new] == whole.outputs[0].token_ids
        core.script = lambda submit, prompt, choice: [5] * 2000
        before = len(core.aborts)
        stream = llm.stream_token_ids("x")
        assert set(await anext(stream)) == {5}
        await stream.aclose()
        await asyncio.sleep(0.05)
        assert len(core.aborts) == before + 1


async def test_streams_refuse_what_they_cannot_show(core: FakeCore, model_directory: Path) -> None:
    core.incarnation = 1
    async with AsyncLLM(host=opening(core, model_directory)) as llm:
        for stream, params, text in (
            (llm.stream_token_ids, SamplingParams(n=2), "n: a stream has one choice"),
            (llm.stream, SamplingParams(n=2), "n: a stream has one choice"),
            (llm.stream_token_ids, SamplingParams(stop="x"), "stop: .*give stop_token_ids"),
            (llm.stream, SamplingParams(detokenize=False), "use stream_token_ids"),
        ):
            with pytest.raises(RequestRefused, match=text):
                await anext(stream("x", params))


async def test_a_stream_of_token_ids_fails_with_its_core(core: FakeCore, model_directory: Path) -> None:
    core.script, core.step_s, core.max_queued = (lambda submit, prompt, choice: [5] * 1000), 0.01, None
    core.incarnation = 1
    async with AsyncLLM(host=opening(core, model_directory)) as llm:
        stream = llm.stream_token_ids("x")
        await anext(stream)
        HOSTS[-1].watch(CoreLost(core.incarnation, "killed"))
        with pytest.raises(RequestFailed, match="killed"):
            async for _ in stream:
                pass
    core.live.clear()
