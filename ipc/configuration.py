"""What each process is told at birth: frozen slices of the options. First message on the control link."""

from enum import StrEnum

from msgspec import Struct

from .facts import AttentionStrategy, Phase, QueueOrdering

MAX_RANKS = 32
"""Devices of one worker group, which are all of one host."""
HANG_FACTOR = 6  # what has got nowhere for this many stall limits is killed and restarted


class WorkerConfiguration(Struct, frozen=True, kw_only=True, tag="worker"):
    """One device worker. `core_address` is a ZeroMQ endpoint; the rings ride along (see control.Attach).

    `device` is what the user named for this rank: an index or an identifier. `visibility` holds the environment
    variables by which a vendor's driver hides devices from this worker.
    """

    rank: int
    num_ranks: int
    generation: int
    core_address: str
    run_directory: str
    cache_directory: str
    model: str
    platform: str | None = None
    device: str | None = None
    visibility: dict[str, str] = {}
    device_config: str | None = None
    allow_mismatch: bool = False
    dtype: str = "auto"
    kv_dtype: str = "auto"
    max_model_len: int | None = None
    load_format: str = "auto"
    model_code: str = "auto"
    memory_utilization: float = 0.9
    kv_memory_bytes: int | None = None
    kernel_pins: dict[str, str] = {}
    without_kernels: tuple[str, ...] = ()
    enforce_eager: bool = False
    seed: int = 0
    num_threads: int | None = None
    explain: bool = False
    spin_s: float = 0.0
    null_script: str = ""
    watch_interval_s: float = 10.0
    collective_timeout_s: float = 120.0


class Task(StrEnum):
    """What an inspection looks at."""

    PROBE = "probe"
    DOCTOR = "doctor"
    DIAGNOSE = "diagnose"
    KERNELS_LIST = "kernels list"
    KERNELS_MATRIX = "kernels matrix"
    KERNELS_CHECK = "kernels check"


class InspectionConfiguration(Struct, frozen=True, kw_only=True, tag="inspection"):
    """A worker process that looks at this machine instead of serving. `tests` names some of the task's parts; empty
    is all of them.
    """

    task: Task
    worker: WorkerConfiguration
    tests: tuple[str, ...] = ()


class CoreConfiguration(Struct, frozen=True, kw_only=True, tag="core"):
    """The engine core. None means: decide from facts. With `explain` it tells what it settled, and starts nothing."""

    incarnation: int
    generation: int
    num_ranks: int
    frontends_address: str
    workers_address: str
    block_size: int | None = None
    num_blocks: int | None = None
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    max_model_len: int | None = None
    max_chunk_tokens: int | None = None
    graph_buckets: tuple[int, ...] | None = None
    enforce_eager: bool = False
    batch_invariant: bool = False
    attention_strategy: AttentionStrategy | None = None
    prompt_step_s: float | None = None
    queue_ordering: QueueOrdering | None = None
    memory_utilization: float = 0.9
    kv_memory_bytes: int | None = None
    prefix_caching: bool = True
    explain: bool = False
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    stall_limit_s: float = 20.0
    seed: int = 0
    num_cached_grammars: int = 256
    grammar_limit_s: float = 10.0
    idle_canary_s: float = 30.0
    memory_growth_limit_bytes: int | None = None
    growth_settling_s: float = 60.0
    drain_timeout_s: float = 30.0
    phases: tuple[Phase, ...] = ()  # of the start so far, for /v1/server_info


class RequestLimits(Struct, frozen=True, kw_only=True):
    """Bounds on one request; all but those of ids, biases and entries are options.

    `max_prompt_logprob_entries` counts prompt tokens times choices times alternatives, the token itself among them.
    """

    max_n: int = 128
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024
    max_prompt_logprob_entries: int = 1 << 21
    max_prompts: int = 2048
    max_grammar_bytes: int = 1 << 20
    max_bad_words: int = 128
    max_body_bytes: int = 32 << 20
    max_header_bytes: int = 64 << 10


class RequestRules(Struct, frozen=True, kw_only=True):
    """What a frontend process would apply to requests before the engine sees them."""

    limits: RequestLimits = RequestLimits()
    default_max_tokens: int | None = None
    chat_template: str | None = None
    generation_defaults: bool = True
    matryoshka: bool = False
    reranker: bool = False
    control_tokens_in_content: bool = False
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"


class FrontendConfiguration(Struct, frozen=True, kw_only=True, tag="frontend"):
    """One frontend process. The model directory comes later (control.ModelKnown), so that the port opens at once.

    `requests_per_minute` of each of `api_keys`, counted over all frontends in `rate_file`.
    """

    index: int
    num_frontends: int
    incarnation: int
    core_address: str
    host: str
    port: int
    served_model_name: str
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    requests_per_minute: int | None = None
    rate_file: str = ""
    cors_origins: tuple[str, ...] = ()
    tls_certificate: str | None = None
    tls_key: str | None = None
    limits: RequestLimits = RequestLimits()
    chat_template: str | None = None
    default_max_tokens: int | None = None
    control_tokens_in_content: bool = False
    generation_defaults: bool = True
    matryoshka: bool = False
    reranker: bool = False
    stall_limit_s: float = 20.0
    drain_timeout_s: float = 30.0
    log_requests: bool = False
    trust_request_templates: bool = False
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"


Configuration = WorkerConfiguration | InspectionConfiguration | CoreConfiguration | FrontendConfiguration
