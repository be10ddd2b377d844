"""The figures that a capability file may hold: key, unit, sane range and place in a profile.

The ranges catch a wrong unit (GiB where bytes are meant, TB/s for GB/s, GHz for MHz); they do not judge devices.
"""

from enum import StrEnum

from msgspec import Struct

from ...ipc.facts import Feature

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


class Kind(StrEnum):
    """What a figure's value is made of."""

    SIZE = "a size in bytes"
    COUNT = "a whole number"
    NUMBER = "a number"
    FLAG = "true or false"
    TEXT = "a text"
    CHOICES = "a mapping of launch choices to whole numbers"


class Key(Struct, frozen=True, kw_only=True):
    """One figure. `low` and `high` are inclusive; `low` binds declared values only, a measurement may be small.

    `of` names the entries of a mapping ("dtype": one figure for each); `entries` lists them where they are closed.
    """

    name: str
    kind: Kind
    unit: str
    low: float = 0.0
    high: float = 0.0
    hint: str = ""
    in_capability: bool = True
    of: str = ""
    entries: tuple[str, ...] = ()
    is_power_of_two: bool = False

    def provenance_key(self, entry: str = "") -> str:
        """As `DeviceProfile.provenance` spells it."""
        place = f"capability.{self.name}" if self.in_capability else self.name
        return f"{place}.{entry}" if entry else place


DTYPES = (
    "float64",
    "float32",
    "tfloat32",
    "float16",
    "bfloat16",
    "float8_e4m3",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float6",
    "float4",
    "int8",
    "int4",
)
"""Names of the input types that `rates` are given for. float4 and float6 stand for every layout of that width."""

CLOCKS = ("sm", "memory", "cpu")
"""`sm` is the highest clock of the compute units, `memory` that of the memory, both as the vendor prints them."""

LINKS = ("nvlink", "nvlink_c2c", "infinity_fabric", "xe_link", "hccs")
"""Kinds of links between devices (nvlink_c2c: to the host's processor)."""

INSTALLED_FEATURES = frozenset({Feature.CPP_COMPILER, Feature.TRITON})
"""Facts of an installation: a file may say that a compiler knows the architecture, detection alone that it is there."""

FEATURES = "features"

_SIZE_HINT = "write a unit (227 KiB, 80 GiB) or the whole number of bytes"
_RATE_HINT = "rates are dense TFLOP/s (TOP/s for integers): 1 PFLOP/s is 1000"
_BANDWIDTH_HINT = "bandwidth is in GB/s: 3.35 TB/s is 3350"
_CLOCK_HINT = "clocks are in MHz: 1.98 GHz is 1980"


def _size(name: str, low: int, high: int, *, in_capability: bool = True, is_power_of_two: bool = False) -> Key:
    return Key(
        name=name,
        kind=Kind.SIZE,
        unit="bytes",
        low=low,
        high=high,
        hint=_SIZE_HINT,
        in_capability=in_capability,
        is_power_of_two=is_power_of_two,
    )


def _count(name: str, low: int, high: int, *, in_capability: bool = True, is_power_of_two: bool = False) -> Key:
    return Key(
        name=name,
        kind=Kind.COUNT,
        unit="",
        low=low,
        high=high,
        in_capability=in_capability,
        is_power_of_two=is_power_of_two,
    )


def _number(name: str, unit: str, low: float, high: float, hint: str = "") -> Key:
    return Key(name=name, kind=Kind.NUMBER, unit=unit, low=low, high=high, hint=hint)


_KEYS = (
    _size("memory_bytes", 256 * MIB, 64 * TIB, in_capability=False),
    Key(name="memory_is_shared", kind=Kind.FLAG, unit="", in_capability=False),
    Key(name="is_integrated", kind=Kind.FLAG, unit="", in_capability=False),
    Key(
        name="bandwidth",
        kind=Kind.NUMBER,
        unit="GB/s",
        low=10,
        high=200_000,
        hint=_BANDWIDTH_HINT,
        in_capability=False,
    ),
    Key(
        name="clocks",
        kind=Kind.NUMBER,
        unit="MHz",
        low=50,
        high=20_000,
        hint=_CLOCK_HINT,
        in_capability=False,
        of="clock",
        entries=CLOCKS,
    ),
    _count("pcie_generation", 1, 8, in_capability=False),
    _count("pcie_width", 1, 32, in_capability=False, is_power_of_two=True),
    _count("numa_node", 0, 1023, in_capability=False),
    Key(
        name="links",
        kind=Kind.NUMBER,
        unit="GB/s, both directions added up",
        low=10,
        high=100_000,
        hint=_BANDWIDTH_HINT,
        in_capability=False,
        of="link",
        entries=LINKS,
    ),
    Key(name="compute_capability", kind=Kind.TEXT, unit=""),
    _count("warp_width", 1, 1024, is_power_of_two=True),
    _count("num_multiprocessors", 1, 65_536),
    _size("shared_memory_per_block_bytes", 4 * KIB, 64 * MIB),
    _size("shared_memory_per_multiprocessor_bytes", 4 * KIB, 64 * MIB),
    _count("registers_per_multiprocessor", 1024, 16 * MIB),
    _count("max_threads_per_multiprocessor", 16, 65_536),
    _count("max_blocks_per_multiprocessor", 1, 4096),
    _size("l2_bytes", 64 * KIB, 16 * GIB),
    _size("allocation_alignment_bytes", 1, 2 * MIB, is_power_of_two=True),
    _count("num_copy_engines", 0, 256),
    Key(
        name="rates",
        kind=Kind.NUMBER,
        unit="TFLOP/s, dense",
        low=0.01,
        high=1_000_000,
        hint=_RATE_HINT,
        of="dtype",
        entries=DTYPES,
    ),
    _count("concurrent_blocks", 1, 1 << 24),
    _number("launch_latency_us", "microseconds", 0.01, 1_000_000),
    _number("graph_capture_ms", "milliseconds", 0.0001, 1_000_000),
    _number("graph_launch_us", "microseconds", 0.01, 1_000_000),
    _number("copy_to_device", "GB/s", 0.1, 200_000, _BANDWIDTH_HINT),
    _number("copy_from_device", "GB/s", 0.1, 200_000, _BANDWIDTH_HINT),
    Key(name="best", kind=Kind.CHOICES, unit="", low=1, high=1 << 20, of="kernel"),
    Key(
        name=FEATURES,
        kind=Kind.FLAG,
        unit="",
        of="feature",
        entries=tuple(feature.value for feature in Feature),
    ),
)

KEYS: dict[str, Key] = {key.name: key for key in _KEYS}
"""By name, in the order in which a file is written."""
