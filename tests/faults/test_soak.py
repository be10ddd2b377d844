"""Thousands of mixed requests: nothing fails that should not, and no process grows."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from trimaran.tests.faults.crowd import descendants, nothing_left
from trimaran.tests.server import Server

CONCURRENCY = 24
GROWTH = 1.05


class Mix:
    """Requests of every kind, drawn from a seed; `ask` sends one and judges the answer."""

    def __init__(self, server: Server, *, max_prompt: int, max_tokens: int) -> None:
        self.url = server.url
        self.model = server.model
        self.max_prompt = max_prompt
        self.max_tokens = max_tokens
        self.counts: dict[str, int] = {}

    def fields(self, draw: random.Random) -> dict[str, Any]:
        prompt: Any = [draw.randrange(200, 20000) for _ in range(draw.randint(1, self.max_prompt))]
        if draw.random() < 0.3:
            prompt = "words " * draw.randint(1, self.max_prompt)
        fields: dict[str, Any] = {"prompt": prompt, "max_tokens": draw.randint(1, self.max_tokens)}
        extras: list[dict[str, Any]] = [
            {},
            {"n": draw.randint(2, 4)},
            {"logprobs": draw.randint(0, 5)},
            {"stop": ["zzz", "qqq"]},
            {"temperature": 0},
            {"seed": draw.randrange(1000), "top_p": 0.9},
            {"echo": True, "logprobs": 1},
            {"cache_salt": draw.choice("abc")},
            {"prompt": [prompt, prompt]},
            {"presence_penalty": 0.5, "logit_bias": {"17": 2}},
        ]
        return {"model": self.model, "ignore_eos": True, **fields, **draw.choice(extras)}

    async def ask(self, client: httpx.AsyncClient, number: int) -> None:
        draw = random.Random(number)
        kind = draw.choices(["plain", "stream", "leave", "wrong", "look"], [40, 40, 12, 5, 3])[0]
        self.counts[kind] = self.counts.get(kind, 0) + 1
        body = self.fields(draw)
        if kind == "plain":
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
        elif kind == "stream":
            await self._stream(client, body)
        elif kind == "leave":
            await self._leave(client, body, draw)
        elif kind == "wrong":
            wrong = draw.choice(
                [{"max_tokens": -1}, {"prompt": []}, {"model": "other"}, {"logprobs": 1000}, {"n": 10**6}]
            )
            answer = await client.post("/v1/completions", json={**body, **wrong})
            assert 400 <= answer.status_code < 500, answer.text
        else:
            assert (await client.get(draw.choice(["/metrics", "/ready", "/v1/server_info"]))).status_code == 200

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        assert answer.status_code == 200 and lines[-1] == "data: [DONE]", lines[-1]
        assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] >= 1

    async def _leave(self, client: httpx.AsyncClient, body: dict[str, Any], draw: random.Random) -> None:
        try:
            async with asyncio.timeout(draw.random() * 0.05):
                await client.post("/v1/completions", json={**body, "max_tokens": 200, "stream": draw.random() < 0.5})
        except TimeoutError:
            pass

    async def run(self, first: int, last: int) -> None:
        numbers = iter(range(first, last))
        limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
        async with httpx.AsyncClient(base_url=self.url, timeout=60, limits=limits) as client:

            async def work() -> None:
                for number in numbers:
                    await self.ask(client, number)

            async with asyncio.TaskGroup() as group:
                for _ in range(CONCURRENCY):
                    group.create_task(work())


def resident(server: Server) -> dict[str, int]:
    """Bytes by process; pages shared with others counted in part, as they come and go with those."""
    processes = [psutil.Process(server.process.pid), *descendants(server)]
    return {f"{_name(process)} {process.pid}": process.memory_info().rss for process in processes}


def _name(process: psutil.Process) -> str:
    return next((part for part in process.cmdline() if part.startswith("trimaran.")), "?").removeprefix("trimaran.")


def soak(server: Server, mix: Mix, number: int) -> None:
    """A tenth, a look, the rest, a look."""
    asyncio.run(mix.run(0, number // 10))
    server.assert_idle()
    before = resident(server)
    asyncio.run(mix.run(number // 10, number))
    server.assert_idle()
    after = resident(server)
    assert set(after) == set(before), "a process was restarted"
    grown = {name: after[name] / before[name] for name in before}
    print({name: f"{before[name] / 1e6:.1f} -> {after[name] / 1e6:.1f} MB" for name in before}, mix.counts)
    assert max(grown.values()) <= GROWTH, {name: f"{share:.3f}" for name, share in grown.items()}
    metrics = server.metrics()
    assert min(metrics.values()) >= 0 and metrics["request_failure_total"] == 0


ARGUMENTS = ("--frontends", "2", "--num-blocks", "2048")


def test_five_hundred_mixed_requests(demo_folder: Path) -> None:
    """The same mix, short: nothing fails that should not."""
    with nothing_left(Server(demo_folder, *ARGUMENTS, script="step_ms=1")) as server:
        asyncio.run(Mix(server, max_prompt=100, max_tokens=12).run(0, 500))
        server.assert_idle()
        assert server.metrics()["request_failure_total"] == 0


@pytest.mark.long
@pytest.mark.user_pain("M11")
@pytest.mark.timeout(900)
def test_ten_thousand_mixed_requests(demo_folder: Path) -> None:
    with nothing_left(Server(demo_folder, *ARGUMENTS, script="step_ms=1")) as server:
        soak(server, Mix(server, max_prompt=100, max_tokens=24), 10_000)


@pytest.mark.long
@pytest.mark.model
@pytest.mark.user_pain("M11")
@pytest.mark.timeout(1800)
def test_a_thousand_mixed_requests_of_a_real_model(demo_folder: Path) -> None:
    arguments = ("--max-model-len", "512", "--num-blocks", "256")
    with nothing_left(Server(demo_folder, *arguments, script=None)) as server:
        soak(server, Mix(server, max_prompt=24, max_tokens=6), 1_000)
