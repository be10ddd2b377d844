"""Between the engine core and a device worker, beside the rings: the boot handshake, health, failures.

The handshake: worker `WorkerHello` (facts, before any weight is read) -> core `Negotiated` -> worker loads and
measures, `Loaded` -> core `Allocate` -> worker allocates the KV cache and warms up, `WorkerReady`. A worker that
outlived a core sends `WorkerHello` with what it already holds, and the core goes straight to plans.
Every message carries the generation; one of an older generation is dropped.
"""

from enum import StrEnum

from msgspec import Struct

from .facts import (
    AttentionStrategy,
    Decision,
    DeviceHealth,
    DeviceProfile,
    MemoryFacts,
    ModelFacts,
    Phase,
    QueueOrdering,
    Resolution,
)
from .messages import Decoder, Message


class Settled(Struct, frozen=True, kw_only=True):
    """What negotiation settled before weights are read. Counts of tokens, sequences and positions.

    `max_chunk_tokens` bounds one prompt's part of a step (0: the whole budget), `prompt_step_s` how long a step with
    prompts may take that others wait for. `graph_buckets` are the numbers of tokens to capture graphs for; empty where
    a graph serves every size, or none is wanted. `batch_invariant`: see Problem.
    """

    block_size: int
    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int
    max_chunk_tokens: int = 0
    graph_buckets: tuple[int, ...] = ()
    attention_strategy: AttentionStrategy | None = None
    queue_ordering: QueueOrdering = QueueOrdering.ARRIVAL
    prompt_step_s: float = 0.25
    batch_invariant: bool = False
    decisions: tuple[Decision, ...] = ()


class WorkerHello(Message, frozen=True, tag="worker_hello"):
    """A worker's facts. `settled` and `num_blocks` are set when it already holds weights and a KV cache.

    `memory` is the device's as the worker found it; `spendable_bytes` is what the worker may take of it in all, and
    `kv_limit_bytes` a bound on the KV cache's part. `strategy_misfits` says of attention strategies why nothing here
    follows them for this model.
    """

    rank: int
    generation: int
    pid: int
    profile: DeviceProfile
    model: ModelFacts
    decisions: tuple[Decision, ...] = ()
    settled: Settled | None = None
    num_blocks: int | None = None
    memory: MemoryFacts | None = None
    spendable_bytes: int | None = None
    kv_limit_bytes: int | None = None
    strategy_misfits: dict[AttentionStrategy, str] = {}


class Negotiated(Message, frozen=True, tag="negotiated"):
    """Go on and load."""

    generation: int
    settled: Settled


class Loaded(Message, frozen=True, tag="loaded"):
    """Weights are on the device. Bytes of each kind; `kv_budget_bytes` is what the KV cache may take (none: <= 0), and
    `kv_is_limited` says that a bound on the cache, and not the memory, made it so small.
    """

    rank: int
    generation: int
    resolutions: tuple[Resolution, ...]
    decisions: tuple[Decision, ...]
    memory: MemoryFacts
    weight_bytes: int
    activation_bytes: int
    kv_budget_bytes: int
    kv_bytes_per_block: int
    kv_is_limited: bool = False


class Allocate(Message, frozen=True, tag="allocate"):
    """Allocate a KV cache of this many blocks (the least over all ranks), warm up, report ready."""

    generation: int
    num_blocks: int


class WorkerReady(Message, frozen=True, tag="worker_ready"):
    """The next thing this worker does is to run plans."""

    rank: int
    generation: int
    resolutions: tuple[Resolution, ...]
    decisions: tuple[Decision, ...] = ()
    memory: dict[str, int] = {}
    phases: tuple[Phase, ...] = ()


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Twice a second, from the control loop. `step` is None between steps.

    `progress_age_s` is the time since the running step last got anywhere (a layer, a slice): a long prefill keeps it
    small, a frozen device lets it grow.
    """

    rank: int
    generation: int
    step: int | None
    step_age_s: float
    progress_age_s: float
    resident_bytes: int
    compiled_after_ready: int = 0
    health: DeviceHealth | None = None


class StepErrorKind(StrEnum):
    """What went wrong in a step that left the device usable."""

    OUT_OF_MEMORY = "out_of_memory"
    ERROR = "error"


class StepError(Message, frozen=True, tag="step_error"):
    """One step failed; its sequences cannot go on, the worker can. `text` names shapes and the first cause.

    Travels in the result ring, in the slot where the step's result would be, so that order holds.
    """

    rank: int
    generation: int
    step: int
    kind: StepErrorKind
    text: str


class OversizedResult(Message, frozen=True, tag="oversized_result"):
    """Its frame is the packed StepResult that the ring slot with this sequence number stands for."""

    rank: int
    generation: int
    sequence: int


class OversizedPlan(Message, frozen=True, tag="oversized_plan"):
    """Its frame is the packed StepPlan or TokenMasks (`kind`) that the plan ring's slot stands for."""

    generation: int
    sequence: int
    kind: int


class KernelsChanged(Message, frozen=True, tag="kernels_changed"):
    """A kernel was demoted while serving; the whole resolution as it is now."""

    rank: int
    generation: int
    resolutions: tuple[Resolution, ...]


FromWorker = WorkerHello | Loaded | WorkerReady | Heartbeat | OversizedResult | KernelsChanged
ToWorker = Negotiated | Allocate | OversizedPlan

FROM_WORKER: Decoder[FromWorker] = Decoder(FromWorker)
TO_WORKER: Decoder[ToWorker] = Decoder(ToWorker)
STEP_ERROR: Decoder[StepError] = Decoder(StepError)
