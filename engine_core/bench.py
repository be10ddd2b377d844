"""`trimaran bench engine`: the core alone, without a model. A process: `python -m trimaran.engine_core.bench`.

Two measurements. Step cost: CPU time of plan and commit per step, at several numbers of running sequences, on a fake
worker that answers at once. Round trip: time from publishing a plan into a ring to its result's arrival on the core's
event loop, with a worker process that answers at once: what the hop between the two processes costs.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import msgspec
import numpy as np
import uvloop

from ..ipc.frontend_messages import OutputColumns
from ..ipc.plan import RingKind, StepPlan, StepResult, WorkFlag, hash_tokens
from ..ipc.ring import RingReader, RingWriter, create_doorbell, create_ring
from ..ipc.sampling import Sampling
from ..ipc.server_info import EngineLimits
from .engine import Engine
from .request import Request
from .statistics import Statistics

_PROMPT = 64
_BLOCK = 16
_SLOT_BYTES = 1 << 20


class StepCost(msgspec.Struct, frozen=True):
    """CPU milliseconds of one step: median over the steps measured."""

    num_running: int
    plan_ms: float
    commit_ms: float
    pack_ms: float
    output_ms: float
    total_ms: float


def answer(plan: StepPlan, step: int) -> StepResult:
    """What a worker would return, with arbitrary tokens."""
    rows = plan.rows[(plan.flags & WorkFlag.SAMPLES) != 0]
    tokens = (rows * 7 + step) % 30_000 + 1
    return StepResult(
        step=np.array([step], np.int64),
        rows=rows,
        token_ids=tokens.astype(np.int32),
        flags=np.zeros(len(rows), np.uint8),
        tokens_hash=hash_tokens(rows, tokens),
        seconds=np.zeros(4),
    )


def step_cost(num_running: int, num_steps: int) -> StepCost:
    """Fill the engine with `num_running` sequences and measure decode steps, two in flight as in service."""
    engine = _full_engine(num_running, num_steps)
    buffer = memoryview(bytearray(_SLOT_BYTES))
    in_flight: list[StepPlan] = []
    spent: dict[str, list[float]] = {"plan": [], "pack": [], "commit": [], "output": []}
    clock = time.thread_time
    for _ in range(num_steps):
        t0 = clock()
        plan = engine.plan(time.monotonic())
        t1 = clock()
        assert plan is not None
        StepPlan.SCHEMA.pack_into(buffer, plan.values())
        t2 = clock()
        in_flight.append(plan)
        if len(in_flight) < 2:
            continue
        oldest = in_flight.pop(0)
        result = answer(oldest, int(oldest.step[0]))
        t3 = clock()
        news = engine.commit(result, time.monotonic())
        t4 = clock()
        for _, columns in news.outputs:
            OutputColumns.SCHEMA.pack(columns.values())
        t5 = clock()
        if len(oldest.rows) == num_running and len(oldest.token_ids) == 0:
            for name, value in zip(spent, (t1 - t0, t2 - t1, t4 - t3, t5 - t4), strict=True):
                spent[name].append(value * 1e3)
    medians = {name: statistics.median(values) for name, values in spent.items()}
    return StepCost(
        num_running=num_running,
        plan_ms=medians["plan"],
        commit_ms=medians["commit"],
        pack_ms=medians["pack"],
        output_ms=medians["output"],
        total_ms=statistics.mean(sum(step) for step in zip(*spent.values(), strict=True)),
    )


def _full_engine(num_running: int, num_steps: int) -> Engine:
    length = _PROMPT + num_steps + 8
    limits = EngineLimits(
        max_model_len=length + _BLOCK,
        vocab_size=32_000,
        max_num_seqs=num_running,
        num_blocks=num_running * (length // _BLOCK + 2),
        block_size=_BLOCK,
        dtype="bfloat16",
    )
    engine = Engine(limits, max_batched_tokens=max(8192, num_running), prefix_caching=True, statistics=Statistics())
    random = np.random.default_rng(0)
    for index in range(num_running):
        engine.submit(
            Request(
                request_id=index,
                owner=1,
                order=index,
                # staggered, so that blocks fill up in different steps as they do in service
                prompt=random.integers(1, 32_000, _PROMPT - index % _BLOCK).astype(np.int32),
                sampling=Sampling(max_tokens=num_steps + 4, end_token_ids=(31_999,), seed=index),
                arrival_s=time.monotonic(),
                root=engine.cache.root(salt=None, adapter=None),
            )
        )
    return engine


def _echo(descriptors: list[int], num_steps: int) -> None:
    """The other process: answers each plan at once."""
    plan_ring, plan_doorbell, result_ring, result_doorbell = descriptors
    reader = RingReader(plan_ring, 0, plan_doorbell)
    writer = RingWriter(result_ring, [result_doorbell])
    for _ in range(num_steps):
        message = reader.wait(10.0)
        assert message is not None
        plan = StepPlan.unpack(message[1])
        result = answer(plan, int(plan.step[0]))
        del plan
        slot = writer.slot()
        assert slot is not None
        num_bytes = StepResult.SCHEMA.pack_into(slot, result.values())
        reader.release()
        writer.publish(num_bytes, RingKind.RESULT)


def round_trip(num_sequences: int, num_steps: int) -> dict[str, float]:
    """Microseconds from `publish` to the result in the core's hands: p50, p90, p99."""
    rings = [
        create_ring(num_slots=4, slot_bytes=_SLOT_BYTES, num_readers=1, generation=1) for _ in ("plans", "results")
    ]
    bells = [create_doorbell() for _ in ("plans", "results")]
    descriptors = [rings[0], bells[0], rings[1], bells[1]]
    arguments = ["--echo", ",".join(map(str, descriptors)), "--steps", str(num_steps)]
    worker = subprocess.Popen([sys.executable, "-m", __spec__.name, *arguments], pass_fds=descriptors)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        times = runner.run(_drive(rings, bells, num_sequences, num_steps))
    worker.wait(10)
    times_us = np.array(times[num_steps // 10 :]) * 1e6
    return {f"p{point}": float(np.percentile(times_us, point)) for point in (50, 90, 99)}


async def _drive(rings: list[int], bells: list[int], num_sequences: int, num_steps: int) -> list[float]:
    loop = asyncio.get_running_loop()
    writer, reader = RingWriter(rings[0], [bells[0]]), RingReader(rings[1], 0, bells[1])
    times: list[float] = []
    done = asyncio.Event()
    began = 0.0

    def send() -> None:
        nonlocal began
        rows = np.arange(num_sequences, dtype=np.int32)
        plan = StepPlan(
            step=np.array([len(times)], np.int64),
            rows=rows,
            starts=rows,
            counts=np.ones(num_sequences, np.int32),
            flags=np.full(num_sequences, WorkFlag.SAMPLES | WorkFlag.FROM_DEVICE, np.uint8),
        )
        slot = writer.slot()
        assert slot is not None
        began = time.perf_counter()
        writer.publish(StepPlan.SCHEMA.pack_into(slot, plan.values()), RingKind.PLAN)

    def receive() -> None:
        reader.silence()
        while (message := reader.poll()) is not None:
            result = StepResult.unpack(bytes(message[1]))
            assert len(result.token_ids) == num_sequences
            reader.release()
            times.append(time.perf_counter() - began)
            if len(times) == num_steps:
                done.set()
            else:
                # a pause, as between real steps: back-to-back messages would find the other side still awake
                loop.call_later(0.001, send)

    loop.add_reader(bells[1], receive)
    send()
    await done.wait()
    loop.remove_reader(bells[1])
    return times


def main() -> None:
    """Print a JSON report; `--sequences 64,256,1024` and `--steps N` set the sizes."""
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    sizes = [int(size) for size in options.get("--sequences", "64,256,1024").split(",")]
    num_steps = int(options.get("--steps", "300"))
    if "--echo" in options:
        _echo([int(descriptor) for descriptor in options["--echo"].split(",")], num_steps)
        return
    costs = [step_cost(size, num_steps) for size in sizes]
    report: dict[str, Any] = {
        "step_cost": [msgspec.to_builtins(cost) for cost in costs],
        "round_trip_us": {str(size): round_trip(size, 1000) for size in (1, 256)},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
