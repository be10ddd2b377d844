#!/usr/bin/env python3
"""Times whole decode steps of a model, from token ids to the next ones, under choices of launch configurations.

    python tools/tune_decodes.py m1 OUT --tokens 8,32 --try linear_dot_small.pdl=1 linear_dot_small.early=2
    python tools/tune_decodes.py m2 OUT --grid linear_dot_large.rows=32,64 linear_dot_large.num_stages=4,5

A variant is fields of `kernels/in_triton/configurations.py` with values, as `capability.best` of a capability file has
them: each argument of --try is one (fields joined by `+`), --grid makes one of every combination. Per number of tokens
all variants are recorded, then replayed in turns, so that a device which slows down slows all of them; the median of
the turns counts. Logits are compared with those of the first variant, which changes nothing. OUT/tuned.json holds all.
Random weights and cache; anything that cannot be recorded is run as it is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace as struct_replace

from trimaran.device_workers.boot import describe
from trimaran.device_workers.memory.kv_cache import KvCache, KvLayout
from trimaran.device_workers.models.config import ModelConfig
from trimaran.device_workers.models.decoder import (
    Activations,
    Decoder,
    DecoderKernels,
    DecoderWeights,
    StepTensors,
    WeightReader,
)
from trimaran.device_workers.models.facts import KERNELS, kernel_problem, make_facts
from trimaran.device_workers.models.fused_decode import FusedKernels
from trimaran.device_workers.models.sharding import Shard
from trimaran.device_workers.platforms.contract import Backend, Graph, NotSupported
from trimaran.device_workers.weights.dummy_source import DummySource
from trimaran.ipc.conditions import Refusal
from trimaran.ipc.configuration import WorkerConfiguration
from trimaran.ipc.facts import DeviceProfile, Problem
from trimaran.ipc.worker_messages import Settled
from trimaran.kernels.catalog import CATALOG
from trimaran.kernels.implementation import Services
from trimaran.kernels.in_triton import configurations
from trimaran.kernels.registry import Registry
from trimaran.kernels.trials import DTYPES
from trimaran.tools.device_bench.model_shapes import SHAPES, write_model

Variant = Mapping[str, Mapping[str, int]]
_DTYPE = "bfloat16"
_TURNS, _TURN_S = 5, 0.05
_CLOSE = 2e-2
"""Of the largest logit, by which those of two variants may differ: sums in another order, rounded to 16 bits."""


@dataclass(frozen=True)
class Bench:
    """A model on a device, apart from its kernels."""

    backend: Backend
    profile: DeviceProfile
    config: ModelConfig
    shard: Shard
    settled: Settled
    services: Services
    activations: Activations
    cache: KvCache
    weights: DecoderWeights | None = None

    @property
    def problem(self) -> Problem:
        model = make_facts(self.config, self.shard, dtype=_DTYPE, kv_dtype="auto", max_model_len=None)
        return kernel_problem(self.config, self.shard, model, self.settled)

    def step(self, variant: Variant, num_tokens: int, length: int) -> tuple[Callable[[], None], torch.Tensor]:
        """A decode of so many sequences behind `length` cached positions, and where its logits are."""
        registry, problem, profile = Registry(CATALOG), self.problem, under(self.profile, variant)
        loaded = {name: registry.load(name, profile, problem, self.services) for name in KERNELS}
        kernels = {name: kernel for name, (kernel, _) in loaded.items()}
        serves = {name for name, (_, found) in loaded.items() if found.chosen != registry.chain(name)[-1].name}
        fused = FusedKernels.__dataclass_fields__.keys()
        assert self.weights is not None
        decoder = Decoder(
            self.config,
            self.shard,
            self.weights,
            DecoderKernels(**{name: kernels[name] for name in DecoderKernels.__dataclass_fields__}),  # type: ignore[arg-type]
            self.activations,
            self.settled.max_model_len,
            None,
            self.backend.torch_device,
            FusedKernels(**{name: kernels[name] for name in fused}) if fused <= serves else None,
            kernels["decode_attention"] if "decode_attention" in serves else None,
        )
        inputs = self._inputs(num_tokens, length)
        logits = self.activations.logits_RV[:num_tokens]
        tokens = torch.empty(num_tokens, dtype=torch.int64, device=self.backend.torch_device)

        def run() -> None:
            residual, delta = decoder.forward(inputs, self.cache.layers, lambda: None)
            kernels["greedy_sample"](tokens, decoder.logits(residual, delta), self.config.vocab_size)

        return run, logits

    def _inputs(self, num_tokens: int, length: int) -> StepTensors:
        device, block_size = self.backend.torch_device, self.settled.block_size
        width = length // block_size + 1
        assert num_tokens * width <= self.cache.num_blocks, "the cache is too small for the case"
        numbers = torch.arange(num_tokens, dtype=torch.int32)
        blocks = torch.randperm(self.cache.num_blocks, generator=torch.Generator().manual_seed(0))
        tables = blocks[: num_tokens * width].view(num_tokens, width).int()
        slots = tables[:, length // block_size] * block_size + length % block_size
        inputs = {
            "token_ids": numbers,
            "last_tokens": torch.zeros(num_tokens, dtype=torch.int64),
            "positions": torch.full_like(numbers, length),
            "slots": slots,
            "block_tables": tables,
            "rows": numbers,
            "query_starts": torch.arange(num_tokens + 1, dtype=torch.int32),
            "kv_lengths": torch.full_like(numbers, length + 1),
        }
        return StepTensors(**{name: tensor.to(device) for name, tensor in inputs.items()}, is_decode=True)


def under(profile: DeviceProfile, variant: Variant) -> DeviceProfile:
    """The device as if that had been measured best on it. Raises ValueError for a field that there is not."""
    best = {**profile.capability.best, **variant}
    changed = struct_replace(profile, capability=struct_replace(profile.capability, best=best))
    for kernel in variant:
        if kernel not in configurations.KERNELS:
            raise ValueError(f"there is no configuration {kernel}; there are {', '.join(configurations.KERNELS)}")
        configurations.configuration(kernel, changed.capability)
    return changed


def open_bench(shape: str, folder: Path, *, max_tokens: int, length: int, platform: str | None) -> Bench:
    model = write_model(folder / "model", SHAPES[shape]) if shape in SHAPES else Path(shape)
    configuration = WorkerConfiguration(
        rank=0, num_ranks=1, generation=1, core_address="", run_directory=str(folder), cache_directory=str(folder),
        model=str(model), load_format="dummy", dtype=_DTYPE, platform=platform,
    )  # fmt: skip
    described = describe(configuration, print)
    assert described.platform is not None and described.config is not None and described.shard is not None
    profile, config, shard = described.profile, described.config, described.shard
    backend = described.platform.open(profile.index, num_threads=described.num_threads, cache_dir=folder, warn=print)
    block_size = 16 if profile.platform == "cpu" else 64
    settled = Settled(
        block_size=block_size, max_num_seqs=max_tokens, max_batched_tokens=max_tokens, max_model_len=length + 1
    )
    services = Services(
        num_threads=described.num_threads, cache_dir=folder, warn=print, device=str(backend.torch_device)
    )
    dtype, device = DTYPES[_DTYPE], backend.torch_device
    layout = KvLayout(
        num_layers=config.num_layers, num_kv_heads=shard.num_kv_heads, head_dim=config.head_dim,
        block_size=block_size, dtype=dtype,
    )  # fmt: skip
    cache = KvCache(layout, max_tokens * (length // block_size + 1), device)
    for keys, values in cache.layers:
        keys.normal_()
        values.normal_()
    activations = Activations(config, shard, max_tokens=max_tokens, max_rows=max_tokens, dtype=dtype, device=device)
    bench = Bench(backend, profile, config, shard, settled, services, activations, cache)
    linear: Any = Registry(CATALOG).load("linear", profile, bench.problem, services)[0]
    weights = WeightReader(config, shard, DummySource(0, dtype, device=device), linear, dtype, device).read()
    return replace(bench, weights=weights)


def measure(bench: Bench, variants: Mapping[str, Variant], num_tokens: int, length: int) -> Iterator[dict[str, Any]]:
    """Of each variant that works: its name, milliseconds of a step, and how far its logits are from the first one's."""
    ready: dict[str, Callable[[], None]] = {}
    off: dict[str, float] = {}
    expected: torch.Tensor | None = None
    for name, variant in variants.items():
        try:
            run, logits = bench.step(variant, num_tokens, length)
            run()
            bench.backend.synchronize()
            expected = logits.clone() if expected is None else expected
            off[name] = float((logits - expected).abs().max() / expected.abs().max())
            ready[name] = _recorded(bench.backend, run)
        except Exception as error:  # a choice that does not compile is an answer too
            yield {"variant": name, "tokens": num_tokens, "failed": f"{type(error).__name__}: {error}"[:300]}
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(_TURNS):
        for name, run in ready.items():
            times[name].append(_step_s(bench.backend, run))
    for name in ready:
        yield {
            "variant": name,
            "tokens": num_tokens,
            "ms": round(statistics.median(times[name]) * 1e3, 4),
            "off": round(off[name], 5),
            "is_close": off[name] <= _CLOSE,
        }


def _recorded(backend: Backend, run: Callable[[], None]) -> Callable[[], None]:
    try:
        graph = backend.capture_graph(run)
    except NotSupported:
        return run
    return partial(_replay, graph, run)


def _replay(graph: Graph, _recorded: Callable[[], None]) -> None:
    """A graph reads and writes the tensors of what was recorded; it does not keep them, this call does."""
    graph.replay(0, 0, None)


def _step_s(backend: Backend, run: Callable[[], None]) -> float:
    """Of one step among as many as fill a turn."""
    run()
    backend.synchronize()
    began = time.perf_counter()
    count = 0
    while time.perf_counter() - began < _TURN_S:
        for _ in range(4):
            run()
        backend.synchronize()
        count += 4
    return (time.perf_counter() - began) / count


def variants_of(tries: list[str], grid: list[str]) -> dict[str, Variant]:
    """By their text; the first one changes nothing. Raises SystemExit for what says no field."""
    texts = ["", *tries]
    if grid:
        axes = [[f"{place}={value}" for value in values.split(",")] for place, _, values in map(_halves, grid)]
        texts += ["+".join(choice) for choice in itertools.product(*axes)]
    return {text or "as it is": _variant(text) for text in dict.fromkeys(texts)}


def _halves(text: str) -> tuple[str, str, str]:
    place, equals, values = text.partition("=")
    if not equals or "." not in place:
        raise SystemExit(f"{text!r}: write KERNEL.FIELD=VALUE, as in linear_dot_small.rows=32")
    return place, equals, values


def _variant(text: str) -> Variant:
    chosen: dict[str, dict[str, int]] = {}
    for part in filter(None, text.split("+")):
        place, _, value = _halves(part)
        kernel, _, field = place.partition(".")
        chosen.setdefault(kernel, {})[field] = int(value)
    return chosen


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"{', '.join(SHAPES)} or a folder with a config.json")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", default="1,8,16,32", help="sequences of the steps (default: %(default)s)")
    parser.add_argument("--length", type=int, default=192, help="cached positions of each (default: %(default)s)")
    parser.add_argument("--try", nargs="*", default=[], dest="tries", metavar="KERNEL.FIELD=VALUE[+...]")
    parser.add_argument("--grid", nargs="*", default=[], metavar="KERNEL.FIELD=VALUE,...")
    parser.add_argument("--platform")
    asked = parser.parse_args(arguments)
    counts = [int(count) if count.isdigit() else 0 for count in asked.tokens.split(",")]
    if not all(counts):
        parser.error(f"--tokens {asked.tokens}: give numbers of sequences with commas between, as in 8,32")
    variants = variants_of(asked.tries, asked.grid)
    asked.out.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tune-") as folder, torch.inference_mode():
        try:
            bench = open_bench(
                asked.model, Path(folder), max_tokens=max(counts), length=asked.length, platform=asked.platform
            )
        except Refusal as refusal:
            parser.error(str(refusal))
        try:
            for variant in variants.values():
                under(bench.profile, variant)
        except ValueError as error:
            raise SystemExit(f"{error}; see kernels/in_triton/configurations.py") from None
        for count in counts:
            results = sorted(measure(bench, variants, count, asked.length), key=lambda each: each.get("ms", 1e9))
            found += results
            for each in results:
                print(json.dumps(each), flush=True)
            (asked.out / "tuned.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(each.get("is_close", True) for each in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
