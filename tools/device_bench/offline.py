"""The group `offline`: throughput and token times through the offline APIs, in a process per engine and model."""

import json
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trimaran.tools.device_bench import offline_child
from trimaran.tools.device_bench.bench import Bench
from trimaran.tools.device_bench.children import Child
from trimaran.tools.device_bench.engines import Engine
from trimaran.tools.device_bench.model_shapes import prompt_ids
from trimaran.tools.device_bench.samples import in_ms, median, percentile


@dataclass(frozen=True)
class Plan:
    """`throughput`: requests, prompt tokens, output tokens, `runs` times after one that does not count; None: none.

    `streams`: batch size, prompt tokens, output tokens, repetitions, of which the first does not count. `ids` bounds
    the prompts' tokens; `options` are the engine's.
    """

    throughput: tuple[int, int, int] | None
    streams: tuple[tuple[int, int, int, int], ...]
    runs: int = 3
    ids: tuple[int, int] = (1000, 120_000)
    options: dict[str, str] | None = None


BATCHES = ((1, 128, 128, 6), (32, 128, 128, 4), (256, 128, 128, 2))
LONG_PROMPTS = ((1, 16384, 1, 6), (1, 4096, 1, 6))
PLANS = {"m1": Plan((256, 512, 256), BATCHES), "m2": Plan((256, 512, 256), BATCHES + LONG_PROMPTS)}
QUICK = Plan((4, 16, 8), ((1, 16, 8, 2), (4, 16, 8, 2), (1, 64, 1, 2)), runs=1)
_LIMITS_S = {"trimaran": 200.0, "vllm": 270.0}
_NEEDS_S = {"trimaran": 30.0, "vllm": 100.0}


def run(bench: Bench) -> None:
    for engine in bench.engines():
        for shape, plan in PLANS.items():
            chosen = QUICK if bench.is_quick else plan
            bench.part(
                f"{engine.name} {shape}",
                partial(_measure, bench, engine, shape, chosen),
                needs_s=0 if bench.is_quick else _NEEDS_S[engine.name],
            )


def _measure(bench: Bench, engine: Engine, shape: str, plan: Plan) -> None:
    results: list[dict[str, Any]] = []
    try:
        measure(bench, engine, shape, plan, results)
    finally:
        bench.of(engine)[shape] = figures(results)


def measure(bench: Bench, engine: Engine, shape: str, plan: Plan, results: list[dict[str, Any]]) -> None:
    """What the child tells goes into `results`, also when it fails half-way. Raises PartFailed."""
    model = bench.folder(shape)
    options = {"platform": bench.platform} if bench.platform else {}
    told = json.dumps(asdict(replace(plan, ids=prompt_ids(model), options=options)))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        file = Path(folder) / "results.jsonl"
        script = Path(offline_child.__file__).resolve()
        command = [*engine.python, str(script), engine.name, str(model), told, str(file)]
        child = Child(command, engine.environment, bench.log(engine), engine.folder)
        try:
            child.wait(min(_LIMITS_S[engine.name], bench.left_s))
        finally:
            child.end(patience_s=0)
            results += [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def figures(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What the child measured, by test: `throughput`, `batch` by size, `prompt` by length."""
    found: dict[str, Any] = {}
    runs = [result for result in results if result["test"] == "throughput"]
    if runs:
        rates = [round(run["tokens"] / run["s"], 1) for run in runs]
        totals = [round((run["tokens"] + run["prompt_tokens"]) / run["s"], 1) for run in runs]
        found["throughput"] = {"out_tok_s": median(rates), "total_tok_s": median(totals), "runs": rates}
    for result in results:
        if result["test"] == "start":
            found["first_output_s"] = result["first_output_s"]
        elif result["test"] == "times":
            one_token = result["output"] == 1
            place = found.setdefault("prompt" if one_token else "batch", {})
            place[str(result["prompt"] if one_token else result["size"])] = _times(result)
    return found


def _times(result: dict[str, Any]) -> dict[str, Any]:
    first, gaps = ([value / 1e6 for value in result[name]] for name in ("first_us", "gaps_us"))
    found = {
        "ttft_ms_median": in_ms(percentile(first, 0.5)),
        "ttft_ms_max": in_ms(max(first)),
        "prompt_tokens": result["prompt"],
        "output_tokens": result["output"],
    }
    if gaps:
        found["itl_ms_median"] = in_ms(percentile(gaps, 0.5))
        found["itl_ms_p99"] = in_ms(percentile(gaps, 0.99))
    return found
