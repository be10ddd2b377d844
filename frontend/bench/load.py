"""Sends a workload at a rate or in a closed loop, in processes of its own: `python -m trimaran.frontend.bench.load`.

Reads a Load as JSON on standard input, writes its outcomes as msgpack on standard output.
"""

import asyncio
import random
import sys
import time

import msgspec
import uvloop

from .stream_client import Outcome, ask
from .workload import Ask


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One process's share. `request_rate` in requests a second (infinite: all at once); `burstiness` 1 is Poisson."""

    host: str
    port: int
    model: str
    asks: list[Ask]
    request_rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    headers: dict[str, str] = {}
    temperature: float = 0.0
    timeout_s: float = 600.0
    keep_text: bool = False
    seed: int = 0


async def run(load: Load) -> list[Outcome]:
    """Every ask's outcome, in order."""
    places = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else None
    generator = random.Random(load.seed)
    outcomes: list[Outcome | None] = [None] * len(load.asks)

    async def one(index: int) -> None:
        if places is not None:
            await places.acquire()
        try:
            outcomes[index] = await _ask(load, load.asks[index])
        finally:
            if places is not None:
                places.release()

    async with asyncio.TaskGroup() as tasks:
        due = time.perf_counter()
        for index in range(len(load.asks)):
            tasks.create_task(one(index))
            if load.request_rate is not None:
                due += generator.gammavariate(load.burstiness, 1 / (load.request_rate * load.burstiness))
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
    return [outcome for outcome in outcomes if outcome is not None]


async def _ask(load: Load, ask_: Ask) -> Outcome:
    body = {
        "model": load.model,
        "prompt": ask_.prompt,
        "max_tokens": ask_.output_tokens,
        "temperature": load.temperature,
        "ignore_eos": ask_.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return await ask(
        load.host,
        load.port,
        "/v1/completions",
        msgspec.json.encode(body),
        load.headers,
        timeout_s=load.timeout_s,
        keep_text=load.keep_text,
    )


def main() -> None:
    """Run the share given on standard input."""
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcomes = runner.run(run(load))
    sys.stdout.buffer.write(msgspec.msgpack.encode(outcomes))


if __name__ == "__main__":
    main()
