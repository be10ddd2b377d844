"""The group `startup`: process start to first token of the small model, with cold caches and with those that the start
before left. What the operating system has read stays in memory: the first start of a machine reads more from disk.
"""

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from trimaran.tools.device_bench.bench import Bench
from trimaran.tools.device_bench.engines import Engine
from trimaran.tools.device_bench.model_shapes import prompt_ids
from trimaran.tools.device_bench.samples import median
from trimaran.tools.device_bench.server import Server

REPETITIONS = 2
_NEEDS_S = {("trimaran", "cold"): 30, ("trimaran", "warm"): 20, ("vllm", "cold"): 100, ("vllm", "warm"): 60}


def run(bench: Bench) -> None:
    for number, engine in enumerate(bench.engines()):
        for repetition in range(1 if bench.is_quick else REPETITIONS):
            caches = Path(tempfile.mkdtemp(prefix="bench-caches-"))
            for kind in ("cold", "warm"):
                bench.part(
                    f"{engine.name} {kind} {repetition + 1}",
                    partial(_start, bench, engine, kind, caches, bench.port + number),
                    needs_s=0 if bench.is_quick else _NEEDS_S[engine.name, kind],
                )
            shutil.rmtree(caches, ignore_errors=True)


def _start(bench: Bench, engine: Engine, kind: str, caches: Path, port: int) -> None:
    """A warm start that follows a cold one that failed is not warm, and fails too."""
    if kind == "warm" and not any(caches.iterdir()):
        raise RuntimeError("the cold start left no caches")
    model = bench.folder("m1")
    first_id, _ = prompt_ids(model)
    start: dict[str, Any] = {}
    with Server(engine, model, port, bench.log(engine), engine.with_caches(caches)) as server:
        limit_s = min(engine.start_limit_s, bench.left_s)
        start["ready_s"] = round(server.wait_ready(limit_s), 2)
        start["first_token_s"] = round(server.first_token_s(range(first_id, first_id + 8), max(5.0, limit_s)), 2)
        if engine.name == "trimaran":
            start["phases"] = phases(server.info().get("phases") or [], server.child.began_s)
    _keep(bench.of(engine).setdefault(kind, {"starts": []}), start)


def _keep(figures: dict[str, Any], start: dict[str, Any]) -> None:
    figures["starts"].append(start)
    for name in ("ready_s", "first_token_s"):
        figures[name] = round(median([one[name] for one in figures["starts"]]), 2)


def phases(told: list[dict[str, Any]], began_s: float) -> list[dict[str, Any]]:
    """Those that ended, in the order of their beginning since the process's start (both on the monotonic clock)."""
    ended = [phase for phase in told if phase.get("took_s") is not None]
    return [
        {"phase": f"{phase['process']}: {phase['name']}", "began_s": round(phase["began_s"] - began_s, 2),
         "took_s": round(phase["took_s"], 2)}
        for phase in sorted(ended, key=lambda phase: phase["began_s"])
    ]  # fmt: skip
