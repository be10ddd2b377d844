"""One suite over every platform: what it offers works, what it declines it declines with a reason."""

import subprocess
import sys
from pathlib import Path

import pytest

from trimaran.device_workers.platforms.contract import Backend, Clause, Found, MemoryKind, NotSupported, Platform
from trimaran.device_workers.platforms.contract import Refused as PlatformRefused
from trimaran.device_workers.platforms.detection import detect, platforms
from trimaran.device_workers.streams.contract import StreamPriority
from trimaran.ipc.conditions import Refusal

USABLE = tuple(platform for platform in platforms() if isinstance(platform.detect(), Found))


def opened(platform: Platform, tmp_path: Path) -> Backend:
    return platform.open(0, num_threads=1, cache_dir=tmp_path, warn=lambda text: None)


@pytest.fixture(params=USABLE, ids=lambda platform: platform.name)
def platform(request: pytest.FixtureRequest) -> Platform:
    found: Platform = request.param
    return found


def test_detection_and_profile(platform: Platform) -> None:
    found = platform.detect()
    assert isinstance(found, Found)
    for index in range(len(found.devices)):
        profile = platform.profile(index)
        assert (profile.platform, profile.index) == (platform.name, index)
        assert profile.memory_bytes is not None and profile.memory_bytes > 0


def test_declines_name_clauses_and_reasons(platform: Platform) -> None:
    assert all(isinstance(clause, Clause) and reason for clause, reason in platform.declines.items())
    assert (Clause.COMPUTE in platform.declines) == (not platform.computes)


def test_streams_keep_order(platform: Platform, tmp_path: Path) -> None:
    streams = opened(platform, tmp_path).streams
    high, low = streams.create_stream(StreamPriority.HIGH), streams.create_stream(StreamPriority.LOW)
    event = streams.record(high)
    streams.wait(low, event)
    streams.synchronize(low)
    event.wait_blocking()
    assert event.done()


def test_memory_facts_are_plausible(platform: Platform, tmp_path: Path) -> None:
    facts = opened(platform, tmp_path).memory_facts()
    assert 0 < facts.free_bytes <= facts.total_bytes
    assert 0 < facts.ours_bytes < facts.total_bytes


def test_memory_is_aligned_and_writable(platform: Platform, tmp_path: Path) -> None:
    backend = opened(platform, tmp_path)
    if Clause.COMPUTE in platform.declines:
        with pytest.raises(NotSupported, match=platform.declines[Clause.COMPUTE]):
            backend.allocate_memory(100, kind=MemoryKind.DEVICE, alignment_bytes=64)
        return
    import torch

    memory = backend.allocate_memory(1000, kind=MemoryKind.DEVICE, alignment_bytes=256)
    tensor = memory.tensor((5, 50), torch.float32)
    assert tensor.data_ptr() % 256 == 0
    assert tensor.device == backend.torch_device
    tensor.fill_(3)
    assert float(memory.tensor((250,), torch.float32).sum()) == 750
    with pytest.raises(AssertionError):
        memory.tensor((251,), torch.float32)


def test_memory_that_cannot_be_had_is_a_memory_error(platform: Platform, tmp_path: Path) -> None:
    if Clause.COMPUTE in platform.declines:
        pytest.skip(platform.declines[Clause.COMPUTE])
    with pytest.raises(MemoryError):
        opened(platform, tmp_path).allocate_memory(1 << 50, kind=MemoryKind.DEVICE, alignment_bytes=64)


def test_graphs_replay_for_other_sizes_or_are_declined(platform: Platform, tmp_path: Path) -> None:
    backend = opened(platform, tmp_path)
    if Clause.GRAPH_CAPTURE in platform.declines:
        with pytest.raises(NotSupported, match=platform.declines[Clause.GRAPH_CAPTURE]):
            backend.capture_graph(lambda: None)
        return
    import torch

    from trimaran.ipc.facts import Problem
    from trimaran.kernels.catalog import CATALOG
    from trimaran.kernels.implementation import Services

    implementation = next(entry for entry in CATALOG if entry.kernel == "silu_and_mul")
    problem = Problem(dtype="float32", intermediate_size=8)
    kernel = implementation.load(backend.profile, problem, Services(num_threads=1, cache_dir=tmp_path))
    assert kernel.capturable
    out, gate_up = torch.zeros(6, 8), torch.randn(6, 16)
    graph = backend.capture_graph(lambda: kernel(out, gate_up))
    assert not out.any(), "recording must not run"
    graph.replay(4, 0, None)
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(out[:4], (torch.nn.functional.silu(gate) * up)[:4], rtol=1e-5, atol=1e-6)
    assert not out[4:].any()
    with pytest.raises(NotSupported):
        backend.capture_graph(lambda: None)


def test_forcing_and_reasons() -> None:
    assert detect().platform.name == "cpu"
    assert "only when asked for" in detect().refused["null"]
    forced = detect("null")
    assert forced.platform.name == "null"
    assert forced.refused["cpu"] == "--platform null was asked for"
    assert forced.decision.overridden
    with pytest.raises(Refusal, match="--platform takes cuda, rocm, xpu, ascend, metal, cpu, null"):
        detect("abacus")


def test_every_refusal_is_told() -> None:
    class Broken:
        name = "broken"
        computes = True
        visibility = ()

        def detect(self) -> PlatformRefused:
            return PlatformRefused(reason="driver 525 is older than 535")

    with pytest.raises(
        Refusal, match=r"(?s)broken: refused: driver 525.*null: not tried: computes nothing.*--platform NAME"
    ):
        detect(None, (Broken(), platforms()[-1]))  # type: ignore[arg-type]


def test_describing_imports_no_torch(tmp_path: Path) -> None:
    """With a declared platform, nothing before `open` does."""
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,'
        ' "num_attention_heads": 2, "vocab_size": 100}'
    )
    code = (
        "import sys\n"
        "from trimaran.device_workers.boot import describe\n"
        "from trimaran.ipc.configuration import WorkerConfiguration\n"
        "from trimaran.ipc.facts import Problem\n"
        f"configuration = WorkerConfiguration(rank=0, num_ranks=1, generation=1, core_address='', run_directory='',"
        f" cache_directory={str(tmp_path)!r}, model={str(tmp_path)!r}, platform='cpu')\n"
        "described = describe(configuration, print)\n"
        "registry, profile, problem = described.registry, described.profile, Problem(dtype='float32', head_dim=32)\n"
        "assert len([registry.resolve(kernel, profile, problem) for kernel in registry.kernels]) > 5\n"
        "import trimaran.device_workers.worker\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
