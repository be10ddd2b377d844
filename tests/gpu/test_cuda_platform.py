"""The CUDA platform on a real NVIDIA device. `pytest -m gpu tests/gpu/test_cuda_platform.py`"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from trimaran.device_workers.platforms.contract import Backend, FenceScope, Found, MemoryKind, NotSupported
from trimaran.device_workers.platforms.cuda import CudaPlatform
from trimaran.device_workers.platforms.detection import detect
from trimaran.device_workers.platforms.device_choice import DeviceWish, choose_device
from trimaran.device_workers.platforms.host import Host
from trimaran.device_workers.platforms.nvml import open_nvml
from trimaran.device_workers.streams.contract import StreamPriority
from trimaran.ipc.facts import Feature

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.version.cuda or not torch.cuda.is_available(), reason="no NVIDIA device is here"),
]
MIB = 1 << 20


@pytest.fixture(scope="module")
def backend() -> Backend:
    return CudaPlatform().open(0, num_threads=4, cache_dir=None, warn=lambda text: None)


def spin(num_rounds: int = 40) -> torch.Tensor:
    """Work that takes the device a while, in the current stream."""
    x = torch.ones(4096, 4096, device="cuda")
    for _ in range(num_rounds):
        x = x @ x * 1e-4
    return x


def test_detection_and_the_log() -> None:
    detection = detect()
    assert detection.platform.name == "cuda" and detection.warning is None
    assert detection.devices[0].uuid is not None and detection.devices[0].uuid.startswith("GPU-")
    lines = detection.lines()
    assert any(line.startswith("platform cuda: used: ") for line in lines)
    assert any(line.startswith("device 0: ") and "GiB" in line for line in lines)
    wish = DeviceWish(rank=0, num_ranks=1, device=detection.devices[0].uuid)
    assert choose_device(detection.platform, detection.devices, wish, print).index == 0


def test_profile() -> None:
    profile = CudaPlatform().profile(0)
    properties = torch.cuda.get_device_properties(0)
    assert profile.name == properties.name
    assert profile.memory_bytes == properties.total_memory
    assert profile.driver is not None and profile.runtime == torch.version.cuda
    assert profile.pci_bus_id is not None and profile.pcie_generation is not None
    capability = profile.capability
    assert capability.architecture == f"sm_{properties.major}{properties.minor}"
    assert capability.num_multiprocessors == properties.multi_processor_count
    assert capability.shared_memory_per_block_bytes is not None
    if (properties.major, properties.minor) == (9, 0):
        assert capability.shared_memory_per_block_bytes == 227 * 1024
        assert {Feature.BF16, Feature.FP8_E4M3, Feature.BULK_TENSOR_COPY} <= capability.features
    assert profile.provenance["driver"] == "detected"


def test_nvml_knows_the_same_device() -> None:
    nvml = open_nvml(Host())
    assert nvml is not None
    names = [device.name for device in nvml.devices()]
    assert torch.cuda.get_device_properties(0).name in names


def test_a_hidden_device_is_refused_by_the_variables_name() -> None:
    """In a process of its own: the driver reads the variable once."""
    code = (
        "from trimaran.device_workers.platforms.cuda import CudaPlatform\n"
        "from trimaran.device_workers.platforms.host import Host\n"
        "outcome = CudaPlatform(Host(variables={'CUDA_VISIBLE_DEVICES': '-1'})).detect()\n"
        "print(outcome.reason, '|', outcome.hardware)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "CUDA_VISIBLE_DEVICES='-1' hides every device" in done.stdout and "NVIDIA" in done.stdout


@pytest.mark.user_pain("D2")
def test_a_uuid_in_the_variable_is_the_device_used() -> None:
    uuid = CudaPlatform().describe(0).uuid
    assert uuid is not None
    code = (
        "import os\n"
        "from trimaran.device_workers.platforms.cuda import CudaPlatform\n"
        "from trimaran.device_workers.platforms.host import Host\n"
        "print([device.uuid for device in CudaPlatform(Host(variables=dict(os.environ))).detect().devices])\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": uuid}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert done.stdout.strip() == str([uuid])


def test_memory_is_aligned_accounted_and_fresh(backend: Backend) -> None:
    gc.collect()
    backend.release_cached_memory()
    before = backend.memory_facts()
    memory = backend.allocate_memory(256 * MIB, kind=MemoryKind.DEVICE, alignment_bytes=4096)
    tensor = memory.tensor((64 * MIB,), torch.float32)
    assert tensor.data_ptr() % 4096 == 0 and tensor.device == backend.torch_device
    held = backend.memory_facts()
    assert held.by_kind[MemoryKind.DEVICE] - before.by_kind[MemoryKind.DEVICE] >= 256 * MIB
    assert before.free_bytes - held.free_bytes >= 256 * MIB
    del memory, tensor
    after = backend.memory_facts()
    assert after.by_kind[MemoryKind.DEVICE] == before.by_kind[MemoryKind.DEVICE]
    assert after.fragment_bytes is not None and after.fragment_bytes >= 256 * MIB
    backend.release_cached_memory()
    assert backend.memory_facts().free_bytes > held.free_bytes


def test_exhaustion_leaves_everything_usable(backend: Backend) -> None:
    kept = backend.allocate_memory(64, kind=MemoryKind.DEVICE, alignment_bytes=256).tensor((16,), torch.float32)
    kept.fill_(3)
    with pytest.raises(MemoryError):
        backend.allocate_memory(1 << 45, kind=MemoryKind.DEVICE, alignment_bytes=256)
    assert float(kept.sum()) == 48
    backend.allocate_memory(MIB, kind=MemoryKind.DEVICE, alignment_bytes=256)


def test_pinned_memory_is_pinned_and_aligned(backend: Backend) -> None:
    tensor = backend.allocate_memory(MIB, kind=MemoryKind.PINNED_HOST, alignment_bytes=512).tensor((8,), torch.int64)
    assert tensor.is_pinned() and tensor.data_ptr() % 512 == 0


def test_the_host_runs_on_while_a_copy_waits(backend: Backend) -> None:
    stream = backend.streams.create_stream(StreamPriority.LOW)
    source = backend.allocate_memory(64 * MIB, kind=MemoryKind.PINNED_HOST, alignment_bytes=256).tensor(
        (16 * MIB,), torch.float32
    )
    source.fill_(5)
    target = torch.zeros(16 * MIB, device=backend.torch_device)
    with backend.streams.use(stream):
        spin()
    began_s = time.perf_counter()
    backend.copy(target, source, stream)
    event = backend.streams.record(stream)
    returned_s = time.perf_counter() - began_s
    assert not event.done(), "the copy waits behind the work of its stream"
    event.wait_blocking()
    assert returned_s < (time.perf_counter() - began_s) / 2
    assert float(target[-1]) == 5 and event.done()


def test_events_order_streams(backend: Backend) -> None:
    streams = backend.streams
    first, second = streams.create_stream(StreamPriority.HIGH), streams.create_stream(StreamPriority.LOW)
    middle, target = torch.zeros(4 * MIB, device="cuda"), torch.zeros(4 * MIB, device="cuda")
    backend.synchronize()
    with streams.use(first):
        spin()
        middle.fill_(9)
    streams.wait(second, streams.record(first))
    backend.copy(target, middle, second)
    streams.synchronize(second)
    assert float(target.min()) == 9


def test_priorities_act(backend: Backend) -> None:
    """Short work of the high stream, given after much work of the low one, ends long before it."""
    high, low = (backend.streams.create_stream(priority) for priority in (StreamPriority.HIGH, StreamPriority.LOW))
    assert high.native.priority < low.native.priority  # type: ignore[attr-defined]
    backend.synchronize()
    with backend.streams.use(low):
        spin(200)
    late = backend.streams.record(low)
    with backend.streams.use(high):
        torch.ones(1024, device="cuda").sum()
    early = backend.streams.record(high)
    early.wait_blocking()
    assert not late.done()
    backend.synchronize(FenceScope.DEVICE)
    assert late.done()


def test_a_recording_equals_the_eager_run(backend: Backend) -> None:
    x, weight, out = (torch.randn(64, 64, device="cuda") for _ in range(3))

    def run() -> None:
        torch.mm(torch.relu(x), weight, out=out)

    run()  # libraries choose their plans outside the recording
    out.zero_()
    graph = backend.capture_graph(run)
    assert not out.any(), "recording does not run"
    x.copy_(torch.randn(64, 64, device="cuda"))
    graph.replay(1, 1, None)
    backend.synchronize()
    expected = torch.relu(x) @ weight
    assert torch.equal(out, expected)


def test_recordings_that_cannot_be_are_refused_and_harmless(backend: Backend) -> None:
    x = torch.ones(8, device="cuda")
    with pytest.raises(NotSupported):
        backend.capture_graph(lambda: print(x.sum().item()))
    with pytest.raises(NotSupported, match="nothing was launched"):
        backend.capture_graph(lambda: None)
    assert float((x + 1).sum()) == 16
    graph = backend.capture_graph(lambda: x.add_(1))  # type: ignore[func-returns-value]
    graph.replay(1, 1, None)
    assert float(x.sum()) == 16


def test_after_a_broken_recording_kept_memory_is_given_back(backend: Backend) -> None:
    """Of two halves of what is free, the second finds room once the first is only kept by the allocator."""
    x = torch.ones(8, device="cuda")
    with pytest.raises(NotSupported):
        backend.capture_graph(lambda: print(x.sum().item()))
    backend.release_cached_memory()
    free = backend.memory_facts().free_bytes
    for share in (0.4, 0.7):
        memory = backend.allocate_memory(int(free * share), kind=MemoryKind.DEVICE, alignment_bytes=256)
        del memory
    backend.release_cached_memory()


def test_health(backend: Backend) -> None:
    with backend.streams.use(backend.streams.create_stream(StreamPriority.LOW)):
        spin(100)
    health = backend.health()
    backend.synchronize()
    assert health.clocks["sm"] > 0 and health.clocks["memory"] > 0
    assert health.power is not None and 10 < health.power < 2000
    assert health.temperature is not None and 5 < health.temperature < 110
    assert health.compute_utilization is not None and 0 <= health.compute_utilization <= 1
    assert health.memory_utilization is not None and 0 <= health.memory_utilization <= 1


@pytest.mark.user_pain("M2")
def test_a_neighbour_is_seen_in_the_facts(backend: Backend) -> None:
    code = (
        "import torch, sys\n"
        "x = torch.zeros(1 << 28, device='cuda')\n"
        "torch.cuda.synchronize()\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    neighbour = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        before = backend.memory_facts()
        assert neighbour.stdout is not None and neighbour.stdout.readline().strip() == "held"
        during = backend.memory_facts()
        assert before.free_bytes - during.free_bytes >= 1 << 30
        if during.holders:  # containers may hide them
            assert max(during.holders.values()) >= 1 << 30
    finally:
        neighbour.communicate("")
    assert backend.memory_facts().free_bytes >= during.free_bytes + (1 << 30)


def test_the_tiny_model_token_for_token(tmp_path: Path) -> None:
    """Float32 on the device against float32 on the processor: greedy, drawn, penalised, biased, masked, scored."""
    from ..numerics.test_accelerator_engines import engine_of, tokens_of
    from ..step_driver import make_configuration
    from ..tiny_models import save, variants

    said: list[str] = []
    for variant in ("qwen3", "mistral_window"):
        model = tmp_path / variant
        save(variants()[variant], model)
        found: dict[str, Any] = {}
        for platform in ("cpu", "cuda"):
            options = make_configuration(model, tmp_path, dtype="float32", platform=platform)
            found[platform] = tokens_of(engine_of(options, said.append))
        assert found["cuda"] == found["cpu"], variant


def test_a_found_device_has_no_basic_mode_where_triton_is() -> None:
    platform = CudaPlatform()
    outcome = platform.detect()
    assert isinstance(outcome, Found)
    if platform.host.has_module("triton") and torch.cuda.get_device_capability(0) >= (8, 0):
        assert outcome.basic_mode is None
