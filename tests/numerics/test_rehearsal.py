"""What steps launch was all rehearsed: a mixed workload asks for no code that was not asked for at the start.

The device here is the processor under the name of an NVIDIA one; nothing is launched, and Triton's own specialisation
of a launch's arguments says which code it would take. On a real device: tests/gpu/test_start.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace as dataclass_replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from trimaran.device_workers import boot
from trimaran.device_workers.execution.rehearsal import step_sizes
from trimaran.device_workers.execution.tensor_engine import TensorEngine
from trimaran.device_workers.profiles.settling import declare_profile
from trimaran.ipc.facts import Feature
from trimaran.kernels.catalog import CATALOG
from trimaran.kernels.compilations import is_rehearsing
from trimaran.kernels.in_triton.launching import TritonKernel, code_of
from trimaran.kernels.registry import Registry

from ..mixed_work import work
from ..step_driver import SETTLED, Row, StepDriver, make_configuration
from ..tiny_models import save, variants

BUCKETS = (1, 2, 4, 8, 16, 24)


@functools.cache
def binder(kernel: Any) -> Callable[..., Any]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(kernel.signature, kernel.params, backend)  # type: ignore[no-any-return]


class Launches:
    """Stands in for a device: notes the code that each launch would take, and gives token 0 where one is chosen."""

    def __init__(self) -> None:
        self.rehearsed: set[tuple[str, str]] = set()
        self.served: set[tuple[str, str]] = set()
        self._codes: dict[Hashable, tuple[str, str]] = {}

    def __call__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        _, specialisation, options = binder(kernel)(*arguments, **constants)
        code = (kernel.__name__, f"{specialisation} {sorted(options.items())}")
        alike = self._codes.setdefault(code_of(kernel, arguments, constants), code)
        assert alike == code, "a rehearsal would not ask for the second of these"
        if is_rehearsing():
            self.rehearsed.add(code)
            return
        self.served.add(code)
        if kernel.__name__ == "greedy_choice_kernel":
            arguments[0].zero_()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    noted = Launches()
    monkeypatch.setattr(TritonKernel, "launch", staticmethod(noted))
    yield noted


class Recording:
    num_launches = None

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def replay(self, num_tokens: int, num_sequences: int, progress: object) -> None:
        self._run()


def engine_on(profile_name: str, model: Path, cache: Path, *, records: bool, **options: Any) -> TensorEngine:
    configuration = make_configuration(model, cache, dtype="bfloat16", platform="cpu", **options)
    described = boot.describe(configuration, lambda text: None)
    declared, _ = declare_profile(profile_name)
    features = declared.capability.features | {Feature.TRITON}
    profile = replace(declared, capability=replace(declared.capability, features=features))
    described = dataclass_replace(described, profile=profile, registry=Registry(CATALOG))
    engine = boot.open_engine(configuration, described, lambda text: None, lambda name: None)
    assert isinstance(engine, TensorEngine)
    engine._kernels.prepare = lambda *arguments: None  # type: ignore[method-assign]  # as after an earlier start
    if records:
        backend: Any = engine._parts.backend
        backend.graphs_take_any_size, backend.capture_graph = False, Recording
    engine.load(replace(SETTLED, graph_buckets=BUCKETS), lambda name, fraction: None)
    if records:
        engine._graphs._gain = lambda size, graph: 1.2 if size.num_tokens <= 64 else 1.0  # type: ignore[method-assign]
    engine.allocate(300)
    engine.warm_up()
    return engine


@pytest.mark.parametrize("variant", ["qwen3", "llama"])
@pytest.mark.parametrize("records", [True, False], ids=["recorded", "eager"])
def test_steps_launch_what_was_rehearsed(variant: str, records: bool, launches: Launches, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save(variants()[variant], model)
    engine = engine_on("hopper", model, tmp_path, records=records, enforce_eager=not records)
    names = {resolution.chosen for resolution in engine._kernels.resolutions}
    assert {"triton_decode_attention", "triton_linear", "triton_sample"} <= names
    launches.served.clear()
    work(engine)
    assert len(launches.served) > 20
    assert launches.served <= launches.rehearsed, "\n".join(map(str, sorted(launches.served - launches.rehearsed)))
    assert len(launches.rehearsed) < 200


def test_launches_that_take_other_code_are_told_apart() -> None:
    """By what Triton specialises on: addresses and numbers that 16 divides, the number 1, wide numbers, dtypes."""
    from trimaran.kernels.in_triton.norms import rms_norm_kernel

    row = torch.zeros(64)
    tensors = (row, row[1:], row[4:], row.half(), row.half()[8:])
    numbers = (1, 17, 16, 32, 3, 1 << 31, (1 << 31) + 16, 1 << 62)
    constants = {"ADDS": False, "BLOCK": 16, "ONE_BLOCK": True, "PDL": False}
    calls = [(x, row, row, row, 1e-6, number, 48, 48, 48) for x in tensors for number in numbers]
    codes: dict[Hashable, set[str]] = {}
    for arguments in calls:
        _, specialisation, _ = binder(rms_norm_kernel)(*arguments, **constants)
        codes.setdefault(code_of(rms_norm_kernel, arguments, constants), set()).add(str(specialisation))
    assert all(len(found) == 1 for found in codes.values())
    distinct = set().union(*codes.values())
    assert len(codes) < len(calls) and len(distinct) > len(numbers)
    other = {**constants, "PDL": True}
    assert code_of(rms_norm_kernel, calls[0], other) != code_of(rms_norm_kernel, calls[0], constants)


def test_a_rehearsal_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    """Nothing to compile on a processor, but it may be rehearsed as well."""
    save(variants()["qwen3"], tmp_path / "model")
    configuration = make_configuration(tmp_path / "model", tmp_path, dtype="float32", platform="cpu")
    described = boot.describe(configuration, lambda text: None)
    engine = boot.open_engine(configuration, described, lambda text: None, lambda name: None)
    assert isinstance(engine, TensorEngine)
    engine.load(SETTLED, lambda name, fraction: None)
    engine.allocate(100)
    engine.warm_up()

    def tokens() -> list[int]:
        row = Row(row=0, tokens=[5, 6, 7])
        StepDriver(engine, num_blocks=100).generate([row], 6)
        engine.drop_rows()
        return row.tokens

    before = tokens()
    with torch.inference_mode():
        engine._rehearse()
    assert tokens() == before


def test_sizes_stand_for_all() -> None:
    sizes = step_sizes(replace(SETTLED, graph_buckets=BUCKETS), 48)
    assert {(1, 1), (17, 17), (48, 48), (24, 24), (2, 1), (17, 1), (96, 48)} <= set(map(tuple, sizes))
    assert all(1 <= size.num_sequences <= 48 and size.num_tokens <= SETTLED.max_batched_tokens for size in sizes)
    assert len(np.unique(sizes, axis=0)) == len(sizes)
