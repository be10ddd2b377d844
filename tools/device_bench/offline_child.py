"""One engine's offline API, measured in a process of its own: vLLM's or Trimaran's, by the same loop.

    offline_child.py ENGINE MODEL PLAN RESULTS

PLAN is JSON (see `offline.Plan`); a line of JSON for each test is appended to the file RESULTS, times in microseconds
as they were measured. Imports nothing of either engine before it is chosen: each runs in its own environment.
"""

import time

BEGAN_S = time.time()

import asyncio  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, Protocol  # noqa: E402

Prompts = list[list[int]]


class Engine(Protocol):
    """`generate` gives the seconds it took and the tokens that came; `stream` time to the first output of each prompt
    since all were handed over, the gaps between later ones per token, and the tokens that came.
    """

    async def generate(self, prompts: Prompts, output: int) -> tuple[float, int]: ...
    async def stream(self, prompts: Prompts, output: int) -> tuple[list[float], list[float], int]: ...


class Trimaran:
    """`AsyncLLM`. Token ids in and out."""

    def __init__(self, llm: Any) -> None:
        from trimaran import SamplingParams

        self._llm = llm
        self._params = SamplingParams

    def _greedy(self, output: int) -> Any:
        return self._params(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)

    async def generate(self, prompts: Prompts, output: int) -> tuple[float, int]:
        params = self._greedy(output)
        began = time.perf_counter()
        calls = [lambda prompt=prompt: self._llm.generate(prompt, params) for prompt in prompts]
        results = await self._llm.run_all(calls, lambda done: None)
        took_s = time.perf_counter() - began
        return took_s, sum(len(result.outputs[0].token_ids) for result in results)

    async def stream(self, prompts: Prompts, output: int) -> tuple[list[float], list[float], int]:
        params = self._greedy(output)
        began = time.perf_counter()

        async def one(prompt: list[int]) -> list[tuple[float, int]]:
            return [(time.perf_counter(), len(new)) async for new in self._llm.stream_token_ids(prompt, params)]

        streams = await asyncio.gather(*map(one, prompts))
        gaps = [
            (now - before) / num_new for stream in streams for (before, _), (now, num_new) in itertools.pairwise(stream)
        ]
        return (
            [stream[0][0] - began for stream in streams],
            gaps,
            sum(num_new for stream in streams for _, num_new in stream),
        )


class Vllm:
    """`LLM` for throughput, its engine's `step` loop for times. Token ids in and out."""

    def __init__(self, model: str) -> None:
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

        self._params, self._kinds = SamplingParams, RequestOutputKind
        self._llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            enable_prefix_caching=False,
        )
        self._num_asked = 0

    def _greedy(self, output: int, kind: Any) -> Any:
        return self._params(
            temperature=0.0, max_tokens=output, min_tokens=0, ignore_eos=True, detokenize=False, output_kind=kind
        )

    async def generate(self, prompts: Prompts, output: int) -> tuple[float, int]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        results = self._llm.generate(asked, self._greedy(output, self._kinds.FINAL_ONLY), use_tqdm=False)
        took_s = time.perf_counter() - began
        return took_s, sum(len(result.outputs[0].token_ids) for result in results)

    async def stream(self, prompts: Prompts, output: int) -> tuple[list[float], list[float], int]:
        engine, params = self._llm.llm_engine, self._greedy(output, self._kinds.DELTA)
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        gaps: list[float] = []
        num_came = 0
        began = time.perf_counter()
        for prompt in prompts:
            self._num_asked += 1
            engine.add_request(f"x{self._num_asked}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for result in outputs:
                num_tokens = len(result.outputs[0].token_ids)
                if not num_tokens:
                    continue
                num_came += num_tokens
                if result.request_id in last:
                    gaps.append((now - last[result.request_id]) / num_tokens)
                else:
                    first[result.request_id] = now - began
                last[result.request_id] = now
        return list(first.values()), gaps, num_came


class Tests:
    """The plan's tests in order; each result is written at once, so that an end half-way keeps the first half."""

    def __init__(self, engine: Engine, plan: dict[str, Any], results: Path) -> None:
        self._engine, self._plan, self._results = engine, plan, results
        self._random = random.Random()

    def _prompts(self, count: int, length: int) -> Prompts:
        return [[self._random.randrange(*self._plan["ids"]) for _ in range(length)] for _ in range(count)]

    def tell(self, **fields: Any) -> None:
        with self._results.open("a") as file:
            file.write(json.dumps(fields) + "\n")

    async def run(self) -> None:
        await self._engine.generate(self._prompts(8, 64), 16)
        self.tell(test="start", first_output_s=round(time.time() - BEGAN_S, 2))
        if self._plan["throughput"] is not None:
            for number in range(self._plan["runs"] + 1):
                await self._throughput(is_warm_up=number == 0)
        for size, prompt, output, repetitions in self._plan["streams"]:
            await self._times(size, prompt, output, repetitions)

    async def _throughput(self, *, is_warm_up: bool) -> None:
        count, prompt, output = self._plan["throughput"]
        took_s, num_tokens = await self._engine.generate(self._prompts(count, prompt), output)
        assert num_tokens == count * output, f"{num_tokens} tokens came, {count * output} were asked for"
        if not is_warm_up:
            self.tell(test="throughput", s=took_s, tokens=num_tokens, prompt_tokens=count * prompt)

    async def _times(self, size: int, prompt: int, output: int, repetitions: int) -> None:
        first_us: list[int] = []
        gaps_us: list[int] = []
        for number in range(repetitions):
            first, gaps, num_tokens = await self._engine.stream(self._prompts(size, prompt), output)
            assert len(first) == size, f"{len(first)} of {size} prompts were answered"
            assert num_tokens == size * output, f"{num_tokens} tokens came, {size * output} were asked for"
            if number == 0:
                continue  # a warm-up
            first_us += [round(value * 1e6) for value in first]
            gaps_us += [round(value * 1e6) for value in gaps]
        self.tell(test="times", size=size, prompt=prompt, output=output, first_us=first_us, gaps_us=gaps_us)


async def _with_trimaran(model: str, plan: dict[str, Any], results: Path) -> None:
    from trimaran import AsyncLLM

    options = {"load_format": "dummy", "dtype": "bfloat16", "prefix_caching": False, **plan["options"]}
    options |= {"prompt_step": 1.0}  # as `LLM` has it, which the other engine is here
    async with AsyncLLM(model, **options) as llm:
        await Tests(Trimaran(llm), plan, results).run()


def main() -> None:
    name, model, plan, results = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), Path(sys.argv[4])
    if name == "trimaran":
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_with_trimaran(model, plan, results))
    else:
        asyncio.run(Tests(Vllm(model), plan, results).run())


if __name__ == "__main__":
    main()
