"""The groups `http-m1` and `http-m2`: both engines' servers under the same closed-loop clients."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from trimaran.tools.device_bench.bench import Bench
from trimaran.tools.device_bench.children import PartFailed, output_of
from trimaran.tools.device_bench.engines import MODEL_NAME, Engine
from trimaran.tools.device_bench.model_shapes import prompt_ids
from trimaran.tools.device_bench.samples import median
from trimaran.tools.device_bench.server import Server

CLIENT = "trimaran.tools.device_bench.http_client"
_LOAD_LIMIT_S = 100.0


class Load(NamedTuple):
    """`times` runs of so many clients that ask in turn, until the requests are used up."""

    clients: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    times: int = 1


WARM_UP = (Load(16, 64, 512, 32), Load(256, 512, 512, 32))
LOADS = {
    "m1": (Load(1, 12, 128, 128), Load(64, 512, 512, 128, 2), Load(256, 1024, 512, 128, 2), Load(512, 1024, 512, 128)),
    "m2": (Load(1, 12, 128, 128), Load(64, 512, 512, 128, 2), Load(256, 1024, 512, 128, 2)),
}
QUICK_WARM_UP = (Load(4, 8, 16, 4),)
QUICK = (Load(1, 2, 16, 8), Load(64, 64, 16, 8, 2))
COMPARED = ("out_tok_s", "ttft_ms_median", "itl_ms_median", "tpot_ms_median")


def run(bench: Bench, shape: str) -> None:
    for number, engine in enumerate(bench.engines()):
        bench.part(
            f"{engine.name} server",
            partial(_serve, bench, engine, shape, bench.port + number),
            needs_s=0 if bench.is_quick else 60 + 60 * number,
        )
    bench.figures["ratio"] = ratios(bench.figures)


def _serve(bench: Bench, engine: Engine, shape: str, port: int) -> None:
    model, kept = bench.folder(shape), bench.of(engine)
    with Server(engine, model, port, bench.log(engine)) as server:
        kept["ready_s"] = round(server.wait_ready(min(engine.start_limit_s, bench.left_s)), 2)
        bench.part(f"{engine.name} warm-up", partial(_warm_up, bench, server, model))
        kept["loads"] = {}
        for load in QUICK if bench.is_quick else LOADS[shape]:
            bench.part(
                f"{engine.name} {load.clients} clients",
                partial(_measure, bench, server, model, load),
            )


def _warm_up(bench: Bench, server: Server, model: Path) -> None:
    for load in QUICK_WARM_UP if bench.is_quick else WARM_UP:
        _drive(bench, server, model, load)


def _measure(bench: Bench, server: Server, model: Path, load: Load) -> None:
    runs: list[dict[str, Any]] = []
    try:
        runs.extend(_drive(bench, server, model, load) for _ in range(load.times))
    finally:
        if runs:
            medians = {name: median([run[name] for run in runs]) for name in COMPARED if runs[0].get(name) is not None}
            bench.of(server.engine)["loads"][str(load.clients)] = {**medians, "runs": runs}


def _drive(bench: Bench, server: Server, model: Path, load: Load) -> dict[str, Any]:
    """One run of the clients. Raises PartFailed where an answer was bad."""
    server.child.check_lives()
    ids = [str(id) for id in prompt_ids(model)]
    asked = [str(number) for number in (load.clients, load.requests, load.prompt_tokens, load.output_tokens)]
    command = [sys.executable, "-P", "-m", CLIENT, str(server.port), MODEL_NAME, *asked, "--ids", *ids]
    said, complaints = output_of(command, min(_LOAD_LIMIT_S, bench.left_s))
    server.child.check_lives()
    try:
        found: dict[str, Any] = json.loads(said)
    except ValueError:
        raise PartFailed(f"the client told no figures: {complaints[-500:]}") from None
    if found["num_bad"] or not found["requests"]:
        raise PartFailed(f"{found['num_bad']} bad answers, the first: {found['first_bad']}")
    return found


def ratios(figures: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Ours by the peer's, at each number of clients that both were measured with."""
    ours, theirs = (figures.get(name, {}).get("loads", {}) for name in ("trimaran", "vllm"))
    return {
        clients: {
            name: round(ours[clients][name] / theirs[clients][name], 3)
            for name in COMPARED
            if ours[clients].get(name) and theirs[clients].get(name)
        }
        for clients in ours
        if clients in theirs
    }
