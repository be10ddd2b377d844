"""From options to what each process is told at birth: frozen slices, made in one place."""

from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from ...ipc.configuration import (
    CoreConfiguration,
    FrontendConfiguration,
    RequestLimits,
    RequestRules,
    WorkerConfiguration,
)
from ...ipc.facts import AttentionStrategy, Phase, QueueOrdering
from .keys import Keys
from .options import AUTO, Auto, Options

Choice = TypeVar("Choice", bound=StrEnum)
N = TypeVar("N", int, float)


class Birth(Struct, frozen=True, kw_only=True):
    """What is known when the processes are started, beside the options."""

    run_directory: Path
    core_frontends: str
    core_workers: str
    num_frontends: int
    served_model_name: str
    port: int
    keys: Keys = Keys()
    explain: bool = False


def request_rules(options: Options) -> RequestRules:
    return RequestRules(
        limits=RequestLimits(
            max_n=options.max_n,
            max_logprobs=options.max_logprobs,
            max_stop_strings=options.max_stop,
            max_prompts=options.max_prompts,
            max_grammar_bytes=options.max_grammar_bytes,
            max_body_bytes=options.max_body_bytes,
            max_header_bytes=options.max_header_bytes,
        ),
        default_max_tokens=_settled(options.default_max_tokens),
        chat_template=str(options.chat_template) if options.chat_template is not None else None,
        generation_defaults=options.generation_defaults,
        matryoshka=options.matryoshka,
        reranker=options.reranker,
        control_tokens_in_content=options.control_tokens_in_content,
        tool_parser=options.tool_parser,
        reasoning_parser=options.reasoning_parser,
    )


def frontend_configuration(options: Options, birth: Birth, *, index: int, incarnation: int) -> FrontendConfiguration:
    rules = request_rules(options)
    return FrontendConfiguration(
        index=index,
        num_frontends=birth.num_frontends,
        incarnation=incarnation,
        core_address=birth.core_frontends,
        host=options.host,
        port=birth.port,
        served_model_name=birth.served_model_name,
        api_keys=birth.keys.clients,
        admin_keys=birth.keys.admins,
        requests_per_minute=_settled(options.max_requests_per_minute),
        rate_file=str(birth.run_directory / "rates"),
        cors_origins=options.cors_origin,
        tls_certificate=None if options.tls_certificate is None else str(options.tls_certificate),
        tls_key=None if options.tls_key is None else str(options.tls_key),
        limits=rules.limits,
        chat_template=rules.chat_template,
        default_max_tokens=rules.default_max_tokens,
        control_tokens_in_content=rules.control_tokens_in_content,
        generation_defaults=rules.generation_defaults,
        matryoshka=rules.matryoshka,
        reranker=rules.reranker,
        stall_limit_s=options.stall_limit,
        drain_timeout_s=options.drain_timeout,
        log_requests=options.log_requests,
        trust_request_templates=options.trust_request_templates,
        tool_parser=options.tool_parser,
        reasoning_parser=options.reasoning_parser,
    )


def core_configuration(
    options: Options, birth: Birth, *, incarnation: int, generation: int, phases: tuple[Phase, ...]
) -> CoreConfiguration:
    return CoreConfiguration(
        incarnation=incarnation,
        generation=generation,
        num_ranks=options.tensor_parallel,
        frontends_address=birth.core_frontends,
        workers_address=birth.core_workers,
        block_size=_settled(options.block_size),
        num_blocks=_settled(options.num_blocks),
        max_num_seqs=_settled(options.max_num_seqs),
        max_batched_tokens=_settled(options.max_batched_tokens),
        max_model_len=_settled(options.max_model_len),
        max_chunk_tokens=_settled(options.max_chunk_tokens),
        graph_buckets=tuple(map(int, options.graph_buckets)) or None,
        enforce_eager=options.enforce_eager,
        batch_invariant=options.batch_invariant,
        attention_strategy=_chosen(AttentionStrategy, options.attention_strategy),
        prompt_step_s=_settled(options.prompt_step),
        queue_ordering=_chosen(QueueOrdering, options.queue_ordering),
        memory_utilization=options.memory_utilization,
        kv_memory_bytes=_settled(options.kv_memory_bytes),
        prefix_caching=options.prefix_caching,
        explain=birth.explain,
        max_queued_requests=_settled(options.max_queued_requests),
        max_queued_tokens=_settled(options.max_queued_tokens),
        stall_limit_s=options.stall_limit,
        seed=options.seed,
        num_cached_grammars=options.grammar_cache,
        grammar_limit_s=options.grammar_timeout,
        memory_growth_limit_bytes=_settled(options.memory_growth_limit),
        drain_timeout_s=options.drain_timeout,
        phases=phases,
    )


def worker_configuration(
    options: Options,
    birth: Birth,
    *,
    model: Path,
    rank: int,
    generation: int,
    num_threads: int,
    visibility: dict[str, str],
) -> WorkerConfiguration:
    return WorkerConfiguration(
        rank=rank,
        num_ranks=options.tensor_parallel,
        generation=generation,
        core_address=birth.core_workers,
        run_directory=str(birth.run_directory),
        cache_directory=str(options.cache_folder()),
        model=str(model),
        platform=None if options.platform == AUTO else options.platform,
        device=options.device[rank] if options.device else None,
        visibility=visibility,
        device_config=options.device_config or options.device_type,
        allow_mismatch=options.allow_mismatch,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        max_model_len=_settled(options.max_model_len),
        load_format=options.load_format,
        model_code=options.model_code,
        memory_utilization=options.memory_utilization,
        kv_memory_bytes=_settled(options.kv_memory_bytes),
        kernel_pins=options.kernel,
        without_kernels=options.without_kernel,
        enforce_eager=options.enforce_eager,
        seed=options.seed,
        num_threads=num_threads,
        explain=birth.explain,
        spin_s=options.spin_us / 1e6,
        null_script=options.null_script,
        watch_interval_s=options.watch_interval,
    )


def _chosen(kind: type[Choice], value: str) -> Choice | None:
    return None if value == AUTO else kind(value)


def _settled(value: N | Auto) -> N | None:
    """On the wire, None is for what the receiver decides from facts."""
    return None if value == AUTO else value
