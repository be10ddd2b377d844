#!/usr/bin/env python3
"""Measures Trimaran on a machine with a GPU, and vLLM beside it through the same clients where it is there.

    python tools/bench_device.py GROUP OUT [--peer FOLDER] [--port N] [--models FOLDER] [--record FILE]
    python tools/bench_device.py render RECORD PAGE

offline: throughput, time to first token and between tokens through the offline API. http-m1, http-m2: `serve` under 1
to 512 streaming clients. startup: process start to first token, with cold and warm caches. profile: where a step's time
goes, on host and device, and what kernels reach of the device's own measured rates. Each takes less than nine minutes
(--limit), starts included; what no time is left for is left out and said so. M1 has the shape of Qwen3-0.6B, M2 that of
Llama-3.1-8B; both are written to --models (configuration and synthetic tokenizer), with dummy weights.

With `trimaran` importable, nothing has to be installed. --peer names the folder that holds the package vllm
(`pip install --target`). OUT receives one log for each engine; the figures go into --record, or OUT/figures.json, where
they replace those of this group and leave the others; `render` makes the page of such a record. The commit is read from
the clone, or given by --commit where the tree is none.

A part that fails prints the end of its log, the others go on, and the exit code is 1. --quick, --platform and --model
try the tool itself, on any machine. Their figures get no verdict, nor do those of another device than the H200.
"""

import argparse
import datetime
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trimaran import __version__
from trimaran.tools.device_bench import (
    engines,
    machine,
    offline,
    page,
    profiling,
    record,
    requirements,
    serving,
    startup,
)
from trimaran.tools.device_bench.bench import Bench

GROUPS: Mapping[str, Callable[[Bench], None]] = {
    "offline": offline.run,
    "http-m1": partial(serving.run, shape="m1"),
    "http-m2": partial(serving.run, shape="m2"),
    "startup": startup.run,
    "profile": profiling.run,
}
_LIMIT_S = 530.0


def measure(asked: argparse.Namespace, out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    file = asked.record or out / "figures.json"
    about = _about(asked)
    bench = Bench(
        group=asked.what,
        out=out.absolute(),
        port=asked.port,
        models=asked.models,
        peer=asked.peer,
        platform=asked.platform,
        model=asked.model,
        is_quick=asked.quick,
        limit_s=asked.limit,
        keep=lambda bench: _keep(file, bench, about),
    )
    GROUPS[asked.what](bench)
    found = _keep(file, bench, about)
    print(f"\n{page.summary(found, bench.group)}")
    for failure in bench.failed:
        print(f"FAILED {failure[:300]}")
    return int(bool(bench.failed))


def _about(asked: argparse.Namespace) -> dict[str, Any]:
    """What stays the same during the run."""
    host = machine.host()
    own = {"trimaran": __version__, "commit": asked.commit or machine.commit()}
    return {
        "command": shlex.join(["python", "tools/bench_device.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "versions": own | machine.versions(asked.peer),
        "host": host,
        "is_comparable": _is_comparable(asked, host),
    }


def _is_comparable(asked: argparse.Namespace, host: Mapping[str, Any]) -> bool:
    """What is asked for is asked for of one device, and of the whole group."""
    return requirements.DEVICE in "".join(host["gpus"]) and not (asked.quick or asked.platform or asked.model)


def _keep(file: Path, bench: Bench, about: Mapping[str, Any]) -> record.Record:
    entry = {"figures": bench.figures, **about, "notes": bench.notes, "failed": bench.failed}
    return record.merge(file, bench.group, entry)


def render(source: Path, target: Path) -> int:
    found = record.read(source)
    if not found:
        raise SystemExit(f"{source}: no figures there; measure a group first")
    target.write_text(page.render(found))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*GROUPS, "render"])
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="OUT, or RECORD PAGE")
    parser.add_argument("--peer", type=Path, help="folder that holds the package vllm")
    parser.add_argument("--port", type=int, default=8765, help="ours; the peer takes the next")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "trimaran-bench-models")
    parser.add_argument("--record", type=Path, help="file that the figures are merged into")
    parser.add_argument("--commit", help="of the measured tree, where it is no clone")
    parser.add_argument("--limit", type=float, default=_LIMIT_S, help="seconds for the whole group")
    parser.add_argument("--quick", action="store_true", help="few requests, to try the tool")
    parser.add_argument("--platform", help="as for `trimaran serve`")
    parser.add_argument("--model", type=Path, help="a folder to measure in the place of M1 and M2")
    asked = parser.parse_args()
    if len(asked.paths) != (2 if asked.what == "render" else 1):
        parser.error("give GROUP OUT, or render RECORD PAGE")
    if asked.what == "render":
        return render(*asked.paths)
    if asked.peer is not None:
        asked.peer = engines.packages_of(asked.peer)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that children end with us
    return measure(asked, asked.paths[0])


if __name__ == "__main__":
    sys.exit(main())
