"""Which value of a profile counts: declared, detected, the user's file; with where each one came from."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from trimaran.device_workers.boot import describe
from trimaran.device_workers.profiles import packaged
from trimaran.device_workers.profiles.declared import declared_profile, product_decision
from trimaran.device_workers.profiles.merging import check_architecture, merged
from trimaran.device_workers.profiles.packaged import file_of_architecture, read_capability_file
from trimaran.device_workers.profiles.processor import family, read_processor
from trimaran.device_workers.profiles.settling import declare_profile, settle_profile
from trimaran.ipc.conditions import Refusal
from trimaran.ipc.configuration import WorkerConfiguration
from trimaran.ipc.facts import DeviceCapability, DeviceProfile, Feature, Link, Provenance

GIB = 1 << 30
DETECTED = DeviceProfile(
    platform="cuda",
    vendor="NVIDIA",
    name="NVIDIA H200",
    index=2,
    uuid="GPU-7",
    driver="580.159",
    memory_bytes=140 * GIB,
    clocks={"sm": 1980.0},
    libraries={"torch": "2.13"},
    capability=DeviceCapability(
        architecture="sm_90", num_multiprocessors=132, features=frozenset({Feature.FP16, Feature.CPP_COMPILER})
    ),
)
MINE = """\
schema: 1
architecture: sm_90
documents:
  note:
    title: A note
bandwidth: {value: 4250, source: measured, date: 2026-11-30, tool: diagnose}
memory_bytes: [100 GiB, note]
rates:
  bfloat16: {value: 700, source: measured, date: 2026-11-30, tool: diagnose}
features:
  bf16: [false, note]
  triton: note
best:
  rms_norm: {value: {num_warps: 8}, source: measured, date: 2026-11-30, tool: diagnose}
"""
NEXT = """\
schema: 1
architecture: sm_130
title: The next one
platform: cuda
vendor: NVIDIA
documents:
  guide:
    title: A guide
    section: Table 1
    address: https://docs.vendor.example/
warp_width: [32, guide]
shared_memory_per_block_bytes: [320 KiB, guide]
features:
  bf16: guide
  bulk_tensor_copy: guide
  triton: guide
products:
  - name: X130
    device_names: [NVIDIA X130 *]
    memory_bytes: [512 GiB, guide]
    bandwidth: [16000, guide]
    rates:
      bfloat16: [5000, guide]
"""


def test_declared_before_detected_before_the_users_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    profile, decision = settle_profile(DETECTED, str(path), allow_mismatch=False)
    expected = {
        "pcie_generation": (5, Provenance.DECLARED),
        "capability.shared_memory_per_block_bytes": (227 * 1024, Provenance.DECLARED),
        "capability.rates.float16": (989.5, Provenance.DECLARED),
        "capability.features.bulk_tensor_copy": (True, Provenance.DECLARED),
        "links": ((Link(to="peers", kind="nvlink", bandwidth=900.0),), Provenance.DECLARED),
        "capability.num_multiprocessors": (132, Provenance.DETECTED),
        "clocks.sm": (1980.0, Provenance.DETECTED),
        "capability.features.fp16": (True, Provenance.DETECTED),
        "driver": ("580.159", Provenance.DETECTED),
        "memory_bytes": (100 * GIB, Provenance.DECLARED),
        "bandwidth": (4250.0, Provenance.MEASURED),
        "capability.rates.bfloat16": (700.0, Provenance.MEASURED),
        "capability.best.rms_norm": ({"num_warps": 8}, Provenance.MEASURED),
    }
    for key, (value, origin) in expected.items():
        assert (value_of(profile, key), profile.provenance[key]) == (value, origin), key
    assert (profile.index, profile.uuid, profile.name) == (2, "GPU-7", "NVIDIA H200")
    assert decision.overridden
    assert decision.reason == f"declared by hopper (H200), then as detected; then --device-config {path}"


def value_of(profile: DeviceProfile, key: str) -> object:
    struct: object = profile.capability if key.startswith("capability.") else profile
    name, _, entry = key.removeprefix("capability.").partition(".")
    value = getattr(struct, name)
    if name == "features":
        return Feature(entry) in value
    return value[entry] if entry else value


def test_without_a_file_of_the_user() -> None:
    profile, decision = settle_profile(DETECTED, None, allow_mismatch=False)
    assert profile.memory_bytes == 140 * GIB and profile.provenance["memory_bytes"] is Provenance.DETECTED
    assert profile.bandwidth == 4800.0 and profile.provenance["bandwidth"] is Provenance.DECLARED
    assert Feature.BF16 in profile.capability.features
    assert (decision.name, decision.value) == ("device profile", "sm_90")
    assert decision.reason == "declared by hopper (H200), then as detected" and not decision.overridden


def test_a_detected_measurement_stays_measured() -> None:
    detected = replace(DETECTED, bandwidth=4100.0, provenance={"bandwidth": Provenance.MEASURED})
    assert settle_profile(detected, None, allow_mismatch=False)[0].provenance["bandwidth"] is Provenance.MEASURED


def test_a_default_counts_as_detected_only_when_the_platform_says_so() -> None:
    mi300a = replace(DETECTED, name="AMD Instinct MI300A", capability=DeviceCapability(architecture="gfx942"))
    declared, _ = settle_profile(mi300a, None, allow_mismatch=False)
    assert declared.memory_is_shared and declared.provenance["memory_is_shared"] is Provenance.DECLARED
    told = replace(mi300a, provenance={"memory_is_shared": Provenance.DETECTED})
    assert not settle_profile(told, None, allow_mismatch=False)[0].memory_is_shared


def test_what_is_installed_is_as_detected(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    features = settle_profile(DETECTED, str(path), allow_mismatch=False)[0].capability.features
    assert Feature.TRITON not in features  # both files say that Triton knows the architecture
    assert Feature.CPP_COMPILER in features
    assert Feature.BF16 not in features  # a file takes away what another one declares
    path.write_text(MINE.replace("triton: note", "cpp_compiler: [false, note]"))
    installed = replace(DETECTED.capability, features=frozenset({Feature.TRITON, Feature.CPP_COMPILER}))
    features = settle_profile(replace(DETECTED, capability=installed), str(path), False)[0].capability.features
    assert Feature.TRITON in features and Feature.CPP_COMPILER not in features


def test_another_architecture_is_refused_or_insisted_on(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as caught:
        settle_profile(DETECTED, "ampere:A100 SXM 40GB", allow_mismatch=False)
    assert str(caught.value) == (
        "--device-config ampere is for architecture cuda sm_80, but NVIDIA H200 is cuda sm_90; "
        "give a file of sm_90, leave the option out, or insist with --allow-mismatch"
    )
    profile, decision = settle_profile(DETECTED, "ampere:A100 SXM 40GB", allow_mismatch=True)
    assert profile.capability.architecture == "sm_80"
    assert profile.provenance["capability.architecture"] is Provenance.DECLARED
    assert profile.capability.shared_memory_per_block_bytes == 163 * 1024
    assert Feature.BULK_TENSOR_COPY not in profile.capability.features
    assert profile.memory_bytes == 40 * GIB
    assert "the device itself is sm_90 (--allow-mismatch)" in decision.reason
    other_platform = tmp_path / "rocm.yaml"
    other_platform.write_text("schema: 1\narchitecture: sm_90\nplatform: rocm\n")
    with pytest.raises(Refusal, match="rocm sm_90, but NVIDIA H200 is cuda sm_90.*--allow-mismatch$"):
        check_architecture(read_capability_file(str(other_platform)), DETECTED, allow_mismatch=False)


@pytest.mark.parametrize("spelling", ["sm_90", "sm_90a"])
def test_compilers_spellings_are_no_mismatch(spelling: str, tmp_path: Path) -> None:
    detected = replace(DETECTED, capability=replace(DETECTED.capability, architecture=spelling))
    profile, _ = settle_profile(detected, "hopper:H200", allow_mismatch=False)
    assert profile.capability.architecture == spelling and profile.memory_bytes == 141 * GIB


@pytest.mark.parametrize(
    ("changes", "product"),
    [
        ({"memory_bytes": 139 * GIB}, "hopper (H200)"),
        ({"memory_bytes": 70 * GIB}, "hopper"),
        ({"name": "NVIDIA H200 MIG 1g.18gb"}, "hopper"),
    ],
)
def test_a_part_of_a_device_has_not_its_rates(changes: dict[str, object], product: str) -> None:
    profile, decision = settle_profile(replace(DETECTED, **changes), None, allow_mismatch=False)
    assert decision.reason.startswith(f"declared by {product}, ")
    assert ("bfloat16" in profile.capability.rates) is (product != "hopper")
    assert Feature.BF16 in profile.capability.features


def test_a_partition_with_the_whole_devices_memory() -> None:
    capability = DeviceCapability(architecture="gfx942", num_multiprocessors=38)
    part = replace(DETECTED, name="AMD Instinct MI300X", memory_bytes=192 * GIB, capability=capability)
    assert not settle_profile(part, None, allow_mismatch=False)[0].capability.rates
    pairs = DeviceCapability(architecture="gfx1100", num_multiprocessors=48)  # HIP counts pairs of compute units
    card = replace(DETECTED, name="AMD Radeon RX 7900 XTX", memory_bytes=24 * GIB, capability=pairs)
    settled = settle_profile(card, None, allow_mismatch=False)[0].capability
    assert settled.rates["float16"] == 122.8 and settled.num_multiprocessors == 48


def test_an_unknown_architecture_is_told_and_served() -> None:
    old = replace(DETECTED, name="NVIDIA T4", capability=DeviceCapability(architecture="sm_75", warp_width=32))
    profile, decision = settle_profile(old, None, allow_mismatch=False)
    assert replace(profile, provenance={}) == old
    assert decision.reason.startswith("no capability file is packaged for sm_75: detected values only")


def test_a_file_measured_on_another_product_is_told(tmp_path: Path) -> None:
    path = tmp_path / "h100.yaml"
    path.write_text(MINE + "device:\n  name: NVIDIA H100 NVL\n")
    _, decision = settle_profile(DETECTED, str(path), allow_mismatch=False)
    assert decision.reason.endswith("its figures were measured on NVIDIA H100 NVL, and this is NVIDIA H200")
    profile, decision = declare_profile(str(path))
    assert profile.name == "NVIDIA H100 NVL" and profile.bandwidth == 4250.0
    assert profile.capability.rates["float8_e4m3"] == 1670.5  # of the product that was measured
    assert decision.reason == "the file was measured on NVIDIA H100 NVL"


def test_a_small_file_is_explained_over_the_packaged_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    profile, decision = declare_profile(str(path))
    assert (profile.platform, profile.vendor, profile.index) == ("cuda", "NVIDIA", 0)
    assert profile.memory_bytes == 100 * GIB and profile.capability.warp_width == 32
    assert Feature.TRITON in profile.capability.features and Feature.BF16 not in profile.capability.features
    assert "the first product of the file" in decision.reason
    nameless = tmp_path / "new.yaml"
    nameless.write_text("schema: 1\narchitecture: sm_131\n")
    with pytest.raises(Refusal, match="new.yaml: platform: is missing, and no packaged file is of .* sm_131"):
        declared_profile(read_capability_file(str(nameless)))


def test_the_next_architecture_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing knows sm_130. A file anywhere describes it; a file in the packaged folder is found for a device of it."""
    path = tmp_path / "next.yaml"
    path.write_text(NEXT)
    detected = replace(
        DETECTED, name="NVIDIA X130 Ultra", memory_bytes=500 * GIB, capability=DeviceCapability(architecture="sm_130")
    )
    explained, decision = declare_profile(str(path))
    assert (explained.name, explained.bandwidth, decision.value) == ("X130", 16000.0, f"{path}: X130")
    served, decision = settle_profile(detected, str(path), allow_mismatch=False)
    assert served.capability.rates == {"bfloat16": 5000.0} and served.memory_bytes == 512 * GIB
    assert decision.reason.startswith("no capability file is packaged for sm_130")

    monkeypatch.setattr(packaged, "FOLDER", tmp_path)
    packaged.read_packaged.cache_clear()
    found = file_of_architecture("sm_130")
    assert found is not None and product_decision(found).value == "next: X130"
    served, decision = settle_profile(detected, None, allow_mismatch=False)
    assert served.capability.shared_memory_per_block_bytes == 320 * 1024 and served.memory_bytes == 500 * GIB
    assert Feature.BULK_TENSOR_COPY in served.capability.features
    assert decision.reason == "declared by next (X130), then as detected"
    packaged.read_packaged.cache_clear()


def test_merging_nothing_changes_nothing() -> None:
    assert replace(merged(None, DETECTED), provenance={}) == DETECTED


X86 = "model name\t: A processor\nflags\t\t: fpu sse2 {flags}\n"
AVX512 = "avx2 fma f16c avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "architecture"),
    [
        ("x86_64", X86.format(flags=AVX512 + " amx_tile amx_bf16 amx_int8"), "x86_64_amx"),
        ("x86_64", X86.format(flags=AVX512 + " amx_tile"), "x86_64_avx512"),
        ("AMD64", X86.format(flags="avx2 fma f16c avx512f"), "x86_64_avx2"),
        ("x86_64", X86.format(flags="avx"), "x86_64"),
        ("x86_64", "", "x86_64"),
        ("aarch64", "processor\t: 0\nFeatures\t: fp asimd sve bf16\n", "aarch64_sve"),
        ("aarch64", "processor\t: 0\nFeatures\t: fp asimd\n", "aarch64_neon"),
        ("arm64", "", "aarch64_neon"),
        ("riscv64", "isa\t: rv64imafdcv\n", "riscv64"),
    ],
)
def test_processor_family(machine: str, cpuinfo: str, architecture: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert read_processor(machine, tmp_path / "cpuinfo", tmp_path).architecture == architecture


def test_processor_caches_nodes_and_clock(tmp_path: Path) -> None:
    files = {
        "cpu/cpu4/cache/index0/level": "1",
        "cpu/cpu4/cache/index0/type": "Data",
        "cpu/cpu4/cache/index0/size": "48K",
        "cpu/cpu4/cache/index2/level": "2",
        "cpu/cpu4/cache/index2/type": "Unified",
        "cpu/cpu4/cache/index2/size": "2M",
        "cpu/cpu4/cpufreq/cpuinfo_max_freq": "3800000",
        "node/node0/cpulist": "0-3",
        "node/node1/cpulist": "4-6,9",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    one = read_processor("x86_64", tmp_path / "none", tmp_path, frozenset({4, 9}))
    assert (one.l2_bytes, one.numa_node, one.max_clock) == (2 << 20, 1, 3800.0)
    two = read_processor("x86_64", tmp_path / "none", tmp_path, frozenset({3, 4}))
    assert (two.l2_bytes, two.numa_node, two.max_clock) == (None, None, None)


def test_this_processor_is_described() -> None:
    processor = read_processor()
    assert processor.architecture == family(processor.machine, processor.flags)
    if os.uname().machine in ("x86_64", "aarch64") and Path("/proc/cpuinfo").exists():
        assert processor.architecture.startswith(("x86_64", "aarch64_"))


CONFIG = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 256, "head_dim": 32,
"max_position_embeddings": 128, "rms_norm_eps": 1e-5, "torch_dtype": "float32"}"""


def described(folder: Path, **options: object) -> tuple[DeviceProfile, dict[str, str]]:
    (folder / "config.json").write_text(CONFIG)
    configuration = WorkerConfiguration(
        rank=0,
        num_ranks=1,
        generation=1,
        core_address="",
        run_directory=str(folder),
        cache_directory=str(folder),
        model=str(folder),
        platform=None if options.get("explain") else "cpu",
        num_threads=1,
        **options,  # type: ignore[arg-type]
    )
    settled = describe(configuration, lambda line: None)
    return settled.profile, {decision.name: decision.reason for decision in settled.decisions}


def test_boot_settles_the_profile(tmp_path: Path) -> None:
    architecture = read_processor().architecture
    profile, reasons = described(tmp_path)
    assert profile.capability.architecture == architecture and "then as detected" in reasons["device profile"]
    with pytest.raises(
        Refusal, match=f"is for architecture cuda sm_90, but .* is cpu {architecture}; .*--allow-mismatch$"
    ):
        described(tmp_path, device_config="hopper:H200")
    insisted, _ = described(tmp_path, device_config="hopper:H200", allow_mismatch=True)
    assert (insisted.platform, insisted.memory_bytes) == ("cpu", 141 * GIB)
    mine = tmp_path / "mine.yaml"
    mine.write_text(MINE.replace("sm_90", architecture))
    measured, reasons = described(tmp_path, device_config=str(mine))
    assert (measured.name, measured.bandwidth) == (profile.name, 4250.0)
    assert measured.provenance["bandwidth"] is Provenance.MEASURED
    assert reasons["device profile"].endswith(f"then --device-config {mine}")
    explained, reasons = described(tmp_path, device_config="hopper:H200", explain=True)
    assert (explained.platform, explained.name) == ("cuda", "NVIDIA H200")
    assert reasons["device profile"] == "asked for by --device-config"
    with pytest.raises(Refusal, match="did you mean 'hopper'"):
        described(tmp_path, device_config="hoper")
