"""Launch configurations: per kernel one default row, and rows for architectures or families that want another.

A row is laid over the default one, so it names only what differs; a new architecture needs none, or one. What was
measured on the device (`capability.best`) goes over both. Torch-free.

Fields: `block` elements a program handles at once; `num_warps` of one program; `decode_keys`, `tile_keys`: cached
positions an attention program takes at once when the head has 256 bytes (fewer for larger heads); `tile_rows`: query
rows (tokens x heads of a group) of one tile; `*_stages`: loads in flight; `least_tokens`: of a first chunk that cuDNN
takes.

Of `linear`: a program owns whole rows of a weight for up to `gemv_tokens` tokens (`small_tokens` where the weight has
no more than `small_size` numbers), and matrix units take up to `dot_tokens` (at most 32) where it has no more than
`dot_size`, or is a head of at least `head_outputs` rows; `small_dot_tokens` where it has no more than `small_dot_size`;
`programs` is how many of them a multiprocessor should get before inputs are shared out; `tile` counts the inputs (of 16
bits) that a program takes at once, and `early` the tiles it asks for before it waits for the kernel ahead.

Of the fused linears: `rows` of the weight that a program owns, and its `num_warps`, 0 for what `rows_and_warps` says of
the weight's size; `block_k` inputs of a tile at most.

Of decodes' attention: `few_tokens` are done in tiles of `keys` and `warps`, up to `several_tokens` in those for
`several`, more in those of a `crowd`.

`pdl` 1: programs start before the kernel ahead of them has ended, where the device can do that.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ipc.facts import DeviceCapability

Configuration = Mapping[str, int]

_IN_ORDER = {"early": 0, "pdl": 0}
_DEFAULTS: dict[str, Configuration] = {
    "embed": {"block": 1024, "num_warps": 4},
    "rms_norm": {"block": 16384, "num_warps": 8, "pdl": 0},
    "silu_and_mul": {"block": 1024, "num_warps": 4, "pdl": 0},
    "rotary_and_kv_write": {"heads": 4, "num_warps": 2},
    "paged_attention_tiled": {
        "decode_keys": 64,
        "decode_warps": 4,
        "decode_stages": 2,
        "tile_rows": 64,
        "tile_keys": 64,
        "tile_warps": 4,
        "tile_stages": 2,
        "max_splits": 32,
    },
    "paged_attention_bulk": {
        "decode_keys": 64,
        "decode_warps": 4,
        "decode_stages": 3,
        "tile_rows": 64,
        "tile_keys": 64,
        "tile_warps": 4,
        "tile_stages": 2,
        "max_splits": 32,
    },
    "paged_attention_lean": {"tile_rows": 16, "tile_keys": 32, "tile_warps": 2, "tile_stages": 1},
    "first_chunk_attention": {"least_tokens": 2048},
    "linear": {
        "gemv_tokens": 2,
        "small_tokens": 4,
        "small_size": 1 << 22,
        "dot_tokens": 16,
        "dot_size": 1 << 26,
        "small_dot_tokens": 16,
        "small_dot_size": 1 << 23,
        "head_outputs": 1 << 16,
        "programs": 2,
    },
    "linear_gemv": {"rows": 2, "tile": 2048, "num_warps": 4},
    "linear_gemv_head": {"rows": 4, "tile": 1024, "num_warps": 8},
    "linear_dot_small": {"rows": 16, "tile": 256, "num_warps": 2, "num_stages": 4, **_IN_ORDER},
    "linear_dot_middle": {"rows": 32, "tile": 128, "num_warps": 4, "num_stages": 5, **_IN_ORDER},
    "linear_dot_large": {"rows": 64, "tile": 128, "num_warps": 4, "num_stages": 5, **_IN_ORDER},
    "linear_dot_huge": {"rows": 128, "tile": 128, "num_warps": 4, "num_stages": 4, **_IN_ORDER},
    "greedy_sample": {"block": 2048, "num_warps": 4},
    "sample": {"block": 4096, "weighed": 512, "num_warps": 16, "draw_block": 512, "draw_warps": 4},
    "apply_penalties": {"block": 1024, "num_warps": 4},
    "token_logprobs": {"block": 2048, "num_warps": 8},
    "quantize_fp8": {"block": 16384, "num_warps": 8},
    "norm_linear": {"rows": 0, "num_warps": 0, "block_k": 4096, "pdl": 0},
    "norm_gate_up": {"rows": 0, "num_warps": 0, "block_k": 4096, "pdl": 0},
    "linear_add": {"rows": 0, "num_warps": 0, "block_k": 4096, "pdl": 0},
    "decode_attention": {
        "keys": 64,
        "warps": 4,
        "stages": 2,
        "few_tokens": 2,
        "several_tokens": 0,
        "several_keys": 64,
        "several_warps": 4,
        "several_stages": 2,
        "max_splits": 32,
        "crowd_keys": 64,
        "crowd_warps": 4,
        "crowd_stages": 2,
        "pdl": 0,
    },
}

KERNELS = tuple(_DEFAULTS)

_RDNA_TILES = {"tile_rows": 32, "tile_keys": 32, "tile_warps": 8, "tile_stages": 1}
_HOPPER_DECODES = {"decode_keys": 32, "decode_warps": 2, "decode_stages": 3}
_HOPPER_TILES = {"tile_rows": 64, "tile_keys": 64, "tile_warps": 4, "tile_stages": 3}
"""Measured on an H200 with a kernel of the same loop (32/8 heads of 128): by descriptors over blocks of 64 the best of
128 and 64 rows, 410 to 423 TFLOP/s for first chunks and chunks behind a cached prefix alike. The third stage is the
block table's: an entry is there before the copy that it leads to."""
_HOPPER_DOTS: dict[str, Configuration] = {
    "small": {"tile": 128, "num_stages": 6, "pdl": 1},
    "middle": {"rows": 64, "pdl": 1},
}
"""Measured on an H200 over whole decode steps: 32 sequences of the shape of Qwen3-0.6B 1.41 ms -> 1.18, of Llama-3.1-8B
5.03 -> 4.63; an early start gains nothing where a product takes 20 us and more."""
_HOPPER_DECODE_ATTENTION = {
    "warps": 8,
    "stages": 1,
    "max_splits": 64,
    "several_tokens": 16,
    "several_keys": 32,
    "several_warps": 4,
    "several_stages": 1,
    "crowd_warps": 2,
    "crowd_stages": 3,
}
"""Measured on an H200 over whole decode steps of the shape of Qwen3-0.6B: in tiles for several 4 to 16 sequences take 4
to 7 percent less than in those of a crowd, 32 take as long."""
_WITHOUT_WARP_GROUPS = ("sm_80", "sm_86", "sm_89", "sm_120")
_EARLY_START: dict[str, Configuration] = {architecture: {"pdl": 1} for architecture in ("sm_90", "sm_100", "sm_120")}
_ROWS: dict[str, dict[str, Configuration]] = {
    "paged_attention_tiled": {
        **{architecture: {"tile_keys": 32} for architecture in _WITHOUT_WARP_GROUPS},
        "sm_90": {**_HOPPER_DECODES, **_HOPPER_TILES},
        "cdna": {"decode_keys": 32, "tile_keys": 32, "tile_stages": 1},
        "rdna": {"decode_keys": 32, "decode_warps": 8, "decode_stages": 1, **_RDNA_TILES},
    },
    "paged_attention_bulk": {"sm_90": {**_HOPPER_DECODES, **_HOPPER_TILES}},
    "paged_attention_lean": {"rdna": {"tile_warps": 8}},
    "linear": {"rdna": {"gemv_tokens": 1}, "sm_90": {"dot_tokens": 32, "small_dot_tokens": 32}},
    **{
        f"linear_dot_{size}": {
            **{architecture: {"num_stages": 3} for architecture in ("sm_86", "sm_89", "sm_120")},
            **{name: {"num_stages": 2} for name in ("cdna", "rdna")},
            **({"sm_90": _HOPPER_DOTS[size]} if size in _HOPPER_DOTS else {}),
        }
        for size in ("small", "middle", "large", "huge")
    },
    "sample": {"cdna": {"block": 512, "weighed": 256, "num_warps": 4}},
    "rms_norm": _EARLY_START,
    "silu_and_mul": _EARLY_START,
    "norm_linear": _EARLY_START,
    "norm_gate_up": _EARLY_START,
    "linear_add": {**_EARLY_START, "sm_100": {"num_warps": 8, "pdl": 1}, "rdna": {"rows": 2, "num_warps": 8}},
    "decode_attention": {
        **_EARLY_START,
        "sm_90": {**_HOPPER_DECODE_ATTENTION, "pdl": 1},
    },
}
"""Kernel -> architecture or family -> what differs from the default."""

_FAMILIES = (("sm_", "nvidia"), ("gfx9", "cdna"), ("gfx1", "rdna"))
"""First letters of a compiler's name for an architecture -> family."""


def family(architecture: str) -> str | None:
    """The family whose rows an architecture takes where it has none of its own."""
    return next((name for prefix, name in _FAMILIES if architecture.startswith(prefix)), None)


def configuration(name: str, capability: DeviceCapability) -> dict[str, int]:
    """The row for `name` on this device. Raises ValueError for a measured choice that names no field or no size."""
    default, rows = _DEFAULTS[name], _ROWS.get(name, {})
    chosen = {**default, **rows.get(family(capability.architecture) or "", {}), **rows.get(capability.architecture, {})}
    measured = capability.best.get(name, {})
    for field, value in measured.items():
        _check(name, field, value, default)
    return {**chosen, **measured}


def _check(name: str, field: str, value: int, default: Configuration) -> None:
    if field not in default:
        raise ValueError(f"capability.best.{name} has no field {field}; there are {', '.join(default)}")
    if field == "pdl":
        if value not in (0, 1):
            raise ValueError(f"capability.best.{name}.pdl is {value}: give 0 or 1")
        return
    if field == "early":
        if not 0 <= value <= 8:
            raise ValueError(f"capability.best.{name}.early is {value}: give 0 to 8 tiles")
        return
    if field == "several_tokens" and value == 0:
        return
    is_count = field.endswith(("_stages", "_tokens")) or field in ("max_splits", "programs")
    if value < 1 or (not is_count and value & (value - 1)):
        wanted = "a positive number" if is_count else "a power of two"
        raise ValueError(f"capability.best.{name}.{field} is {value}: give {wanted}")


def linear_blocks(capability: DeviceCapability) -> dict[str, Configuration]:
    """Every row whose name begins with `linear`, by name."""
    return {name: configuration(name, capability) for name in _DEFAULTS if name.startswith("linear")}


def gemv_of_weight(
    blocks: Mapping[str, Configuration], num_tokens: int, num_outputs: int, num_inputs: int
) -> Configuration | None:
    """How programs that own whole rows go through a weight; None where they are not the way for so many tokens.

    Measured on an H200 with the linears of a 0.6B and an 8B model, as are those below: for one token 27 and 10 percent
    faster than cuBLAS in sum (heads included), for two 34 and 4; for four only where a weight is small.
    """
    limits = blocks["linear"]
    is_small = num_outputs * num_inputs <= limits["small_size"] and num_inputs >= 2048
    if num_tokens > min(4, limits["small_tokens"] if is_small else limits["gemv_tokens"]):
        return None
    is_head = num_outputs >= limits["head_outputs"] and num_inputs < 2048
    return blocks["linear_gemv_head" if is_head else "linear_gemv"]


_DOT_SIZES: tuple[tuple[int, str], ...] = ((3 << 21, "small"), (1 << 25, "middle"), (1 << 28, "large"))
"""Numbers a weight has less than -> its rows in the table; beyond: huge."""


def dot_of_weight(
    blocks: Mapping[str, Configuration], num_tokens: int, num_outputs: int, num_inputs: int
) -> Configuration | None:
    """The same for matrix units with padded tokens: 4 to 16 tokens 14 percent faster on the small model, 3 on the
    large one, whose widest weights gain nothing.
    """
    limits, size = blocks["linear"], num_outputs * num_inputs
    most_tokens = limits["small_dot_tokens" if size <= limits["small_dot_size"] else "dot_tokens"]
    if num_tokens > min(32, most_tokens) or (size > limits["dot_size"] and num_outputs < limits["head_outputs"]):
        return None
    name = next((name for limit, name in _DOT_SIZES if size < limit), "huge")
    return blocks[f"linear_dot_{name}"]


_ROWS_AND_WARPS: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "norm_linear": ((1 << 15, 1 << 10, 4, 1), (1 << 60, 1 << 10, 16, 8), (1 << 60, 1 << 60, 4, 4)),
    "norm_gate_up": ((1 << 60, 1 << 10, 2, 2), (1 << 60, 1 << 60, 2, 4)),
    "linear_add": (
        (1 << 60, 1 << 11, 4, 2),
        (1 << 60, 3 << 10, 8, 8),
        (1 << 60, 1 << 13, 4, 8),
        (1 << 60, 1 << 60, 4, 4),
    ),
}
"""Kernel -> (outputs up to, inputs up to, rows, warps), the first that fits. Measured on an H200 in bfloat16 with one
token and an early start, over whole decode steps of the shapes of Qwen3-0.6B and Llama-3.1-8B; others take those of the
next size measured.
"""


def rows_and_warps(name: str, num_outputs: int, num_inputs: int, chosen: Configuration) -> tuple[int, int]:
    """How many rows of a weight `[num_outputs, num_inputs]` one program of a fused linear owns, and its warps: what the
    configuration says, or what suits the size."""
    suited = next(
        (rows, warps)
        for most_outputs, most_inputs, rows, warps in _ROWS_AND_WARPS[name]
        if num_outputs <= most_outputs and num_inputs <= most_inputs
    )
    return chosen["rows"] or suited[0], chosen["num_warps"] or suited[1]


def starts_early(architecture: str, chosen: Configuration) -> bool:
    """Whether a kernel's programs start before the kernel ahead of them has ended (programmatic dependent launch):
    NVIDIA's from Hopper on can, and only where the configuration asks for it.
    """
    can = family(architecture) == "nvidia" and int(architecture.removeprefix("sm_")) >= 90
    return can and chosen["pdl"] == 1


def early_start(architecture: str, chosen: Configuration) -> dict[str, bool]:
    """The constants of a launch that may start early: PDL for the kernel, and the launch's own option."""
    starts = starts_early(architecture, chosen)
    return {"PDL": starts, **({"launch_pdl": True} if starts else {})}


def keys_of_head(num_keys: int, head_bytes: int, dtype: str) -> int:
    """How many cached positions a program takes when a (padded) head has `head_bytes`: fewer for a large head, no more
    than 32 in float32, whose products take several passes; 16 at the least.
    """
    most = 32 if dtype == "float32" else num_keys
    return max(16, min(num_keys, most, num_keys * 256 // head_bytes))


def rows_of_head(num_rows: int, head_bytes: int, dtype: str) -> int:
    """How many query rows a tile has, likewise: its sums stay in registers."""
    return max(16, min(num_rows, 32 if dtype == "float32" else num_rows, num_rows * 256 // head_bytes))


_MATRIX_FLOAT32 = ("nvidia", "cdna")
"""Families with matrix units that take float32, whole or in three passes."""

WIDE_BYTES = 1024
"""From here on a (padded) head is wide: float32 of more than 128 channels."""


def warps_of_head(num_warps: int, head_bytes: int) -> int:
    """At least eight for a wide head, whose sums and values must find room in registers."""
    return max(8, num_warps) if head_bytes >= WIDE_BYTES else num_warps


def channels_of_chunk(architecture: str, num_channels: int, head_bytes: int, dtype: str) -> int:
    """How many channels of queries and keys are multiplied at a time: all, or few of a wide head.

    Without matrix units for float32 a thread holds whole rows and columns of the factors, so fewer still.
    """
    if family(architecture) in _MATRIX_FLOAT32:
        return num_channels if head_bytes < WIDE_BYTES else 64
    return num_channels if dtype != "float32" else min(32, num_channels)


def register_limit(architecture: str, num_warps: int) -> dict[str, int]:
    """The launch option that lets a program have all registers it can: NVIDIA's assembler would otherwise spill a few
    for the sake of more programs at once. Other compilers know no such option.
    """
    if family(architecture) != "nvidia":
        return {}
    return {"maxnreg": min(255, 65536 // (32 * num_warps))}


def dot_precision(architecture: str) -> str:
    """How products of float32 are made: three passes of the NVIDIA matrix units, IEEE elsewhere."""
    return "tf32x3" if family(architecture) == "nvidia" else "ieee"
