"""The platforms' real code on simulated driver surfaces: what each vendor's machine is taken for, and that its backend
keeps the contract. Nothing here shows that a real device does; `tests/gpu` does that for the one we have.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from trimaran.device_workers.memory.memory_plan import plan_memory
from trimaran.device_workers.platforms.contract import (
    Backend,
    Clause,
    FenceScope,
    Found,
    MemoryKind,
    NotSupported,
    Platform,
    WorkerGroup,
)
from trimaran.device_workers.platforms.contract import Refused as PlatformRefused
from trimaran.device_workers.platforms.cpu import CpuPlatform
from trimaran.device_workers.platforms.cuda import has_code
from trimaran.device_workers.platforms.detection import Wish, detect
from trimaran.device_workers.platforms.device_choice import DeviceWish, choose_device
from trimaran.device_workers.platforms.null import NullPlatform
from trimaran.device_workers.platforms.rocm import gfx_name
from trimaran.device_workers.platforms.rocm import has_code as has_amd_code
from trimaran.device_workers.platforms.torch_accelerator import TorchAccelerator
from trimaran.device_workers.platforms.versions import is_older
from trimaran.device_workers.streams.contract import StreamPriority
from trimaran.engine_core.negotiation import count_blocks
from trimaran.ipc.conditions import Refusal
from trimaran.ipc.configuration import CoreConfiguration
from trimaran.ipc.facts import DeviceProfile, Feature, Provenance
from trimaran.ipc.worker_messages import Loaded, Settled

from ..surfaces.machines import (
    A10,
    GIB,
    H200,
    VENDORS,
    Machine,
    cuda_properties,
    rocm_properties,
    xpu_properties,
)
from ..surfaces.modules import Device

WITH_GRAPHS = ("cuda", "rocm", "xpu", "ascend")


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return monkeypatch


@pytest.fixture(params=VENDORS)
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    return Machine(request.param, tmp_path)


def opened(platform: TorchAccelerator) -> Backend:
    return platform.open(0, num_threads=1, cache_dir=None, warn=lambda text: None)


def found(platform: Platform) -> Found:
    outcome = platform.detect()
    assert isinstance(outcome, Found), outcome
    return outcome


def refused(platform: Platform) -> PlatformRefused:
    outcome = platform.detect()
    assert isinstance(outcome, PlatformRefused), outcome
    return outcome


# -- what a machine is taken for


def test_each_vendors_machine_is_found_and_described(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    platform = machine.install(patch)
    (device,) = found(platform).devices
    assert device.memory_bytes == machine.devices[0].memory.total_bytes or machine.vendor in ("cuda", "rocm")
    profile = platform.profile(0)
    assert (profile.platform, profile.name, profile.index) == (machine.vendor, device.name, 0)
    assert profile.provenance["name"] is Provenance.DETECTED
    assert profile.provenance["capability.architecture"] is Provenance.DETECTED
    assert "bandwidth" not in profile.provenance and profile.bandwidth is None, "no driver says it: absent, not guessed"
    assert Feature.MANAGED_MEMORY not in profile.capability.features


def test_architectures_and_identities(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    expected = {
        "cuda": ("sm_90", H200, "0000:19:00.0", "580.159.04", "12.8"),
        "rocm": ("gfx942", H200, "0000:19:00.0", "6.10.5", "6.3.42131"),
        "xpu": ("xe2_hpg", "00010203-0405-0607-0809-0a0b0c0d0e0f", None, "1.6.33578", "20250300"),
        "ascend": ("ascend910b", None, None, "25.2.0", "8.5.0"),
        "metal": ("apple_m", None, None, None, "15.3"),
    }
    for vendor, facts in expected.items():
        with pytest.MonkeyPatch.context() as one:
            profile = Machine(vendor, tmp_path / vendor).install(one).profile(0)
        identity = (profile.capability.architecture, profile.uuid, profile.pci_bus_id, profile.driver, profile.runtime)
        if vendor == "xpu":
            identity = (*identity[:2], None, *identity[3:])
        assert identity == facts


def test_a_cuda_profile_in_full(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    profile = Machine("cuda", tmp_path).install(patch).profile(0)
    assert (profile.pcie_generation, profile.pcie_width, profile.numa_node) == (5, 16, 1)
    capability = profile.capability
    assert capability.shared_memory_per_block_bytes == 232448
    assert (capability.warp_width, capability.num_multiprocessors, capability.compute_capability) == (32, 132, "9.0")
    assert {
        Feature.BULK_TENSOR_COPY,
        Feature.WARP_GROUP_MATRIX,
        Feature.FP8_E4M3,
        Feature.TRITON,
    } <= capability.features
    assert profile.libraries["cuda"] == "12.8"


def test_nothing_there_is_refused_without_torch_modules(tmp_path: Path) -> None:
    from trimaran.device_workers.platforms.detection import platforms
    from trimaran.device_workers.platforms.host import Host

    bare = Host(root=tmp_path, load_library=lambda name: None, system="linux")
    for platform in platforms(bare)[: len(VENDORS)]:
        refusal = refused(platform)
        assert refusal.hardware is None
        assert refusal.reason.startswith("no ")


# -- refusals, each with its cure


@pytest.mark.user_pain("D6")
def test_an_old_nvidia_driver_names_all_three_versions(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    machine = Machine("cuda", tmp_path)
    machine.libraries["libnvidia-ml.so.1"]._driver = "470.256.02"
    machine.state.available = False  # as torch.cuda is with such a driver
    reason = refused(machine.install(patch)).reason
    assert "470.256.02" in reason and "525.60.13" in reason and "CUDA toolkit 12.8" in reason
    assert "update the driver" in reason


@pytest.mark.user_pain("D6")
@pytest.mark.parametrize(
    ("vendor", "change", "versions"),
    [
        ("rocm", lambda m: m.files.update({"/sys/module/amdgpu/version": "5.4.3"}), ("5.4.3", "6.1", "6.3.42131")),
        ("metal", lambda m: setattr(m, "system_version", "13.6"), ("13.6", "14.0")),
        ("xpu", lambda m: setattr(m, "system_version", "5.4.0-generic"), ("5.4.0", "5.15", "20250300")),
    ],
)
def test_old_drivers_and_systems_of_others(
    tmp_path: Path, patch: pytest.MonkeyPatch, vendor: str, change: Any, versions: tuple[str, ...]
) -> None:
    machine = Machine(vendor, tmp_path)
    change(machine)
    refusal = refused(machine.install(patch))
    assert all(version in refusal.reason for version in versions), refusal.reason
    assert refusal.hardware is not None and "update" in refusal.reason


@pytest.mark.user_pain("D6")
def test_an_old_cann_is_named(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    machine = Machine("ascend", tmp_path)
    machine.files["/usr/local/Ascend/ascend-toolkit/latest/version.cfg"] = "runtime_running_version=[7.5.0:8.1.RC1]"
    platform = machine.install(patch)
    patch.setattr(torch, "__version__", "2.12.0")
    reason = refused(platform).reason
    assert "CANN 8.1.RC1" in reason and "8.5" in reason and "25.2.0" in reason


@pytest.mark.parametrize(
    ("installed", "minimum", "older"),
    [
        ("580.159.04", "580", False),
        ("579.99", "580", True),
        ("525.60.13", "525.60.13", False),
        ("525.60", "525.60.13", True),
        ("8.5.0", "8.5", False),
        ("8.3.RC1", "8.5", True),
        ("unknown", "8.5", False),
        ("6.10.5", "6.3", False),
        ("99.1", "525.60.13", True),
    ],
)
def test_versions_compare_as_numbers(installed: str, minimum: str, older: bool) -> None:
    assert is_older(installed, minimum) is older


@pytest.mark.user_pain("D4")
def test_an_architecture_without_code_is_refused_by_name(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    machine = Machine("cuda", tmp_path)
    machine.devices[0].properties = cuda_properties("Tesla V100", 7, 0, A10)
    reason = refused(machine.install(patch)).reason
    assert "Tesla V100 is sm_70" in reason
    assert all(name in reason for name in machine.architectures)
    with pytest.MonkeyPatch.context() as other:
        amd = Machine("rocm", tmp_path / "amd")
        amd.devices[0].properties = rocm_properties("Radeon", "gfx1030")
        reason = refused(amd.install(other)).reason
    assert "gfx1030" in reason and "gfx90a, gfx942, gfx1100" in reason


@pytest.mark.user_pain("D4")
@pytest.mark.parametrize(
    ("built", "device", "runs"),
    [
        (["sm_80"], (8, 6), True),
        (["sm_86"], (8, 0), False),
        (["sm_90"], (10, 0), False),
        (["sm_90", "compute_90"], (12, 0), True),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["sm_120"], (12, 1), True),
        ([], (9, 0), False),
    ],
)
def test_which_code_runs_on_which_device(built: list[str], device: tuple[int, int], runs: bool) -> None:
    assert has_code(built, *device) is runs


def test_amd_names_and_generic_code() -> None:
    assert [gfx_name(version) for version in ("90010", "90402", "90500", "110000", "120001")] == [
        "gfx90a",
        "gfx942",
        "gfx950",
        "gfx1100",
        "gfx1201",
    ]
    assert has_amd_code(["gfx9-4-generic"], "gfx942")
    assert not has_amd_code(["gfx9-4-generic"], "gfx90a")


@pytest.mark.user_pain("D1")
@pytest.mark.parametrize(
    ("vendor", "change", "words"),
    [
        ("cuda", lambda m: m.versions.update(cuda=None), "not for CUDA: install"),
        ("cuda", lambda m: setattr(m.state, "available", False), "sees no device"),
        ("cuda", lambda m: m.variables.update(CUDA_VISIBLE_DEVICES=""), "CUDA_VISIBLE_DEVICES='' hides every device"),
        ("rocm", lambda m: m.files.pop("/dev/kfd"), "--device /dev/kfd"),
        ("rocm", lambda m: m.versions.update(hip=None), "not for ROCm: install"),
        ("xpu", lambda m: m.files.pop("/dev/dri/renderD128"), "--device /dev/dri"),
        ("xpu", lambda m: m.libraries.clear(), "install Intel's GPU compute runtime"),
        ("ascend", lambda m: m.modules.discard("torch_npu"), "pip install torch-npu=="),
        ("ascend", lambda m: m.libraries.clear(), "set_env.sh"),
        ("ascend", lambda m: m.files.pop("/dev/davinci_manager"), "davinci_manager is not there"),
    ],
)
def test_hardware_that_cannot_be_used_says_why_and_what_to_do(
    tmp_path: Path, patch: pytest.MonkeyPatch, vendor: str, change: Any, words: str
) -> None:
    machine = Machine(vendor, tmp_path)
    change(machine)
    refusal = refused(machine.install(patch))
    assert words in refusal.reason
    assert refusal.hardware is not None


def test_nodes_that_the_user_may_not_open(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "access", lambda path, mode: False)
    for vendor, group in (("rocm", "render and video"), ("xpu", "render"), ("ascend", "HwHiAiUser")):
        with pytest.MonkeyPatch.context() as one:
            assert f"group {group}" in refused(Machine(vendor, tmp_path / vendor).install(one)).reason.replace(
                "groups", "group"
            )


def test_windows_with_linux_inside(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    machine = Machine("cuda", tmp_path)
    machine.libraries.clear()
    machine.files |= {
        "/proc/version": "Linux version 6.6.87-microsoft-standard-WSL2",
        "/dev/dxg": "",
        "/usr/lib/wsl/lib/libcuda.so.1": "",
    }
    reason = refused(machine.install(patch)).reason
    assert "install the NVIDIA driver in Windows, and none in WSL" in reason


# -- basic mode


def test_basic_mode_where_plain_pytorch_still_works(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    machine = Machine("cuda", tmp_path)
    machine.devices[0].properties = cuda_properties("Tesla T4", 7, 5, A10)
    platform = machine.install(patch)
    assert "sm_80" in (found(platform).basic_mode or "")
    features = platform.profile(0).capability.features
    assert Feature.TRITON not in features and Feature.BF16 not in features and Feature.FP16 in features
    machine.devices[0].properties = cuda_properties("NVIDIA H200", 9, 0, H200)
    assert found(platform).basic_mode is None
    machine.modules.discard("triton")
    assert "pip install triton" in (found(platform).basic_mode or "")
    assert Feature.TRITON not in platform.profile(0).capability.features


def test_an_accelerator_that_shares_memory_by_design_is_no_small_gpu(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    machine = Machine("rocm", tmp_path)
    machine.devices[0].properties = rocm_properties("AMD Instinct MI300A", "gfx942:xnack-", is_integrated=1)
    platform = machine.install(patch)
    assert not found(platform).devices[0].is_integrated
    profile = platform.profile(0)
    assert profile.memory_is_shared and not profile.is_integrated
    machine.devices[0].properties = rocm_properties("AMD Radeon Graphics", "gfx1100", is_integrated=1)
    assert found(platform).devices[0].is_integrated


def test_a_device_that_does_not_answer_is_refused(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    platform = Machine("cuda", tmp_path).install(patch)

    def silent(index: int) -> None:
        raise RuntimeError("CUDA error: unknown error\nCompile with TORCH_USE_CUDA_DSA")

    patch.setattr(torch.cuda, "get_device_capability", silent)
    assert refused(platform).reason == "a device does not answer: CUDA error: unknown error"


# -- memory


def test_memory_is_aligned_accounted_and_given_back(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    backend = opened(machine.install(patch))
    before = backend.memory_facts()
    memory = backend.allocate_memory(1000, kind=MemoryKind.DEVICE, alignment_bytes=4096)
    tensor = memory.tensor((10,), torch.float32)
    assert tensor.data_ptr() % 4096 == 0 and memory.num_bytes == 1000
    held = backend.memory_facts()
    assert held.by_kind[MemoryKind.DEVICE] - before.by_kind[MemoryKind.DEVICE] >= 1000
    assert (held.ours_bytes >= 1000 and held.free_bytes < before.free_bytes) or machine.vendor == "metal"
    del memory
    gc.collect()
    assert backend.memory_facts().by_kind[MemoryKind.DEVICE] == held.by_kind[MemoryKind.DEVICE], "a tensor holds it"
    del tensor
    gc.collect()
    after = backend.memory_facts()
    assert after.by_kind == before.by_kind
    assert after.fragment_bytes is not None and after.fragment_bytes >= 1000, "the allocator keeps it for later"
    backend.release_cached_memory()
    assert backend.memory_facts().fragment_bytes == 0


def test_exhaustion_is_a_memory_error_and_leaves_the_rest(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    backend = opened(machine.install(patch))
    kept = backend.allocate_memory(64, kind=MemoryKind.DEVICE, alignment_bytes=64).tensor((16,), torch.float32)
    kept.fill_(7)
    trims = machine.devices[0].memory.num_trims
    with pytest.raises(MemoryError, match="out of memory"):
        backend.allocate_memory(1 << 50, kind=MemoryKind.DEVICE, alignment_bytes=64)
    assert machine.devices[0].memory.num_trims == trims + 1, "fragments go back"
    assert float(kept.sum()) == 112
    backend.allocate_memory(64, kind=MemoryKind.DEVICE, alignment_bytes=64)


def test_pinned_memory_or_an_honest_no(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    platform = machine.install(patch)
    backend = opened(platform)
    if Clause.PINNED_MEMORY in platform.declines:
        with pytest.raises(NotSupported, match=platform.declines[Clause.PINNED_MEMORY]):
            backend.allocate_memory(64, kind=MemoryKind.PINNED_HOST, alignment_bytes=64)
        return
    memory = backend.allocate_memory(640, kind=MemoryKind.PINNED_HOST, alignment_bytes=128)
    assert memory.tensor((1,), torch.float32).data_ptr() % 128 == 0
    assert machine.devices[0].memory.pinned_bytes >= 640
    assert backend.memory_facts().by_kind[MemoryKind.PINNED_HOST] >= 640


@pytest.mark.parametrize("vendor", WITH_GRAPHS)
def test_a_pool_is_not_used_again_once_its_graphs_are_gone(
    vendor: str, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    """Recordings that live share one pool; a handle whose last one is gone would fail inside the allocator."""
    machine = Machine(vendor, tmp_path)
    backend = opened(machine.install(patch))
    handles: list[Any] = []
    patch.setattr(backend._module, "graph_pool_handle", lambda: handles.append(len(handles)) or handles[-1])
    x = torch.zeros(4)
    graphs = [backend.capture_graph(lambda: x.add_(1)) for _ in range(2)]  # type: ignore[arg-type, return-value]
    assert handles == [0]
    graphs.clear()
    gc.collect()
    graphs.append(backend.capture_graph(lambda: x.add_(1)))  # type: ignore[arg-type, return-value]
    assert handles == [0, 1]


@pytest.mark.user_pain("M2")
def test_a_shortage_names_who_holds_the_memory(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    machine = Machine("cuda", tmp_path)
    machine.boards[0].holders = {4242: 130 * GIB, os.getpid(): GIB}
    machine.files["/proc/4242/comm"] = "other-server"
    machine.devices[0].memory.neighbours_bytes = 139 * GIB
    facts = opened(machine.install(patch)).memory_facts()
    assert facts.holders == {"4242 other-server": 130 * GIB}
    plan = plan_memory(
        facts, weight_bytes=GIB, activation_bytes=GIB, utilization=0.9, kv_memory_bytes=None, shared_limit_bytes=None
    )
    settled = Settled(block_size=16, max_num_seqs=8, max_batched_tokens=64, max_model_len=1024)
    loaded = Loaded(
        rank=0,
        generation=1,
        resolutions=(),
        decisions=(),
        memory=facts,
        weight_bytes=GIB,
        activation_bytes=GIB,
        kv_budget_bytes=plan.kv_budget_bytes,
        kv_bytes_per_block=1 << 20,
    )
    asked = CoreConfiguration(incarnation=1, generation=1, num_ranks=1, frontends_address="", workers_address="")
    with pytest.raises(Refusal) as refusal:
        count_blocks(asked, settled, [loaded])
    text = str(refusal.value)
    for part in ("2.00 GiB free", "of 141.00 GiB", "wants 126.90 GiB", "4242 other-server holds 130.00 GiB"):
        assert part in text, text


@pytest.mark.user_pain("M4")
def test_memory_facts_are_fresh_when_a_neighbour_lets_go(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    memory = machine.devices[0].memory
    memory.neighbours_bytes = memory.total_bytes // 2
    backend = opened(machine.install(patch))
    if machine.vendor == "metal":
        assert backend.memory_facts().free_bytes <= 16 * GIB  # of the host, which the GPU shares
        return
    first = backend.memory_facts()
    memory.neighbours_bytes = 0
    second = backend.memory_facts()
    assert second.free_bytes - first.free_bytes == memory.total_bytes // 2
    plan = plan_memory(
        second, weight_bytes=0, activation_bytes=0, utilization=0.9, kv_memory_bytes=None, shared_limit_bytes=None
    )
    assert plan.kv_budget_bytes > memory.total_bytes // 2


def test_an_integrated_intel_gpu_says_its_memory_another_way(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    machine = Machine("xpu", tmp_path)
    machine.devices[0].properties = xpu_properties("Intel(R) Graphics", 8 * GIB, is_integrated_gpu=True)
    facts = opened(machine.install(patch)).memory_facts()
    assert (facts.total_bytes, facts.free_bytes) == (8 * GIB, 8 * GIB)


# -- order


def test_streams_run_in_order_and_events_hold_others_back(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    """Side streams of the surface run late, so without the event the second copy would take stale bytes."""
    backend = opened(machine.install(patch))
    streams = backend.streams
    compute, copies = streams.create_stream(StreamPriority.HIGH), streams.create_stream(StreamPriority.LOW)
    source, middle, target = torch.arange(4.0), torch.zeros(4), torch.zeros(4)
    backend.copy(middle, source, compute)
    event = streams.record(compute)
    streams.wait(copies, event)
    backend.copy(target, middle, copies)
    streams.synchronize(copies)
    assert target.tolist() == source.tolist()
    assert event.done()
    event.wait_blocking()


def test_copies_and_launches_are_ordered_by_their_stream(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    platform = machine.install(patch)
    backend, stream = opened(platform), None
    stream = backend.streams.create_stream(StreamPriority.LOW)
    out, x = torch.zeros(3), torch.ones(3)

    class Doubling:
        workspace_bytes = 0
        capturable = True

        def __call__(self, *arguments: Any) -> None:
            torch.mul(arguments[1], 2, out=arguments[0])

    backend.launch(Doubling(), (out, x), stream)
    backend.copy(x, torch.full((3,), 5.0), stream)
    backend.launch(Doubling(), (out, x), stream)
    is_late = Clause.CONCURRENT_STREAMS not in platform.declines
    assert out.tolist() == ([0.0] * 3 if is_late else [10.0] * 3)
    backend.synchronize(FenceScope.DEVICE)
    assert out.tolist() == [10.0] * 3


def test_step_inputs_are_not_overwritten_while_their_copy_waits(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    from trimaran.device_workers.memory.staging import Layout, Staging

    machine = Machine("cuda", tmp_path)
    backend = opened(machine.install(patch))
    other = torch.device("meta")  # anything but the host's: buffers take turns, and a push copies
    patch.setattr(backend, "torch_device", other)
    zeros = torch.zeros
    patch.setattr(torch, "zeros", lambda *sizes, device=None, **options: zeros(*sizes, **options))
    sizes = Layout({"token_ids": (np.int32, (4,))})
    staging = Staging(64, backend)
    assert machine.devices[0].memory.pinned_bytes >= 64, "the host's side is pinned"
    (ids,) = staging.read(sizes, "token_ids")
    with backend.streams.use(backend.streams.create_stream(StreamPriority.HIGH)):
        for turn in range(1, 4):
            staging.write(sizes)["token_ids"][:] = turn
            staging.push(64)
        assert ids.tolist() == [0] * 4, "the copies are late"
        staging.write(sizes)["token_ids"][:] = 4  # waits for the first copy, whose buffer it takes
        assert ids.tolist() == [1] * 4
    backend.synchronize()
    assert ids.tolist() == [3] * 4, "what is not pushed stays on the host"


def test_priorities_reach_the_vendor_or_are_declined(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    platform = machine.install(patch)
    backend = opened(platform)
    if Clause.STREAM_PRIORITIES in platform.declines:
        assert platform.declines[Clause.STREAM_PRIORITIES]
        assert Feature.STREAM_PRIORITIES not in backend.profile.capability.features
        return
    high: Any = backend.streams.create_stream(StreamPriority.HIGH).native
    low: Any = backend.streams.create_stream(StreamPriority.LOW).native
    assert high.priority < low.priority, "a lower number goes first"


# -- graphs


@pytest.mark.parametrize("vendor", WITH_GRAPHS)
def test_a_recording_does_not_run_and_replays_the_same(vendor: str, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    backend = opened(Machine(vendor, tmp_path).install(patch))
    x, out = torch.tensor([1.0, -2.0]), torch.zeros(2)
    graph = backend.capture_graph(lambda: out.copy_((x * x).relu_()))  # type: ignore[func-returns-value]
    assert not out.any()
    x.copy_(torch.tensor([3.0, -4.0]))
    graph.replay(2, 1, None)
    assert out.tolist() == [9.0, 16.0]
    assert not backend.graphs_take_any_size


@pytest.mark.parametrize("vendor", WITH_GRAPHS)
def test_a_recording_that_fails_leaves_the_device_usable(
    vendor: str, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    backend = opened(Machine(vendor, tmp_path).install(patch))

    def broken() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(NotSupported, match="not permitted when stream is capturing"):
        backend.capture_graph(broken)
    out = torch.zeros(2)
    backend.capture_graph(lambda: out.add_(1)).replay(1, 1, None)  # type: ignore[func-returns-value]
    assert out.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("vendor", ["cuda", "rocm", "xpu"])
def test_an_empty_recording_is_no_graph(vendor: str, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    backend = opened(Machine(vendor, tmp_path).install(patch))
    with pytest.raises(NotSupported, match="nothing was launched"):
        backend.capture_graph(lambda: None)


def test_metal_declines_graphs_and_collectives(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    platform = Machine("metal", tmp_path).install(patch)
    backend = opened(platform)
    with pytest.raises(NotSupported, match="records no graphs"):
        backend.capture_graph(lambda: None)
    group = WorkerGroup(rank=0, num_ranks=2, generation=1, run_directory=str(tmp_path), timeout_s=1.0)
    with pytest.raises(NotSupported, match="one GPU"):
        backend.communicator(group)
    assert backend.communicator(replace(group, num_ranks=1)) is None


# -- health


def test_health_of_an_nvidia_device(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    machine = Machine("cuda", tmp_path)
    machine.boards[0].throttle_reasons = 0x40
    machine.boards[0].uncorrected = 3
    machine.boards[0].holders = {4242: 5 * GIB}
    health = opened(machine.install(patch)).health()
    assert (health.power, health.temperature) == (312.5, 54.0)
    assert (health.compute_utilization, health.memory_utilization) == (0.8, 0.25)
    assert health.clocks == {"graphics": 1830.0, "sm": 1830.0, "memory": 3201.0}
    assert len(health.throttle_reasons) == 1
    (error,) = health.errors
    assert "3 uncorrected memory errors" in error
    assert health.memory is not None
    held = health.memory.total_bytes - health.memory.free_bytes
    assert held == 5 * GIB and sum(health.memory.holders.values()) == 5 * GIB


def test_health_of_an_amd_device_and_of_ascend(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as one:
        health = opened(Machine("rocm", tmp_path / "amd").install(one)).health()
    assert (health.power, health.temperature) == (230.0, 51.0)
    assert health.clocks == {"graphics": 2100.0}
    assert (health.compute_utilization, health.memory_utilization) == (0.42, 0.17)
    assert health.errors == ("2 uncorrected errors in umc",)
    with pytest.MonkeyPatch.context() as one:
        assert opened(Machine("ascend", tmp_path / "npu").install(one)).health().compute_utilization == 0.37


# -- the choice among platforms and devices


def both(tmp_path: Path, patch: pytest.MonkeyPatch, vendor: str, change: Any = lambda machine: None) -> list[Platform]:
    """This vendor's machine, a processor and the null platform."""
    machine = Machine(vendor, tmp_path)
    change(machine)
    platform = machine.install(patch)
    return [platform, CpuPlatform(machine.host()), NullPlatform(machine.host())]


@pytest.mark.user_pain("D3")
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_discrete_gpu_is_chosen_in_either_order(
    order: tuple[int, int], tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    small = Device(xpu_properties("Intel(R) Graphics", GIB // 2, is_integrated_gpu=True), GIB // 2)

    def add(machine: Machine) -> None:
        pair = [small, machine.devices[0]]
        machine.devices[:] = [pair[index] for index in order]

    detection = detect(candidates=both(tmp_path, patch, "xpu", add))
    assert [device.name for device in detection.devices] == ["Intel(R) Arc(TM) B580 Graphics"]
    assert any("integrated, not used: device" in note for note in detection.notes)
    chosen = choose_device(
        detection.platform, detection.devices, DeviceWish(rank=0, num_ranks=1), lambda text: None, wait_s=0
    )
    assert chosen.index == (1 if order == (0, 1) else 0)


@pytest.mark.user_pain("D3")
def test_only_an_integrated_gpu_is_used_when_asked_for(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    def shrink(machine: Machine) -> None:
        machine.devices[0].properties = xpu_properties("Intel(R) Graphics", GIB // 2, is_integrated_gpu=True)

    candidates = both(tmp_path, patch, "xpu", shrink)
    fallen = detect(candidates=candidates)
    assert fallen.platform.name == "cpu"
    assert fallen.warning is not None and fallen.warning.startswith(
        "running on the CPU because xpu: only an integrated"
    )
    assert detect("xpu", candidates).platform.name == "xpu"
    assert detect(candidates=candidates, wish=Wish(by_device=True)).platform.name == "xpu"
    with pytest.raises(Refusal, match="(?s)xpu: refused: only an integrated GPU.*--platform"):
        detect(candidates=[candidates[0], candidates[2]])


@pytest.mark.user_pain("D3")
def test_never_silently_on_the_cpu(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    candidates = both(tmp_path, patch, "cuda", lambda machine: machine.versions.update(cuda=None))
    fallen = detect(candidates=candidates)
    assert fallen.platform.name == "cpu" and "running on the CPU because cuda: PyTorch" in (fallen.warning or "")
    assert detect("cpu", candidates).warning is None
    with pytest.raises(Refusal, match="(?s)cuda: refused.*several ranks"):
        detect(candidates=candidates, wish=Wish(num_ranks=2))
    assert detect(candidates=candidates[1:]).warning is None, "no accelerator is there: nothing to warn of"


def test_other_vendors_in_the_machine_are_listed(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    other = Machine("xpu", tmp_path / "other")
    candidates = [*both(tmp_path, patch, "cuda")]
    candidates.insert(1, other.install(patch, beside=True))
    detection = detect(candidates=candidates)
    lines = detection.lines()
    assert detection.platform.name == "cuda"
    assert any(line.startswith("platform xpu: present, not used: 1 x Intel GPU") for line in lines)
    assert any(line.startswith(f"device 0: NVIDIA H200, {H200}, 141.0 GiB") for line in lines)
    assert any("--platform NAME" in line for line in lines)


@pytest.mark.user_pain("D2")
@pytest.mark.parametrize(
    ("asked", "index"),
    [(A10, 1), ("GPU-aaaaaaaa", 1), ("aaaaaaaa-bbbb", 1), ("1", 1), ("0", 0), (None, 0)],
)
def test_devices_by_identifier_and_index(
    asked: str | None, index: int, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    machine = Machine("cuda", tmp_path)
    machine.devices.append(Device(cuda_properties("NVIDIA A10", 8, 6, A10), 24 * GIB))
    platform = machine.install(patch)
    wish = DeviceWish(rank=0, num_ranks=1, device=asked)
    assert choose_device(platform, found(platform).devices, wish, lambda text: None, wait_s=0).index == index
    with pytest.raises(Refusal, match=f"(?s)--device GPU-0000ffff is not there.*{H200}.*{A10}"):
        choose_device(
            platform,
            found(platform).devices,
            DeviceWish(rank=0, num_ranks=1, device="GPU-0000ffff"),
            lambda text: None,
        )


@pytest.mark.user_pain("D2")
def test_a_slice_is_the_one_device_that_the_driver_shows(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    machine = Machine("cuda", tmp_path)
    machine.variables["CUDA_VISIBLE_DEVICES"] = "MIG-0a1b2c3d-0000-1111-2222-333344445555"
    platform = machine.install(patch)
    outcome = found(platform)
    assert any("CUDA_VISIBLE_DEVICES=MIG-0a1b2c3d" in note for note in outcome.notes)
    wish = DeviceWish(rank=0, num_ranks=1, device=machine.variables["CUDA_VISIBLE_DEVICES"])
    assert choose_device(platform, outcome.devices, wish, lambda text: None, wait_s=0).index == 0


def test_a_busy_device_is_waited_for_or_the_next_one_taken(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    machine = Machine("cuda", tmp_path)
    machine.devices.append(Device(cuda_properties("NVIDIA A10", 8, 6, A10), 24 * GIB))
    platform = machine.install(patch)
    devices, said = found(platform).devices, list[str]()
    machine.devices[0].busy = "CUDA error: all CUDA-capable devices are busy or unavailable"
    lone = DeviceWish(rank=0, num_ranks=1)
    assert choose_device(platform, devices, lone, said.append, wait_s=0).index == 1
    assert "busy or unavailable" in said[0] and "next one" in said[0]

    def wake(seconds: float) -> None:
        machine.devices[0].busy = None

    said.clear()
    named = DeviceWish(rank=0, num_ranks=1, device=H200)
    assert choose_device(platform, devices, named, said.append, wait_s=5, sleep=wake).index == 0
    assert "waiting up to 5 s" in said[0]
    machine.devices[0].busy = "busy for ever"
    clock = iter(range(100))
    with pytest.raises(Refusal, match="no device takes work.*busy for ever.*--device"):
        choose_device(
            platform,
            devices,
            DeviceWish(rank=0, num_ranks=2),
            said.append,
            wait_s=3,
            sleep=lambda seconds: None,
            clock=lambda: float(next(clock)),
        )


def test_profiles_have_no_values_of_unknown_origin(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    profile: DeviceProfile = machine.install(patch).profile(0)
    for name in ("driver", "runtime", "memory_bytes", "uuid", "pci_bus_id"):
        assert (getattr(profile, name) is None) == (name not in profile.provenance)


def test_unknown_names_of_a_module_are_not_used(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    """The fakes hold what we may use and nothing else; a new name has to be added there, where it is compared."""
    platform = Machine("cuda", tmp_path).install(patch)
    with pytest.raises(AttributeError):
        platform.module().memory_snapshot()
