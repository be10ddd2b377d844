"""The group `profile`: where a step's time goes. Part by part on the host, kernel by kernel on the device, what each
kind of kernel reaches of what the device was measured to do, and how much of a step as clients see it the device is
busy.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from trimaran.tools.device_bench import offline, step_profile_child
from trimaran.tools.device_bench.bench import Bench
from trimaran.tools.device_bench.children import Child, PartFailed, output_of
from trimaran.tools.device_bench.model_shapes import Work, work_of


@dataclass(frozen=True)
class Plan:
    """`decodes`: sequences and cached positions of each; `prompts`: tokens and cached positions before them. `options`
    are the worker's.
    """

    decodes: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[int, int], ...]
    num_timed: int = 200
    options: dict[str, str] | None = None


PLANS = {
    "m1": Plan(((1, 192), (32, 192), (64, 192), (256, 192), (256, 640)), ((128, 0), (8192, 0), (2048, 4096))),
    "m2": Plan(((1, 192), (32, 192), (256, 192), (256, 640)), ((128, 0), (4096, 0), (16384, 0))),
}
QUICK = Plan(((1, 16), (3, 16)), ((8, 0), (8, 16)), num_timed=3)
SEEN = offline.Plan(throughput=None, streams=((1, 128, 128, 4), (64, 128, 128, 3)), runs=0)
"""Streams whose time between tokens is held against the device's."""
_QUICK_SEEN = offline.Plan(throughput=None, streams=((1, 16, 8, 2),), runs=0)
_CORE_SIZES = (1, 64, 256)
_LIMIT_S = 200.0


def run(bench: Bench) -> None:
    """Figures of ours alone: a peer's steps have other parts."""
    found = bench.figures.setdefault("trimaran", {})
    bench.part("ceilings", partial(_measure_ceilings, bench, found))
    bench.part("core", partial(_measure_core, bench, found))
    for shape, plan in PLANS.items():
        chosen = QUICK if bench.is_quick else plan
        bench.part(f"steps of {shape}", partial(_measure_steps, bench, found, shape, chosen), needs_s=30.0)
    bench.part("steps as seen", partial(_measure_seen, bench, found), needs_s=30.0)


def _measure_ceilings(bench: Bench, found: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        file = Path(folder) / "measured.yaml"
        platform = ["--platform", bench.platform] if bench.platform else []
        tests = ["--test", "bandwidth", "--test", "matrix"]
        command = ["-m", "trimaran.frontend.launch.commands", "diagnose", *tests, "--output", str(file), *platform]
        _, errors = output_of([sys.executable, "-P", *command], min(_LIMIT_S, bench.left_s))
        if not file.is_file():
            raise PartFailed(f"diagnose wrote nothing\n{errors[-1000:]}")
        found["ceilings"] = ceilings(yaml.safe_load(file.read_text()))


def ceilings(measured: dict[str, Any]) -> dict[str, float]:
    """Of a measured capability file: bytes of a copy, read and written, and operations of bfloat16 products."""
    return {
        "copy_gb_s": measured["bandwidth"]["value"],
        "matrix_tflop_s": measured["rates"]["bfloat16"]["value"],
    }


def _measure_core(bench: Bench, found: dict[str, Any]) -> None:
    sizes = ",".join(map(str, _CORE_SIZES))
    command = [sys.executable, "-P", "-m", "trimaran.engine_core.bench", "--sequences", sizes, "--steps", "200"]
    output, errors = output_of(command, min(_LIMIT_S, bench.left_s))
    try:
        told = json.loads(output)
    except ValueError:
        raise PartFailed(f"the core's benchmark told nothing\n{errors[-1000:]}") from None
    found["core"] = {str(cost["num_running"]): cost for cost in told["step_cost"]}
    found["round_trip_us"] = told["round_trip_us"]


def _measure_steps(bench: Bench, found: dict[str, Any], shape: str, plan: Plan) -> None:
    model = bench.folder(shape)
    options = {"platform": bench.platform} if bench.platform else {}
    told = json.dumps(asdict(replace(plan, options=options)))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        results = Path(folder) / "results.jsonl"
        script = Path(step_profile_child.__file__).resolve()
        engine = bench.engines()[0]
        caches = bench.models.absolute() / "caches"
        caches.mkdir(parents=True, exist_ok=True)
        command = [*engine.python, str(script), str(model), str(caches), told, str(results)]
        child = Child(command, engine.environment, bench.log(engine), engine.folder)
        try:
            child.wait(min(_LIMIT_S, bench.left_s))
        finally:
            child.end(patience_s=0)
            lines = results.read_text().splitlines() if results.is_file() else []
            work = work_of(json.loads((model / "config.json").read_text()))
            found[shape] = cases([json.loads(line) for line in lines], work)


def cases(results: list[dict[str, Any]], work: Work) -> dict[str, Any]:
    """What the child told, by case, with what linears and attention reach."""
    found: dict[str, Any] = {"decodes": {}, "prompts": {}}
    for result in results:
        kinds = result.get("kinds", {})
        if result["what"] == "decode":
            count, length = result["sequences"], result["length"]
            reached = {
                "linear_gb_s": _rate(work.weight_bytes, kinds.get("linear"), 1e3),
                "attention_gb_s": _rate(work.cache_bytes(count, length), kinds.get("attention"), 1e3),
            }
            found["decodes"][f"{count} x {length}"] = {**result, **reached}
        elif result["what"] == "prompt":
            tokens, length = result["tokens"], result["length"]
            reached = {
                "linear_tflop_s": _rate(work.linear_operations(tokens), kinds.get("linear"), 1e6),
                "attention_tflop_s": _rate(work.attention_operations(tokens, length), kinds.get("attention"), 1e6),
            }
            found["prompts"][f"{tokens} behind {length}"] = {**result, **reached}
        else:
            found[result["what"]] = result
    return found


def _rate(amount: float, took_us: float | None, unit: float) -> float | None:
    """Amount per microsecond, in thousands (of bytes: GB/s) or millions (of operations: TFLOP/s)."""
    return round(amount / took_us / unit, 1) if took_us else None


def _measure_seen(bench: Bench, found: dict[str, Any]) -> None:
    """Needs the steps of the small model, whose device time is held against what streams see."""
    plan = _QUICK_SEEN if bench.is_quick else SEEN
    results: list[dict[str, Any]] = []
    offline.measure(bench, bench.engines()[0], "m1", plan, results)
    seen = offline.figures(results).get("batch", {})
    found["seen"] = {size: shares(found, size, times["itl_ms_median"]) for size, times in seen.items()}


def shares(found: dict[str, Any], size: str, itl_ms: float) -> dict[str, Any]:
    """Of a step as streams of this batch see it: the device's share that is idle, and the core's time."""
    decodes = found.get("m1", {}).get("decodes", {})
    case = next((case for name, case in decodes.items() if name.split(" x ")[0] == size), {})
    busy_us = case.get("busy_us_per_step")
    core = found.get("core", {}).get(size, {})
    return {
        "itl_ms": itl_ms,
        "device_ms": round(busy_us / 1e3, 4) if busy_us else None,
        "idle_share": round(1 - busy_us / 1e3 / itl_ms, 3) if busy_us else None,
        "build_ms": case.get("build_ms"),
        "core_ms": core.get("total_ms"),
    }
