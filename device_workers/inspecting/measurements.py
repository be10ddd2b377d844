"""The tests of `diagnose`: bandwidth, matrix rates, launches, graphs, streams, copies, thread blocks, kernels.

Imports torch: only a worker that has opened its device comes here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from ...ipc.facts import Feature, Problem
from ..platforms.contract import Clause, MemoryKind, NotSupported
from ..platforms.host import usable_cores
from ..streams.contract import Stream, StreamPriority
from .diagnose import Bench, Found, Skipped, Test
from .kernel_trials import sample_problem
from .workloads import Choices, tunable, workload

if TYPE_CHECKING:
    from ...kernels.implementation import Implementation, Kernel

_COPY_BYTES = {"cpu": 256 << 20}
_LARGE_COPY_BYTES = 1 << 30
_HOST_COPY_BYTES = 256 << 20
_MATRIX_SIZE = {"cpu": 1024}
_LARGE_MATRIX = 8192
_SMALL_MATRIX = 128
_MATRIX_S = 0.02
_CHAIN = 64
_DTYPES: Mapping[str, tuple[torch.dtype, Feature | None]] = {
    "float32": (torch.float32, None),
    "float16": (torch.float16, Feature.FP16),
    "bfloat16": (torch.bfloat16, Feature.BF16),
}
_ACTS = 0.7
"""A short piece of work on a high priority stream that takes less than this share of its time on a low one, behind
the same crowd, was preferred."""


def measure_memory(bench: Bench) -> Found:
    """What the driver says there is: less than a data sheet says, where error correction or the system keeps some."""
    yield "memory_bytes", bench.backend.memory_facts().total_bytes, "bytes"


def measure_bandwidth(bench: Bench) -> Found:
    """Bytes read and written by a large copy within the device."""
    size = _copy_bytes(bench)
    source = torch.ones(size // 4, dtype=torch.float32, device=bench.backend.torch_device)
    target = torch.empty_like(source)
    seconds = bench.seconds(lambda: target.copy_(source))
    yield "bandwidth", round(2 * size / seconds / 1e9, 1), "GB/s"


def _copy_bytes(bench: Bench) -> int:
    wanted = _COPY_BYTES.get(bench.profile.platform, _LARGE_COPY_BYTES)
    return min(wanted, bench.backend.memory_facts().free_bytes // 8) & ~0xFFF


def measure_matrix_rates(bench: Bench) -> Found:
    """A large square product in each dtype, counted as two operations per multiply."""
    largest = _MATRIX_SIZE.get(bench.profile.platform, _LARGE_MATRIX)
    for name, (dtype, feature) in _DTYPES.items():
        if feature is not None and feature not in bench.profile.capability.features:
            continue
        size, seconds = _SMALL_MATRIX, _product_s(bench, _SMALL_MATRIX, dtype)
        while size < largest and seconds < _MATRIX_S:  # some processors emulate a dtype, a thousand times slower
            size *= 2
            seconds = _product_s(bench, size, dtype)
        yield f"rates.{name}", float(f"{2 * size**3 / seconds / 1e12:.4g}"), "TFLOP/s"
    if Feature.FP8_E4M3 in bench.profile.capability.features and bench.profile.platform != "cpu":
        yield from _fp8_rate(bench, largest)


def _product_s(bench: Bench, size: int, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, device=bench.backend.torch_device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return bench.seconds(lambda: torch.mm(a, b, out=out))


def _fp8_rate(bench: Bench, size: int) -> Found:
    device = bench.backend.torch_device
    a = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(size, size, device=device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)
    scaled_mm = torch._scaled_mm  # no public name yet: torch/_inductor and transformers call this one
    try:
        seconds = bench.seconds(lambda: scaled_mm(a, b, one, one, out_dtype=torch.bfloat16))
    except RuntimeError:
        return  # declared, and not offered by this build of torch
    yield "rates.float8_e4m3", round(2 * size**3 / seconds / 1e12, 1), "TFLOP/s"


def measure_launches(bench: Bench) -> Found:
    """A chain of small launches: what each costs the host and the device together."""
    kernel, arguments = _small_work(bench)

    def chain() -> None:
        for _ in range(_CHAIN):
            kernel(*arguments)

    yield "launch_latency_us", round(bench.seconds(chain, each=4) / _CHAIN * 1e6, 3), "us"


def measure_graphs(bench: Bench) -> Found:
    """The same chain, recorded once, then replayed."""
    kernel, arguments = _small_work(bench)
    if not kernel.capturable and bench.profile.platform == "cpu":
        raise Skipped("nothing here can be recorded: the C++ kernels can, and need a compiler")

    def chain() -> None:
        for _ in range(_CHAIN):
            kernel(*arguments)

    chain()
    bench.backend.synchronize()
    began = time.perf_counter()
    try:
        graph = bench.backend.capture_graph(chain)
    except NotSupported as reason:
        raise Skipped(str(reason)) from None
    yield "graph_capture_ms", round((time.perf_counter() - began) * 1e3, 3), "ms"
    num_tokens = arguments[0].shape[0]
    replay = bench.seconds(lambda: graph.replay(num_tokens, num_tokens, None), each=4)
    yield "graph_launch_us", round(replay / _CHAIN * 1e6, 3), "us"


def _small_work(bench: Bench) -> tuple[Kernel, tuple[torch.Tensor, ...]]:
    problem = replace(sample_problem(bench.profile), hidden_size=256)
    kernel, _ = bench.registry.load("rms_norm", bench.profile, problem, bench.services)
    return kernel, workload("rms_norm", problem, bench.backend.torch_device, num_tokens=1)


def measure_stream_priorities(bench: Bench) -> Found:
    """Short work behind a crowd of long work on another stream: does a high priority shorten the wait?"""
    high = bench.backend.streams.create_stream(StreamPriority.HIGH)
    low = bench.backend.streams.create_stream(StreamPriority.LOW)
    if high.native is None:
        raise Skipped("every operation is done when its call returns, or there is one queue")
    crowd = bench.backend.streams.create_stream(StreamPriority.LOW)
    waits = {stream: _wait_s(bench, crowd, stream) for stream in (low, high)}
    yield "features.stream_priorities", waits[high] < _ACTS * waits[low], ""


def _wait_s(bench: Bench, crowd: Stream, stream: Stream) -> float:
    device, streams = bench.backend.torch_device, bench.backend.streams
    large, small = torch.randn(4096, 4096, device=device), torch.randn(256, 256, device=device)
    best = float("inf")
    for _ in range(5):
        bench.backend.synchronize()
        with streams.use(crowd):
            for _ in range(20):
                torch.mm(large, large)
        began = time.perf_counter()
        with streams.use(stream):
            torch.mm(small, small)
        streams.record(stream).wait_blocking()
        best = min(best, time.perf_counter() - began)
        bench.backend.synchronize()
    return best


def measure_copies(bench: Bench) -> Found:
    """Pinned host memory to the device and back."""
    if bench.profile.memory_is_shared:
        raise Skipped("the device's memory is the host's: nothing is copied between them")
    try:
        pinned = bench.backend.allocate_memory(
            _HOST_COPY_BYTES, kind=MemoryKind.PINNED_HOST, alignment_bytes=4096
        ).tensor((_HOST_COPY_BYTES,), torch.uint8)
    except NotSupported as reason:
        raise Skipped(f"{Clause.PINNED_MEMORY}: {reason}") from None
    on_device = torch.empty(_HOST_COPY_BYTES, dtype=torch.uint8, device=bench.backend.torch_device)
    stream = bench.backend.streams.current()
    to_device = bench.seconds(lambda: bench.backend.copy(on_device, pinned, stream))
    yield "copy_to_device", round(_HOST_COPY_BYTES / to_device / 1e9, 2), "GB/s"
    from_device = bench.seconds(lambda: bench.backend.copy(pinned, on_device, stream))
    yield "copy_from_device", round(_HOST_COPY_BYTES / from_device / 1e9, 2), "GB/s"


def measure_concurrent_blocks(bench: Bench) -> Found:
    """Thread blocks that were seen running at one moment; on a processor, threads that add to its speed."""
    if bench.profile.platform == "cpu":
        yield "concurrent_blocks", _concurrent_threads(), "threads"
        return
    if Feature.TRITON not in bench.profile.capability.features:
        raise Skipped("counted by a Triton kernel, and Triton is not available here")
    from ...kernels.occupancy import concurrent_blocks

    yield "concurrent_blocks", concurrent_blocks(str(bench.backend.torch_device)), "blocks"


def _concurrent_threads() -> int:
    """How many times the work of one thread all cores do in the same time."""
    cores = usable_cores()
    one = _work_done(1)
    return max(1, min(cores, round(_work_done(cores) / one)))


def _work_done(num_threads: int, seconds: float = 0.25) -> int:
    """Sorts done by threads of their own in the time given; a sort holds no interpreter lock."""
    counts = [0] * num_threads
    ends_at = time.perf_counter() + seconds

    def work(index: int) -> None:
        values = torch.rand(20_000, generator=torch.Generator().manual_seed(index))
        with torch.inference_mode():
            while time.perf_counter() < ends_at:
                values.sort()
                counts[index] += 1

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(before)
    return sum(counts)


def measure_kernels(bench: Bench) -> Found:
    """The fastest launch choices of each Triton kernel that fits, on a workload of a step's size."""
    problem = sample_problem(bench.profile)
    found = False
    for kernel in bench.registry.kernels:
        for implementation in bench.registry.chain(kernel):
            choices = tunable(implementation.name)
            if choices is None or implementation.misfit(bench.profile, problem) is not None:
                continue
            best = _best_choice(bench, implementation, problem, choices)
            if best is not None:
                found = True
                yield f"best.{choices.configuration}", best, ""
    if not found:
        raise Skipped("no kernel here has launch choices to measure")


def _best_choice(
    bench: Bench, implementation: Implementation, problem: Problem, choices: Choices
) -> dict[str, int] | None:
    arguments = workload(implementation.kernel, problem, bench.backend.torch_device, num_tokens=choices.num_tokens)
    times: list[tuple[float, int]] = []
    for index, choice in enumerate(choices.candidates):
        capability = replace(bench.profile.capability, best={choices.configuration: dict(choice)})
        profile = replace(bench.profile, capability=capability)
        try:
            kernel = implementation.load(profile, problem, bench.services)
            times.append((bench.seconds(_call(kernel, arguments), each=10), index))
        except Exception:  # too much shared memory, or a compiler's refusal: not a choice here
            continue
    if not times:
        return None
    return dict(choices.candidates[min(times)[1]])


def _call(kernel: Kernel, arguments: tuple[object, ...]) -> Callable[[], None]:
    def call() -> None:
        kernel(*arguments)

    return call


TESTS: Mapping[str, Test] = {
    "memory": measure_memory,
    "bandwidth": measure_bandwidth,
    "matrix": measure_matrix_rates,
    "launch": measure_launches,
    "graph": measure_graphs,
    "priorities": measure_stream_priorities,
    "copies": measure_copies,
    "blocks": measure_concurrent_blocks,
    "kernels": measure_kernels,
}
