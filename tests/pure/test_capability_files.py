"""The packaged capability files: all there, all sourced, plausible and consistent with their architecture."""

import re
from collections.abc import Iterator

import pytest
from msgspec.structs import fields

from trimaran.device_workers.profiles.capability_file import MEASURED, CapabilityFile, Figure
from trimaran.device_workers.profiles.declared import architecture_profile, declared_profile, product_decision
from trimaran.device_workers.profiles.packaged import (
    file_of_architecture,
    packaged_names,
    processor_files,
    product_of_device,
    read_capability_file,
)
from trimaran.device_workers.profiles.vocabulary import KEYS
from trimaran.ipc.facts import DeviceCapability, DeviceProfile, Feature, Provenance
from trimaran.tools.capability_table import PAGE, renewed

KIB, GIB = 1 << 10, 1 << 30
ARCHITECTURES = {
    "ampere": "sm_80",
    "ampere_sm86": "sm_86",
    "ada": "sm_89",
    "hopper": "sm_90",
    "blackwell": "sm_100",
    "blackwell_sm120": "sm_120",
    "gfx90a": "gfx90a",
    "gfx942": "gfx942",
    "gfx950": "gfx950",
    "gfx1100": "gfx1100",
    "gfx1201": "gfx1201",
    "ascend_910b": "ascend910b",
    "xe_hpc": "xe_hpc",
    "arc": "xe_hpg",
    "apple_m": "apple_m",
    "x86_64_avx2": "x86_64_avx2",
    "x86_64_avx512": "x86_64_avx512",
    "x86_64_amx": "x86_64_amx",
    "arm_neon": "aarch64_neon",
    "arm_sve": "aarch64_sve",
}
# As the vendors' tables have them; what a kernel compiled for the architecture is checked against.
SHARED_MEMORY_KIB = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_120": 99,
    "gfx90a": 64,
    "gfx942": 64,
    "gfx950": 160,
    "gfx1100": 64,
    "gfx1201": 64,
}
FEATURE_OF_DTYPE = {
    "float16": Feature.FP16,
    "bfloat16": Feature.BF16,
    "float8_e4m3": Feature.FP8_E4M3,
    "float8_e5m2": Feature.FP8_E5M2,
    "int8": Feature.INT8,
    "int4": Feature.INT4,
}
NAMES = packaged_names()


def figures(file: CapabilityFile) -> Iterator[tuple[str, Figure]]:
    places = {"": file.figures} | {f"{product.name}: ": product.figures for product in file.products}
    for place, held in places.items():
        for key, entries in held.items():
            for entry, figure in entries.items():
                yield f"{place}{key}.{entry}", figure


def test_every_architecture_has_its_file() -> None:
    assert {name: read_capability_file(name).architecture for name in NAMES} == ARCHITECTURES


MEASURED_ON_H200 = {
    "num_multiprocessors",
    "l2_bytes",
    "concurrent_blocks",
    "launch_latency_us",
    "graph_launch_us",
    "copy_to_device",
    "copy_from_device",
}


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_vendor_document(name: str) -> None:
    file = read_capability_file(name)
    assert file.title and file.platform and file.vendor and file.products
    for document in file.documents.values():
        assert document.title and document.section and document.address.startswith("https://"), document
    used = set()
    for where, figure in figures(file):
        if figure.source == MEASURED:  # where no vendor publishes it, and we had the device
            assert where.removeprefix("H200: ").removesuffix(".") in MEASURED_ON_H200, where
            assert figure.date == "2026-11-30"
            continue
        assert figure.source in file.documents, where
        used.add(figure.source)
    assert set(file.documents) == used


@pytest.mark.parametrize("name", NAMES)
def test_rates_are_dense_and_of_types_that_the_device_has(name: str) -> None:
    file = read_capability_file(name)
    for product in file.products:
        capability = declared_profile(file, product.name).capability
        rates = capability.rates
        for dtype in rates:
            feature = FEATURE_OF_DTYPE.get(dtype)
            assert feature is None or feature in capability.features, (product.name, dtype)
        if "float16" in rates and "bfloat16" in rates:
            assert rates["float16"] == rates["bfloat16"]
        for wide, narrow in (("float16", "float8_e4m3"), ("float16", "float8_e4m3fnuz"), ("float8_e4m3", "float4")):
            if wide in rates and narrow in rates:  # FP32 accumulation: twice, and four times on cards with FP4
                assert 1.9 < rates[narrow] / rates[wide] < 4.1, product.name
        clock, cores = _clock_and_cores(file, product.name)
        if clock and cores and "float16" in rates and file.vendor == "NVIDIA":
            per_clock = rates["float16"] * 1e6 / clock / cores  # operations of a multiprocessor in a clock
            assert per_clock in (pytest.approx(512, rel=0.02), pytest.approx(2048, rel=0.02)), product.name


def _clock_and_cores(file: CapabilityFile, product: str) -> tuple[float | None, int | None]:
    profile = declared_profile(file, product)
    return profile.clocks.get("sm"), profile.capability.num_multiprocessors


@pytest.mark.parametrize(("architecture", "kib"), SHARED_MEMORY_KIB.items())
def test_shared_memory_of_a_block(architecture: str, kib: int) -> None:
    file = file_of_architecture(architecture)
    assert file is not None
    capability = architecture_profile(file).capability
    assert capability.shared_memory_per_block_bytes == kib * KIB
    whole = capability.shared_memory_per_multiprocessor_bytes
    assert whole is None or whole - kib * KIB in (0, KIB)  # CUDA keeps 1 KiB of each block for itself
    assert capability.warp_width == (64 if architecture in ("gfx90a", "gfx942", "gfx950") else 32)


@pytest.mark.parametrize(
    ("feature", "having"),
    [
        (Feature.BULK_TENSOR_COPY, {"sm_90", "sm_100", "sm_120"}),
        (Feature.WARP_GROUP_MATRIX, {"sm_90"}),
        (Feature.FP8_E4M3, {"sm_89", "sm_90", "sm_100", "sm_120", "gfx950", "gfx1201"}),
        (Feature.FP8_E5M2, {"sm_89", "sm_90", "sm_100", "sm_120", "gfx950", "gfx1201"}),
        (Feature.INT4, {"sm_80", "sm_86", "sm_89", "gfx1100", "gfx1201"}),
        (Feature.BF16_ATOMICS, {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", "gfx1201"}),
        (Feature.TRITON, set(SHARED_MEMORY_KIB)),
        (Feature.CPP_COMPILER, set()),
        (Feature.FP64, set(ARCHITECTURES.values()) - {"xe_hpg", "apple_m", "ascend910b"}),
        (Feature.BF16, set(ARCHITECTURES.values())),
    ],
)
def test_features_by_architecture(feature: Feature, having: set[str]) -> None:
    declared = {
        architecture
        for name, architecture in ARCHITECTURES.items()
        if feature in architecture_profile(read_capability_file(name)).capability.features
    }
    assert declared == having


@pytest.mark.parametrize(
    ("name", "driver", "memory_gib", "bandwidth", "bfloat16"),
    [
        ("ampere:A100 SXM 80GB", "NVIDIA A100-SXM4-80GB", 80, 2039, 312),
        ("ampere_sm86:rtx-3090", "NVIDIA GeForce RTX 3090", 24, 936, 71),
        ("ada:RTX 4090", "NVIDIA GeForce RTX 4090", 24, 1008, 165.2),
        ("hopper:H100 SXM", "NVIDIA H100 80GB HBM3", 80, 3350, 989.4),
        ("hopper:h200", "NVIDIA H200", 141, 4800, 989.5),
        ("blackwell:B200", "NVIDIA B200", 180, 8000, 2250),
        ("blackwell_sm120:RTX 5090", "NVIDIA GeForce RTX 5090", 32, 1792, 209.5),
        ("gfx90a:MI210", "AMD Instinct MI210", 64, 1638.4, 181),
        ("gfx942:MI300X", "AMD Instinct MI300X", 192, 5300, 1307.4),
        ("gfx950:MI355X", "AMD Instinct MI355X", 288, 8000, 2500),
        ("gfx1100:RX 7900 XTX", "AMD Radeon RX 7900 XTX", 24, 960, None),
        ("gfx1201:R9700", "AMD Radeon AI PRO R9700", 32, 640, None),
        ("xe_hpc:Max 1100", "Intel(R) Data Center GPU Max 1100", 48, 1228.8, 355.5),
        ("arc:A770", "Intel(R) Arc(TM) A770 Graphics", 16, 560, None),
    ],
)
def test_products(name: str, driver: str, memory_gib: int, bandwidth: float, bfloat16: float | None) -> None:
    file = read_capability_file(name)
    assert file.chosen is not None and product_of_device(file, driver) == file.chosen
    profile = declared_profile(file)
    assert profile.memory_bytes == memory_gib * GIB
    assert profile.bandwidth == bandwidth
    assert profile.capability.rates.get("bfloat16") == bfloat16
    assert set(profile.provenance.values()) <= {Provenance.DECLARED, Provenance.MEASURED}
    assert {"memory_bytes", "capability.features.bf16", "capability.architecture"} <= set(profile.provenance)


@pytest.mark.parametrize("name", NAMES)
def test_each_driver_name_is_one_products(name: str) -> None:
    file = read_capability_file(name)
    for product in file.products:
        for pattern in product.device_names:
            assert product_of_device(file, pattern.replace("*", "x")) == product, pattern
            assert re.fullmatch(r"[^\[\]]+", pattern)


@pytest.mark.parametrize(
    ("name", "driver"),
    [
        ("hopper", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
        ("ada", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        ("hopper", "NVIDIA H800"),
    ],
)
def test_slices_and_relatives_take_no_products_figures(name: str, driver: str) -> None:
    assert product_of_device(read_capability_file(name), driver) is None


def test_architectures_as_compilers_and_drivers_spell_them() -> None:
    for spelling in ("gfx942:sramecc+:xnack-", "GFX942"):
        found = file_of_architecture(spelling)
        assert found is not None and found.label == "gfx942"
    for spelling, label in (("sm_90a", "hopper"), ("sm_100f", "blackwell"), ("xe2_hpg", "arc"), ("arm_sve", "arm_sve")):
        found = file_of_architecture(spelling)
        assert found is not None and found.label == label
    assert file_of_architecture("sm_75") is None
    assert file_of_architecture("sm_9") is None


def test_processor_families_go_from_demanding_to_plain() -> None:
    families = [file.architecture for file in processor_files("x86_64")]
    assert families == ["x86_64_amx", "x86_64_avx512", "x86_64_avx2"]
    assert [file.architecture for file in processor_files("aarch64")] == ["aarch64_sve", "aarch64_neon"]
    assert processor_files("") == processor_files("riscv64") == ()


def test_a_file_without_a_product_takes_the_first_and_says_so() -> None:
    file = read_capability_file("hopper")
    assert declared_profile(file).name == "NVIDIA H100 80GB HBM3"
    decision = product_decision(file)
    assert decision.value == "hopper: H100 SXM"
    assert "the first product of the file; --device-config hopper:NAME takes H100 PCIe, " in decision.reason
    assert declared_profile(file, "H200 NVL", index=3).index == 3
    assert product_decision(read_capability_file("hopper:H200")).overridden
    whole = architecture_profile(file)
    assert whole.name == "NVIDIA Hopper" and whole.memory_bytes is None


def test_every_field_of_a_profile_is_a_figure_or_identity() -> None:
    """A1: what the facts have, a file can say; what it cannot say only a live device can."""
    identity = {"platform", "vendor", "name", "index", "uuid", "pci_bus_id", "driver", "runtime", "libraries"}
    structure = {"capability", "provenance", "architecture"}
    known = {each.name for struct in (DeviceProfile, DeviceCapability) for each in fields(struct)}
    assert set(KEYS) == known - identity - structure


def test_the_page_lists_the_files() -> None:
    page = PAGE.read_text()
    assert page == renewed(page), "run python tools/capability_table.py --write"
    for key in KEYS:
        assert f"`{key}`" in page
