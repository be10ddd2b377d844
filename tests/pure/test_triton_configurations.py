"""Launch configurations: default rows, rows of families and architectures, what was measured; and which attention each
architecture is offered. No torch, no Triton.
"""

import subprocess
import sys

import pytest
from msgspec.structs import replace

from trimaran.ipc.facts import AttentionStrategy, DeviceCapability, Problem
from trimaran.kernels.catalog import CATALOG
from trimaran.kernels.in_triton import configurations
from trimaran.kernels.in_triton.configurations import (
    channels_of_chunk,
    configuration,
    dot_of_weight,
    dot_precision,
    gemv_of_weight,
    keys_of_head,
    linear_blocks,
    register_limit,
    rows_and_warps,
    rows_of_head,
    starts_early,
    warps_of_head,
)
from trimaran.kernels.registry import KernelChoices, Registry
from trimaran.tools.compile_matrix import TARGETS

KERNELS = tuple(configurations._DEFAULTS)
LLAMA = {"head_dim": 128, "num_heads": 32, "num_kv_heads": 8, "hidden_size": 4096}


def capability(architecture: str, **best: dict[str, int]) -> DeviceCapability:
    return DeviceCapability(architecture=architecture, best=best)


def problem(dtype: str = "bfloat16", *, block_size: int = 16, strategy: AttentionStrategy | None = None) -> Problem:
    return Problem(dtype=dtype, kv_dtype=dtype, block_size=block_size, attention_strategy=strategy, **LLAMA)


@pytest.mark.parametrize("architecture", ["sm_130", "gfx1300", "gfx960", "xe_hpc", "something_new"])
@pytest.mark.parametrize("name", KERNELS)
def test_an_architecture_nobody_knows_needs_no_row(name: str, architecture: str) -> None:
    row = configuration(name, capability(architecture))
    assert row.keys() == configurations._DEFAULTS[name].keys()
    relatives = {"sm_130": "nvidia", "gfx1300": "rdna", "gfx960": "cdna"}
    changes = configurations._ROWS.get(name, {}).get(relatives.get(architecture, ""), {})
    assert row == {**configurations._DEFAULTS[name], **changes}


def test_one_row_is_all_that_a_new_architecture_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"gfx1300": {"tile_warps": 16}, **configurations._ROWS["paged_attention_tiled"]}
    monkeypatch.setitem(configurations._ROWS, "paged_attention_tiled", rows)
    row = configuration("paged_attention_tiled", capability("gfx1300"))
    assert (row["tile_warps"], row["tile_keys"], row["max_splits"]) == (16, 32, 32)
    assert configuration("paged_attention_tiled", capability("gfx1301"))["tile_warps"] == 8


def test_rows_only_name_fields_that_exist() -> None:
    for name, rows in configurations._ROWS.items():
        for row in rows.values():
            assert row.keys() <= configurations._DEFAULTS[name].keys()


def test_what_was_measured_goes_over_the_table() -> None:
    measured = capability("sm_90", rms_norm={"num_warps": 16}, embed={})
    assert configuration("rms_norm", measured) == {"block": 16384, "num_warps": 16, "pdl": 1}
    assert configuration("silu_and_mul", measured) == configuration("silu_and_mul", capability("sm_90"))


def test_the_way_through_a_weight_depends_on_its_size_and_the_tokens() -> None:
    """What was measured on the linears of two models (outputs, inputs)."""
    blocks = linear_blocks(capability("sm_90"))
    for weight in ((4096, 1024), (28672, 4096), (128256, 4096)):
        assert gemv_of_weight(blocks, 2, *weight) == blocks["linear_gemv"]
        assert gemv_of_weight(blocks, 3, *weight) is None
    assert gemv_of_weight(blocks, 4, 1024, 2048) == blocks["linear_gemv"]
    assert gemv_of_weight(blocks, 5, 1024, 2048) is None
    assert gemv_of_weight(blocks, 1, 151936, 1024) == blocks["linear_gemv_head"]
    sizes = {(4096, 1024): "small", (6144, 1024): "middle", (4096, 14336): "large", (128256, 4096): "huge"}
    for weight, size in sizes.items():
        assert dot_of_weight(blocks, 32, *weight) == blocks[f"linear_dot_{size}"]
        assert dot_of_weight(blocks, 33, *weight) is None
    older = linear_blocks(capability("sm_80"))
    assert dot_of_weight(older, 16, 4096, 1024) == older["linear_dot_small"]
    assert dot_of_weight(older, 17, 4096, 1024) is None
    assert dot_of_weight(blocks, 8, 28672, 4096) is None
    wide = linear_blocks(capability("sm_80", linear={"small_dot_tokens": 48}))
    assert dot_of_weight(wide, 32, 6144, 1024) == wide["linear_dot_middle"]
    assert dot_of_weight(wide, 33, 6144, 1024) is None, "no more are padded for"
    assert dot_of_weight(wide, 17, 6144, 4096) is None
    measured = linear_blocks(capability("sm_90", linear={"gemv_tokens": 1}, linear_gemv={"rows": 4}))
    assert gemv_of_weight(measured, 2, 4096, 1024) is None
    assert gemv_of_weight(measured, 1, 4096, 1024) == {"rows": 4, "tile": 2048, "num_warps": 4}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("num_warp", 4, "has no field num_warp; there are block, num_warps"),
        ("num_warps", 3, "is 3: give a power of two"),
        ("block", 0, "is 0: give a power of two"),
        ("block", -8, "is -8: give a power of two"),
    ],
)
def test_what_cannot_have_been_measured(field: str, value: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        configuration("embed", capability("sm_90", embed={field: value}))


def test_counts_need_not_be_powers_of_two() -> None:
    best = {"decode_stages": 3, "max_splits": 24}
    assert configuration("paged_attention_tiled", capability("sm_90", paged_attention_tiled=best))["max_splits"] == 24
    with pytest.raises(ValueError, match="give a positive number"):
        configuration("paged_attention_tiled", capability("sm_90", paged_attention_tiled={"decode_stages": 0}))


def test_an_early_start_needs_the_hardware_and_the_wish() -> None:
    def early(architecture: str, **best: dict[str, int]) -> bool:
        return starts_early(architecture, configuration("norm_linear", capability(architecture, **best)))

    assert [early(name) for name in TARGETS] == [name in ("sm_90", "sm_100", "sm_120") for name in TARGETS]
    assert not early("sm_90", norm_linear={"pdl": 0})
    assert not early("sm_89", norm_linear={"pdl": 1})
    assert not early("interpreter", norm_linear={"pdl": 1})
    with pytest.raises(ValueError, match="early is 9: give 0 to 8 tiles"):
        configuration("linear_dot_small", capability("sm_90", linear_dot_small={"early": 9}))
    with pytest.raises(ValueError, match="pdl is 2: give 0 or 1"):
        configuration("norm_linear", capability("sm_90", norm_linear={"pdl": 2}))


def test_rows_and_warps_follow_the_weight() -> None:
    """As measured on whole steps of two models: query-key-value, output, gate and up, down, head."""

    def suited(name: str, num_outputs: int, num_inputs: int, **best: dict[str, int]) -> tuple[int, int]:
        return rows_and_warps(name, num_outputs, num_inputs, configuration(name, capability("sm_90", **best)))

    assert suited("norm_linear", 4096, 1024) == (4, 1)
    assert suited("norm_linear", 151936, 1024) == (16, 8)
    assert suited("norm_gate_up", 3072, 1024) == (2, 2)
    assert (suited("linear_add", 1024, 2048), suited("linear_add", 1024, 3072)) == ((4, 2), (8, 8))
    assert (suited("norm_linear", 6144, 4096), suited("norm_linear", 128256, 4096)) == ((4, 4), (4, 4))
    assert suited("norm_gate_up", 14336, 4096) == (2, 4)
    assert (suited("linear_add", 4096, 4096), suited("linear_add", 4096, 14336)) == ((4, 8), (4, 4))
    assert suited("linear_add", 1024, 2048, linear_add={"rows": 16}) == (16, 2)


def test_tiles_shrink_with_the_head() -> None:
    assert [keys_of_head(64, size, "bfloat16") for size in (64, 256, 512, 1024, 4096)] == [64, 64, 32, 16, 16]
    assert [rows_of_head(64, size, "bfloat16") for size in (64, 256, 512)] == [64, 64, 32]
    assert (keys_of_head(64, 256, "float32"), rows_of_head(64, 256, "float32")) == (32, 32)
    assert (warps_of_head(4, 512), warps_of_head(4, 1024), warps_of_head(16, 1024)) == (4, 8, 16)


def test_float32_products() -> None:
    assert [dot_precision(name) for name in ("sm_80", "gfx942", "gfx1100", "xe_hpc")] == ["tf32x3", *["ieee"] * 3]
    assert channels_of_chunk("sm_90", 256, 1024, "float32") == 64
    assert channels_of_chunk("sm_90", 128, 512, "float32") == 128
    assert channels_of_chunk("gfx1100", 128, 512, "float32") == 32
    assert channels_of_chunk("gfx1100", 256, 512, "bfloat16") == 256


def test_only_nvidia_knows_the_register_limit() -> None:
    assert register_limit("sm_90", 4) == {"maxnreg": 255}
    assert register_limit("sm_90", 16) == {"maxnreg": 128}
    assert register_limit("gfx942", 4) == register_limit("xe_hpc", 4) == {}


@pytest.mark.parametrize("architecture", TARGETS)
@pytest.mark.parametrize("strategy", AttentionStrategy)
def test_each_architecture_gets_the_attention_it_asks_for(architecture: str, strategy: AttentionStrategy) -> None:
    """Bulk copies where there are any; everything else everywhere; long first chunks by cuDNN where that may be."""
    first = "cudnn" if architecture.startswith("sm_") else "triton"
    has_bulk = architecture in ("sm_90", "sm_100")
    expected = {
        AttentionStrategy.BULK_COPY: f"{first}_paged_attention_{'bulk' if has_bulk else 'tiled'}",
        AttentionStrategy.TILED: f"{first}_paged_attention_tiled",
        AttentionStrategy.LOW_OCCUPANCY: "triton_paged_attention_lean",
        AttentionStrategy.PLAIN: "gathered_attention",
    }
    profile = TARGETS[architecture].profile()
    resolution = Registry(CATALOG).resolve("paged_attention", profile, problem(strategy=strategy))
    assert resolution.chosen == expected[strategy]


def test_blocks_that_no_bulk_copy_takes() -> None:
    profile = TARGETS["sm_90"].profile()
    asked = problem(block_size=24, strategy=AttentionStrategy.BULK_COPY)
    resolution = Registry(CATALOG).resolve("paged_attention", profile, asked)
    assert resolution.chosen == "cudnn_paged_attention_tiled"
    assert resolution.rejected["triton_paged_attention_bulk"] == "takes block sizes 16, 32, 64, 128, not 24"


def test_cudnn_goes_with_what_does_the_rest() -> None:
    """Not in float32 nor for large heads; and not where the user forbids either half."""
    registry, profile = Registry(CATALOG), TARGETS["sm_90"].profile()
    asked = problem(block_size=64, strategy=AttentionStrategy.BULK_COPY)
    for refused in (problem("float32", block_size=64), replace(asked, head_dim=256)):
        assert registry.resolve("paged_attention", profile, refused).chosen == "triton_paged_attention_bulk"
    for forbidden, chosen in (
        ("cudnn_paged_attention_bulk", "triton_paged_attention_bulk"),
        ("triton_paged_attention_bulk", "cudnn_paged_attention_tiled"),
    ):
        choices = KernelChoices.from_options(forbidden=[forbidden])
        resolution = registry.resolve("paged_attention", profile, asked, choices)
        assert resolution.chosen == chosen
    made_with = "made with triton_paged_attention_bulk, which is forbidden by --without-kernel"
    assert resolution.rejected["cudnn_paged_attention_bulk"] == made_with


def test_the_table_needs_neither_torch_nor_triton() -> None:
    code = (
        "import sys\n"
        "from trimaran.kernels.in_triton import configurations\n"
        "from trimaran.kernels.catalog import CATALOG\n"
        "assert not {'torch', 'triton'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
