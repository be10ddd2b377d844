"""`trimaran bench serve`: measures a running server through its HTTP API."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from ...ipc.conditions import Refusal
from .load import Load
from .report import summarize, table
from .stream_client import Outcome
from .workload import Workload, make_asks


class BenchServe(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `base_url` like http://127.0.0.1:8000; a model of None takes the server's own."""

    base_url: str = "http://127.0.0.1:8000"
    model: str | None = None
    workload: Workload = Workload()
    request_rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_processes: int = 1
    api_key: str | None = None
    temperature: float = 0.0
    timeout_s: float = 600.0
    result_file: str | None = None


def bench_serve(bench: BenchServe) -> dict[str, Any]:
    """Run it, print the table, write the JSON report where asked. Raises Refusal when the server does not answer."""
    headers = {"Authorization": f"Bearer {bench.api_key}"} if bench.api_key else {}
    url = urlsplit(bench.base_url)
    if url.scheme != "http":
        raise Refusal(f"{bench.base_url}: the benchmark speaks plain HTTP only; give an address with http://")
    if bench.result_file and not Path(bench.result_file).absolute().parent.is_dir():
        raise Refusal(f"{bench.result_file} cannot be written: its folder does not exist; make it, or name another")
    model = bench.model or _get(bench, "/v1/models", headers)["data"][0]["id"]
    limits = _get(bench, "/v1/server_info", headers).get("limits") or {}
    workload = replace(bench.workload, vocab_size=int(limits.get("vocab_size", bench.workload.vocab_size)))
    asks = make_asks(workload)
    share = max(1, bench.num_processes)
    load = Load(
        host=url.hostname or "127.0.0.1",
        port=url.port or 80,
        model=model,
        asks=[],
        request_rate=bench.request_rate / share if bench.request_rate else None,
        burstiness=bench.burstiness,
        max_concurrency=-(-bench.max_concurrency // share) if bench.max_concurrency else None,
        headers=headers,
        temperature=bench.temperature,
        timeout_s=bench.timeout_s,
    )
    outcomes, duration_s = _spread([replace(load, asks=asks[index::share], seed=index) for index in range(share)])
    about = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai",
        "endpoint_type": "openai",
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(asks),
        "request_rate": bench.request_rate or "inf",
        "burstiness": bench.burstiness,
        "max_concurrency": bench.max_concurrency,
    }
    report = summarize(outcomes, duration_s, about)
    print(table(report))
    if bench.result_file:
        Path(bench.result_file).write_text(json.dumps(report, indent=2))
    return report


def _spread(loads: list[Load]) -> tuple[list[Outcome], float]:
    """Run the loads side by side; all outcomes, and the time from the first request to the last answer."""
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "trimaran.frontend.bench.load"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in loads
    ]
    for child, load in zip(children, loads, strict=True):
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(load))
        child.stdin.close()
    outcomes: list[Outcome] = []
    for child in children:
        assert child.stdout is not None
        outcomes += msgspec.msgpack.decode(child.stdout.read(), type=list[Outcome])
        child.wait()
    started = [outcome.started_s for outcome in outcomes if outcome.started_s]
    ended = [outcome.started_s + outcome.latency_s for outcome in outcomes if outcome.started_s]
    return outcomes, max(max(ended, default=0.0) - min(started, default=0.0), 1e-9)


def _get(bench: BenchServe, path: str, headers: dict[str, str]) -> dict[str, Any]:
    request = urllib.request.Request(bench.base_url.rstrip("/") + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        raise Refusal(f"{bench.base_url}{path} answered {error.code}: {error.read()[:300].decode()}") from None
    except OSError as error:
        raise Refusal(f"no server answers at {bench.base_url} ({error}); start one with `trimaran serve`") from None
