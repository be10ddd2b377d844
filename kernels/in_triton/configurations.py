"""Launch configurations: per kernel one default row, and rows for architectures or families that want another.

A row is laid over the default one, so it names only what differs; a new architecture needs none, or one. What was
measured on the device (`capability.best`) goes over both. Torch-free.

Fields: `block` elements a program handles at once; `num_warps` of one program; `decode_keys`, `tile_keys`: cached
positions an attention program takes at once when the head has 256 bytes (fewer for larger heads); `tile_rows`: query
rows (tokens x heads of a group) of one tile; `*_stages`: loads in flight.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ipc.facts import DeviceCapability

Configuration = Mapping[str, int]

_DEFAULTS: dict[str, Configuration] = {
    "embed": {"block": 1024, "num_warps": 4},
    "rms_norm": {"block": 16384, "num_warps": 8},
    "silu_and_mul": {"block": 1024, "num_warps": 4},
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
    "greedy_sample": {"block": 2048, "num_warps": 4},
    "sample": {"block": 2048, "weighed": 512, "num_warps": 8},
    "apply_penalties": {"block": 1024, "num_warps": 4},
    "token_logprobs": {"block": 2048, "num_warps": 8},
    "quantize_fp8": {"block": 16384, "num_warps": 8},
}

_ROWS: dict[str, dict[str, Configuration]] = {}

_FAMILIES = (("sm_", "nvidia"), ("gfx9", "cdna"), ("gfx1", "rdna"))
"""First letters of a compiler's name for an architecture -> family."""

WITHOUT_MATRIX_FLOAT32 = ("rdna",)
"""Families whose matrix units take no float32: products then run lane by lane and want small tiles."""


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
    is_count = field.endswith("_stages") or field == "max_splits"
    if value < 1 or (not is_count and value & (value - 1)):
        wanted = "a positive number" if is_count else "a power of two"
        raise ValueError(f"capability.best.{name}.{field} is {value}: give {wanted}")


def keys_of_head(num_keys: int, head_bytes: int) -> int:
    """How many cached positions a program takes when a (padded) head has `head_bytes`; 16 at the least."""
    return max(16, min(num_keys, num_keys * 256 // head_bytes))


def dot_precision(architecture: str) -> str:
    """How products of float32 are made: three passes of the NVIDIA matrix units, IEEE elsewhere."""
    return "tf32x3" if family(architecture) == "nvidia" else "ieee"
