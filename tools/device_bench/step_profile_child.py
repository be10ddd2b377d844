"""Steps of one device worker in this process, without the core: how long each part takes, and on what the device spends
its time.

    step_profile_child.py MODEL CACHE PLAN RESULTS

PLAN is JSON (see `profiling.Plan`): `decodes` of (sequences, cached positions), `prompts` of (tokens, cached
positions), `options` of the worker. Sizes are settled as the core does. A line of JSON for each case is appended to
RESULTS. Keys and values that the cache was never given are zeros.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np

from trimaran.device_workers.boot import describe, open_engine, strategy_misfits
from trimaran.device_workers.execution.contract import PendingStep, StepEngine
from trimaran.engine_core.negotiation import settle
from trimaran.ipc.configuration import CoreConfiguration, WorkerConfiguration
from trimaran.ipc.plan import RowFlag, StepPlan, WorkFlag
from trimaran.ipc.worker_messages import WorkerHello

_WARM, _TIMED, _PROFILED = 20, 200, 10
_PARTS = ("build", "launch", "sample", "wait")
_KERNELS_TOLD = 14
_KINDS = (
    (
        "linear",
        ("norm_linear", "norm_gate_up", "linear_add", "gemv", "gemm", "nvjet", "cutlass", "dot_kernel", "splitk"),
    ),
    ("attention", ("attention", "sdpa", "fprop", "flash", "combine_kernel")),
    ("rotary", ("rotary",)),
    ("norm", ("norm",)),
    ("activation", ("silu",)),
    ("sampling", ("sample", "argmax", "draw", "greedy")),
    ("copy", ("memcpy", "memset")),
)
"""Kind -> parts of its kernels' names; the first that fits."""


class Steps:
    """Decodes of a fixed number of sequences, two steps in flight as in service."""

    def __init__(self, engine: StepEngine, block_size: int, num_blocks: int) -> None:
        self._engine = engine
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._step = 0

    def decode(self, num_sequences: int, length: int, num_steps: int) -> dict[str, Any]:
        """Seconds a step, in all and by part."""
        rows = np.arange(num_sequences, dtype=np.int32)
        self._give(rows, length + num_steps + 1)
        running: deque[PendingStep] = deque()
        ends, parts = [], []
        for number in range(num_steps):
            self._forward(
                rows=rows,
                starts=np.full(num_sequences, length + number, np.int32),
                counts=np.ones(num_sequences, np.int32),
                flags=np.full(num_sequences, WorkFlag.SAMPLES | WorkFlag.FROM_DEVICE, np.uint8),
            )
            running.append(self._engine.sample(None))
            if len(running) == 2 or number == num_steps - 1:
                parts.append(running.popleft().result().seconds.tolist())
                ends.append(time.perf_counter())
        while running:
            running.popleft().result()
        gaps = [later - earlier for earlier, later in zip(ends[_WARM:], ends[_WARM + 1 :], strict=False)]
        medians = map(statistics.median, zip(*parts[min(_WARM, len(parts) - 1) :], strict=True))
        return {"step": statistics.median(gaps or [0.0]), **dict(zip(_PARTS, medians, strict=True))}

    def prompt(self, num_tokens: int, length: int) -> float:
        """Seconds from a chunk of a prompt behind `length` cached positions to its token."""
        row = np.zeros(1, np.int32)
        self._give(row, length + num_tokens)
        ids = (np.arange(num_tokens) % 1000 + 1).astype(np.int32)
        began = time.perf_counter()
        columns = {"starts": [length], "counts": [num_tokens]}
        self._forward(
            rows=row,
            flags=np.array([WorkFlag.SAMPLES], np.uint8),
            token_ids=ids,
            **{name: np.array(value, np.int32) for name, value in columns.items()},
        )
        self._engine.sample(None).result()
        return time.perf_counter() - began

    def _forward(self, **columns: Any) -> None:
        self._step += 1
        self._engine.forward(StepPlan(step=np.array([self._step], np.int64), **columns))

    def _give(self, rows: Any, length: int) -> None:
        """New sequences, each with blocks of its own, of which none is computed."""
        each = -(-length // self._block_size)
        assert each * len(rows) <= self._num_blocks, "the cache is too small for the case"
        blocks = np.random.default_rng(0).permutation(self._num_blocks)[: each * len(rows)].astype(np.int32)
        numbers = {
            name: np.zeros(len(rows), np.int32)
            for name in ("choices", "top_ks", "num_logprobs", "num_prompt_logprobs", "min_lengths", "prompt_lengths")
        }
        reals = {"temperatures": 0.0, "top_ps": 1.0, "min_ps": 0.0, "repetition_penalties": 1.0}
        reals |= {"presence_penalties": 0.0, "frequency_penalties": 0.0}
        self._forward(
            new_rows=rows,
            request_ids=rows.astype(np.int64),
            row_flags=np.full(len(rows), RowFlag.GREEDY, np.uint32),
            seeds=np.zeros(len(rows), np.uint64),
            bias_counts=np.zeros(len(rows), np.int32),
            banned_counts=np.zeros(len(rows), np.int32),
            block_rows=rows,
            block_firsts=np.zeros(len(rows), np.int32),
            block_counts=np.full(len(rows), each, np.int32),
            block_ids=blocks,
            **numbers,
            **{name: np.full(len(rows), value, np.float32) for name, value in reals.items()},
        )
        self._engine.sample(None).result()


def kind_of(kernel: str) -> str:
    """What a kernel of that name does."""
    name = kernel.lower()
    return next((kind for kind, parts in _KINDS if any(part in name for part in parts)), "other")


def kernels_of(run: Any, num_steps: int) -> dict[str, Any]:
    """Device microseconds a step by kernel and by kind, the largest first, and the device's idle share between the
    first and the last. Those that start before the one ahead has ended count in full, so that kinds add up to more than
    the device is busy.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
    found = [event for event in profiler.events() if str(event.device_type).endswith("CUDA") and event.time_range.end]
    spans = sorted((event.time_range.start, event.time_range.end) for event in found)
    busy, reached = 0.0, 0.0
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    totals: dict[str, list[float]] = {}
    kinds: Counter[str] = Counter()
    for event in found:
        took_us = event.time_range.end - event.time_range.start
        took = totals.setdefault(event.name[:70], [0.0, 0])
        took[0] += took_us
        took[1] += 1
        kinds[kind_of(event.name)] += took_us
    ordered = sorted(totals.items(), key=lambda item: -item[1][0])[:_KERNELS_TOLD]
    return {
        "idle_share": 1 - busy / (spans[-1][1] - spans[0][0]) if spans else None,
        "busy_us_per_step": busy / num_steps,
        "kinds": {kind: round(us / num_steps, 2) for kind, us in kinds.most_common()},
        "kernels": [[name, round(us / num_steps, 2), round(count / num_steps, 1)] for name, (us, count) in ordered],
    }


def main() -> None:
    model, cache, plan, results = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4])

    def tell(**fields: Any) -> None:
        with results.open("a") as file:
            file.write(json.dumps(fields) + "\n")

    configuration = WorkerConfiguration(
        rank=0,
        num_ranks=1,
        generation=1,
        core_address="",
        run_directory=str(cache),
        cache_directory=str(cache),
        model=str(model),
        load_format="dummy",
        dtype=plan.get("dtype", "bfloat16"),
        **plan.get("options", {}),
    )
    began = time.monotonic()
    marks: dict[str, float] = {}

    def on_phase(name: str) -> None:
        marks[name] = round(time.monotonic() - began, 2)

    described = describe(configuration, print)
    engine = open_engine(configuration, described, print, on_phase)
    spending = engine.spending
    hello = WorkerHello(
        rank=0,
        generation=1,
        pid=0,
        profile=engine.profile,
        model=engine.model,
        memory=spending.memory if spending else None,
        spendable_bytes=spending.spendable_bytes if spending else None,
        kv_limit_bytes=spending.kv_limit_bytes if spending else None,
        strategy_misfits=strategy_misfits(described, engine.model),
    )
    core = CoreConfiguration(incarnation=1, generation=1, num_ranks=1, frontends_address="", workers_address="")
    settled = settle(core, [hello])
    facts = engine.load(settled, lambda name, fraction: on_phase(name))
    num_blocks = facts.kv_budget_bytes // facts.kv_bytes_per_block
    engine.allocate(num_blocks)
    on_phase("warm-up")
    engine.warm_up()
    on_phase("ready")
    chosen = {found.kernel: found.chosen for found in facts.resolutions}
    demoted = {found.kernel: found.demoted for found in facts.resolutions if found.demoted}
    tell(what="start", marks=marks, kernels=chosen, demoted=demoted, decisions=[str(d) for d in engine.decisions])
    steps = Steps(engine, settled.block_size, num_blocks)
    has_kernels = engine.profile.platform == "cuda"  # whose kernels torch's profiler can see
    for num_sequences, length in plan["decodes"]:
        times = steps.decode(num_sequences, length, _WARM + plan.get("num_timed", _TIMED))
        told: dict[str, Any] = {f"{name}_ms": round(value * 1e3, 4) for name, value in times.items()}
        if has_kernels:
            case = (num_sequences, length)
            told |= kernels_of(lambda case=case: steps.decode(*case, _PROFILED), _PROFILED)
        tell(what="decode", sequences=num_sequences, length=length, **told)
    for num_tokens, length in plan.get("prompts", ()):
        took = [steps.prompt(num_tokens, length) for _ in range(5)]
        told = {"ms": round(statistics.median(took[1:]) * 1e3, 3), "first_ms": round(took[0] * 1e3, 3)}
        if has_kernels:
            case = (num_tokens, length)
            told |= kernels_of(lambda case=case: steps.prompt(*case), 1)
        tell(what="prompt", tokens=num_tokens, length=length, **told)


if __name__ == "__main__":
    main()
