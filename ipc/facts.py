"""Facts about devices, models and choices, as every process may read them. Torch-free.

Absent means unknown: a field that nothing declared, detected or measured is None and never a guess.
"""

from enum import StrEnum

from msgspec import Struct


class Provenance(StrEnum):
    """Where a value came from; later ones win over earlier ones."""

    DECLARED = "declared"
    DETECTED = "detected"
    MEASURED = "measured"


class Feature(StrEnum):
    """Something a device can or cannot do, which a kernel's match may test."""

    FP64 = "fp64"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    INT8 = "int8"
    INT4 = "int4"
    ASYNC_ALLOCATION = "async_allocation"
    BULK_TENSOR_COPY = "bulk_tensor_copy"
    WARP_GROUP_MATRIX = "warp_group_matrix"
    GRAPH_CAPTURE = "graph_capture"
    STREAM_PRIORITIES = "stream_priorities"
    SUB_WARP_BLOCKS = "sub_warp_blocks"
    FP16_ATOMICS = "fp16_atomics"
    BF16_ATOMICS = "bf16_atomics"
    MANAGED_MEMORY = "managed_memory"
    CPP_COMPILER = "cpp_compiler"
    TRITON = "triton"


class DeviceCapability(Struct, frozen=True, kw_only=True):
    """What a kernel's match and the negotiation may test.

    Sizes in bytes, rates in TFLOP/s (dense) by dtype name, bandwidths in GB/s. `architecture` is the name that the
    vendor's compiler knows ("sm_90", "gfx942"), or the family's where there is none ("x86_64_avx512", "apple_m").
    `concurrent_blocks` is how many thread blocks were measured to run at once; `best` holds measured launch choices
    by kernel, such as {"rms_norm": {"num_warps": 4}}.
    """

    architecture: str
    compute_capability: str | None = None
    warp_width: int | None = None
    num_multiprocessors: int | None = None
    shared_memory_per_block_bytes: int | None = None
    shared_memory_per_multiprocessor_bytes: int | None = None
    registers_per_multiprocessor: int | None = None
    max_threads_per_multiprocessor: int | None = None
    max_blocks_per_multiprocessor: int | None = None
    l2_bytes: int | None = None
    allocation_alignment_bytes: int = 64
    num_copy_engines: int | None = None
    rates: dict[str, float] = {}
    features: frozenset[Feature] = frozenset()
    concurrent_blocks: int | None = None
    launch_latency_us: float | None = None
    graph_capture_ms: float | None = None
    graph_launch_us: float | None = None
    copy_to_device: float | None = None
    copy_from_device: float | None = None
    best: dict[str, dict[str, int]] = {}


class Link(Struct, frozen=True, kw_only=True):
    """How two devices (or a device and its host) are connected."""

    to: str
    kind: str
    bandwidth: float | None = None


class DeviceProfile(Struct, frozen=True, kw_only=True):
    """Identity, sizes and capability of one device. Bandwidth in GB/s, clocks in MHz.

    `libraries` holds versions by name (torch, triton, cuda, ...). `provenance` is keyed by field, with a dot before
    entries of the capability and of mappings: "bandwidth", "capability.l2_bytes", "capability.rates.bfloat16".
    """

    platform: str
    vendor: str
    name: str
    index: int = 0
    uuid: str | None = None
    pci_bus_id: str | None = None
    driver: str | None = None
    runtime: str | None = None
    memory_bytes: int | None = None
    memory_is_shared: bool = False
    is_integrated: bool | None = None
    bandwidth: float | None = None
    clocks: dict[str, float] = {}
    pcie_generation: int | None = None
    pcie_width: int | None = None
    numa_node: int | None = None
    links: tuple[Link, ...] = ()
    libraries: dict[str, str] = {}
    capability: DeviceCapability
    provenance: dict[str, Provenance] = {}


class QueueOrdering(StrEnum):
    """Who of those that wait, with equal priority, is seated first. None lets anyone wait for ever."""

    ARRIVAL = "arrival"
    LONG_FIRST = "long_first"
    SHORT_FIRST = "short_first"


class AttentionStrategy(StrEnum):
    """How attention walks the paged cache: what negotiation prefers, and what an implementation follows."""

    BULK_COPY = "bulk_copy"
    TILED = "tiled"
    LOW_OCCUPANCY = "low_occupancy"
    PLAIN = "plain"


class Problem(Struct, frozen=True, kw_only=True):
    """What is asked of a kernel. Dtypes are names such as "bfloat16"; zero means the size does not apply.

    An implementation that follows the attention strategy asked for goes before the others of its chain.
    `batch_invariant`: what a row gets may depend neither on the other rows nor on how many there are. `caps_scores`:
    attention is asked with a soft cap on its scores; `has_sinks`: with a sink of each head.
    """

    dtype: str
    kv_dtype: str | None = None
    head_dim: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    block_size: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    vocab_size: int = 0
    max_tokens: int = 0
    max_rows: int = 0
    rotary_dim: int = 0
    attention_strategy: AttentionStrategy | None = None
    batch_invariant: bool = False
    caps_scores: bool = False
    has_sinks: bool = False


class Resolution(Struct, frozen=True, kw_only=True):
    """One kernel's choice, with the reasons of those passed over and of those demoted after they failed."""

    kernel: str
    chosen: str
    rejected: dict[str, str] = {}
    demoted: dict[str, str] = {}
    pinned: bool = False


class MemoryFacts(Struct, frozen=True, kw_only=True):
    """Memory of one device, in bytes, as read at one moment.

    `holders` maps "pid name" to bytes of other processes, where readable. `by_kind` splits what this process holds
    ("device", "pinned_host"). `fragment_bytes` is held by this process's allocator but by no tensor.
    """

    total_bytes: int
    free_bytes: int
    ours_bytes: int
    holders: dict[str, int] = {}
    by_kind: dict[str, int] = {}
    fragment_bytes: int | None = None


class DeviceHealth(Struct, frozen=True, kw_only=True):
    """What a live device reports. Clocks in MHz, power in W, temperature in degrees C, utilisations 0..1.

    `throttle_reasons` are the driver's words for why clocks are held down now; `errors` what has gone wrong since it
    started. `on_battery` is the machine's.
    """

    clocks: dict[str, float] = {}
    power: float | None = None
    temperature: float | None = None
    compute_utilization: float | None = None
    memory_utilization: float | None = None
    errors: tuple[str, ...] = ()
    throttle_reasons: tuple[str, ...] = ()
    on_battery: bool | None = None
    memory: MemoryFacts | None = None


SPARE_ROWS = 8
"""Rows of a step's buffers beyond the running sequences: of those that ended while a step was in flight."""
_PACKING_DIVISOR = 200


class PoolingKind(StrEnum):
    """Which hidden states of a text become its vector."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "last"


class PoolingFacts(Struct, frozen=True, kw_only=True):
    """How a model makes vectors. `normalizes`: to length 1, unless a request asks otherwise.

    `generates`: it makes tokens too. `is_encoder`: it computes whole prompts and keeps no KV cache.
    """

    kind: PoolingKind
    num_dimensions: int
    normalizes: bool
    is_encoder: bool
    generates: bool = False


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What the engine must know of a model to plan for it. Bytes are per rank; KV bytes per token, over all layers.

    `weight_bytes` counts what a rank holds once loaded, without what kernels add by packing. `tensor_parallel_sizes`
    are the numbers of ranks that the model divides among, in order.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    dtype: str
    kv_dtype: str
    num_parameters: int
    tensor_parallel_sizes: tuple[int, ...]
    weight_bytes: int
    kv_bytes_per_token: int
    step_bytes_per_token: int = 0
    step_bytes_per_row: int = 0
    pooling: PoolingFacts | None = None

    @property
    def is_encoder(self) -> bool:
        """It computes whole prompts and keeps no KV cache."""
        return self.pooling is not None and self.pooling.is_encoder

    @property
    def generates(self) -> bool:
        """It makes tokens, whatever else it makes."""
        return self.pooling is None or self.pooling.generates

    def step_bytes(self, *, max_tokens: int, max_rows: int, max_blocks: int) -> int:
        """Bytes of the buffers of a step of so many tokens and rows, with block tables of so many blocks."""
        rows = max_rows + SPARE_ROWS
        return max_tokens * self.step_bytes_per_token + rows * (self.step_bytes_per_row + 4 * max_blocks)

    @property
    def loaded_bytes(self) -> int:
        """Weights with what loading adds: tables of rotary positions, padding, packing. An estimate."""
        return self.weight_bytes + self.weight_bytes // _PACKING_DIVISOR


class Decision(Struct, frozen=True, kw_only=True):
    """One settled value and its story: printed at start, shown by `/v1/server_info`."""

    name: str
    value: str
    reason: str
    overridden: bool = False


class Phase(Struct, frozen=True, kw_only=True):
    """One phase of a start: seconds since the process group began, and how long the phase took (None: it runs)."""

    name: str
    process: str
    began_s: float
    took_s: float | None = None
    detail: str = ""
    fraction: float | None = None
