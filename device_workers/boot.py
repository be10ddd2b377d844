"""From a configuration to an engine of steps: detect, describe, open, in this order and with a story for every choice.

With a declared platform nothing imports torch before `open`. Only this file brings platforms, models and kernels
together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..ipc.conditions import Refusal
from ..ipc.configuration import WorkerConfiguration
from ..ipc.facts import AttentionStrategy, Decision, DeviceProfile, MemoryFacts, ModelFacts, Problem, Resolution
from ..ipc.worker_messages import Settled
from ..kernels.catalog import CATALOG
from ..kernels.implementation import Implementation, Services
from ..kernels.registry import KernelChoices, Registry, prohibition
from ..kernels.verification import VerdictCache, Verifier
from .affinity import stay_near
from .dtype_choice import DtypeMeasurements, candidates, check_dtype, choose_dtype, lacks, measure
from .execution.contract import StepEngine
from .execution.declared_engine import DeclaredEngine, MemoryWishes
from .models.config import ModelConfig, read_config, read_values
from .models.embedding_files import read_embedding_files
from .models.encoder_config import ENCODER_KERNELS, EncoderConfig, encoder_facts, encoder_problem, read_encoder
from .models.facts import KERNELS, kernel_problem, make_facts, num_sampled_ids
from .models.module_config import (
    MODULE_KERNELS,
    ModuleConfig,
    module_facts,
    module_problem,
    read_module,
    why_module,
)
from .models.sharding import Shard, make_shard
from .platforms.contract import Backend, Clause, NotSupported, Platform, WorkerGroup
from .platforms.detection import Detection, Wish, detect, platforms
from .platforms.device_choice import DeviceWish, choose_device
from .platforms.host import Host, usable_cores
from .platforms.plugins import plugin_kernels
from .profiles.settling import declare_profile, settle_profile

if TYPE_CHECKING:
    import torch

    from .weights.source import OnBytes, WeightSource
    from .weights.upload import Upload

OnPhase = Callable[[str], None]
OnKernels = Callable[[tuple[Resolution, ...]], None]
"""Told of a kernel that was replaced while serving, with all resolutions as they are now."""
LOAD_FORMATS = ("auto", "safetensors", "dummy")

log = logging.getLogger("trimaran.worker")


@dataclass(frozen=True, kw_only=True)
class Described:
    """What is known before the device is opened. A declared device has no platform: it is explained, never opened.

    A model is a decoder (`config`, `shard`), an `encoder`, or a `module` of transformers; on a platform that computes
    nothing it is none of them.
    """

    platform: Platform | None
    profile: DeviceProfile
    decisions: tuple[Decision, ...]
    config: ModelConfig | None
    shard: Shard | None
    encoder: EncoderConfig | None
    module: ModuleConfig | None
    registry: Registry
    choices: KernelChoices
    num_threads: int
    num_sharing: int = 1

    @property
    def decodes(self) -> bool:
        """Whether the model is a decoder that is computed."""
        return self.config is not None or (self.module is not None and not self.module.is_encoder)


def describe(configuration: WorkerConfiguration, warn: Callable[[str], None]) -> Described:
    """Detect the platform, read the model's configuration, check what was asked. Raises Refusal."""
    if configuration.explain and configuration.device_config is not None:
        device = _declared_device(configuration.device_config, configuration.platform, configuration.num_ranks)
    else:
        device = settle_device(configuration, detect_platform(configuration, warn), warn)
    profile = device.profile
    config = shard = encoder = module = None
    if device.platform is None or device.platform.computes:
        module = _read_module(configuration)
        encoder = read_encoder(Path(configuration.model)) if module is None else None
        if module is not None:
            _warn_of_limit(module, configuration, warn)
        elif encoder is None:
            config = read_config(Path(configuration.model))
            shard = make_shard(config, configuration.rank, configuration.num_ranks)
        elif configuration.num_ranks > 1:
            raise Refusal("an encoder is not spread over devices: leave --tensor-parallel out")
        check_dtype(configuration.dtype, profile)
        _check_load_format(configuration.load_format)
    registry = make_registry(configuration, warn)
    choices = KernelChoices(configuration.kernel_pins, frozenset(configuration.without_kernels))
    registry.check(choices)
    return Described(
        platform=device.platform,
        profile=profile,
        decisions=device.decisions,
        config=config,
        shard=shard,
        encoder=encoder,
        module=module,
        registry=registry,
        choices=choices,
        num_threads=configuration.num_threads or _fair_threads(configuration),
        num_sharing=device.num_sharing,
    )


def _read_module(configuration: WorkerConfiguration) -> ModuleConfig | None:
    """None where code of ours computes the model, or its folder has no config.json, which the reading of it refuses."""
    directory = Path(configuration.model)
    if not (directory / "config.json").is_file():
        return None
    values = read_values(directory)
    reason = why_module(values, configuration.model_code)
    return None if reason is None else read_module(directory, values, reason, configuration.num_ranks)


def _warn_of_limit(module: ModuleConfig, configuration: WorkerConfiguration, warn: Callable[[str], None]) -> None:
    if module.limit_reason is not None and configuration.max_model_len is None and not module.is_encoder:
        warn(f"sequences are at most {module.max_tokens} tokens long: {module.limit_reason}")


def strategy_misfits(described: Described, model: ModelFacts) -> dict[AttentionStrategy, str]:
    """Why no implementation of a strategy can serve this model on this device, for those where none can."""
    problem = Problem(dtype=model.dtype, kv_dtype=model.kv_dtype, head_dim=model.head_dim, num_heads=model.num_heads)
    if described.module is not None:
        problem = replace(problem, **described.module.score_demands)
    misfits: dict[AttentionStrategy, str] = {}
    for strategy in (AttentionStrategy.BULK_COPY, AttentionStrategy.TILED, AttentionStrategy.LOW_OCCUPANCY):
        chain = [found for found in described.registry.chain("paged_attention") if found.metadata.strategy is strategy]
        reasons = [_why_not(found, described, problem) for found in chain]
        if reasons and None not in reasons:
            misfits[strategy] = reasons[-1] or ""  # of the one that asks the least
    return misfits


def _why_not(implementation: Implementation, described: Described, problem: Problem) -> str | None:
    forbidden = prohibition(implementation, described.choices)
    if forbidden is not None:
        return f"{implementation.name} is {forbidden}"
    return implementation.misfit(described.profile, problem)


@dataclass(frozen=True, kw_only=True)
class SettledDevice:
    """The device that this worker is for, and how it came to be it."""

    platform: Platform | None
    profile: DeviceProfile
    decisions: tuple[Decision, ...]
    num_sharing: int = 1


def _declared_device(device_config: str, forced: str | None, num_ranks: int) -> SettledDevice:
    profile, decision = declare_profile(device_config)
    profile = with_software(profile)
    if forced not in (None, profile.platform):
        raise Refusal(
            f"--device-config {device_config} declares a device of the {profile.platform} platform, and --platform "
            f"asks for {forced}; leave one of them out"
        )
    platform = Decision(name="platform", value=profile.platform, reason="declared by --device-config", overridden=True)
    num_sharing = num_ranks if profile.platform == "cpu" else 1
    return SettledDevice(platform=None, profile=profile, decisions=(platform, decision), num_sharing=num_sharing)


def with_software(profile: DeviceProfile) -> DeviceProfile:
    """A declared device with what an installation for its platform brings: a compiler, Triton."""
    software = {platform.name: platform.software_features for platform in platforms()}
    features = profile.capability.features | software.get(profile.platform, frozenset())
    return replace(profile, capability=replace(profile.capability, features=features))


def settle_device(
    configuration: WorkerConfiguration, detection: Detection, warn: Callable[[str], None]
) -> SettledDevice:
    """This rank's device, with what is declared of it, detected, and overridden by the user. Raises Refusal."""
    platform = detection.platform
    detected = platform.profile(_device_index(configuration, detection))
    profile, decision = settle_profile(detected, configuration.device_config, configuration.allow_mismatch)
    return SettledDevice(
        platform=platform,
        profile=profile,
        decisions=(detection.decision, decision),
        num_sharing=_num_sharing(configuration, detection),
    )


def _num_sharing(configuration: WorkerConfiguration, detection: Detection) -> int:
    """Ranks on this rank's device: several only where there are fewer devices than ranks, as on a processor."""
    num_devices = len(detection.devices)
    if detection.platform.visibility and num_devices == 1:  # the supervisor showed this rank its own device only
        return 1
    return sum(rank % num_devices == configuration.rank % num_devices for rank in range(configuration.num_ranks))


def detect_platform(configuration: WorkerConfiguration, warn: Callable[[str], None]) -> Detection:
    """The story of the choice goes to the log, whatever it is. Raises Refusal."""
    wish = Wish(
        platform=configuration.platform,
        by_device=configuration.device is not None,
        num_ranks=configuration.num_ranks,
    )
    detection = detect(wish=wish, candidates=platforms(Host(variables=configuration.visibility)))
    for line in detection.lines():
        log.info("%s", line)
    if detection.warning is not None:
        warn(detection.warning)
    return detection


def _device_index(configuration: WorkerConfiguration, detection: Detection) -> int:
    """The device asked for; else one per rank, counting round where ranks share the only device (CPU, null)."""
    wish = DeviceWish(rank=configuration.rank, num_ranks=configuration.num_ranks, device=configuration.device)
    chosen = choose_device(detection.platform, detection.devices, wish, log.info)
    log.info("uses %s", chosen)
    return chosen.index


def _check_load_format(load_format: str) -> None:
    if load_format not in LOAD_FORMATS:
        raise Refusal(f"--load-format {load_format} is not known; take one of {', '.join(LOAD_FORMATS)}")


def make_registry(configuration: WorkerConfiguration, warn: Callable[[str], None]) -> Registry:
    """Kernels of other packages go ahead of ours in their chains; the last link of each stays ours."""
    plain = Registry(CATALOG)
    references = {kernel: plain.chain(kernel)[-1] for kernel in plain.kernels}
    catalog = (*plugin_kernels(plain.kernels, warn), *CATALOG)
    verifier = Verifier(references, VerdictCache(Path(configuration.cache_directory), warn))
    return Registry(catalog, verifier, verifier)


def open_engine(
    configuration: WorkerConfiguration,
    described: Described,
    warn: Callable[[str], None],
    on_phase: OnPhase,
    on_kernels: OnKernels = lambda resolutions: None,
) -> StepEngine:
    """Open the device and settle dtype and sizes; weights are not read yet. Raises Refusal.

    To explain, nothing is opened, and the engine answers the handshake only.
    """
    if configuration.explain and (described.config or described.encoder or described.module) is not None:
        return _declared_engine(configuration, described, warn)
    platform = described.platform
    assert platform is not None, "a declared device cannot be opened"
    if platform.computes:
        on_phase("imports")
        from .execution import tensor_engine  # noqa: F401 - and torch with it, which takes longest
    on_phase("device")
    described = dataclass_replace(described, decisions=(*described.decisions, *stay_near(described.profile)))
    cache_dir = Path(configuration.cache_directory)
    backend = platform.open(described.profile.index, num_threads=described.num_threads, cache_dir=cache_dir, warn=warn)
    if not platform.computes:
        return _null_engine(configuration, described, backend)
    services = Services(
        num_threads=described.num_threads, cache_dir=cache_dir, warn=warn, device=str(backend.torch_device)
    )
    encoder = described.encoder or described.module
    if encoder is not None and encoder.is_encoder:
        return _encoder_engine(configuration, described, encoder, backend, services, on_phase, on_kernels)
    if described.module is not None:
        return _module_engine(
            configuration, described, described.module, platform, backend, services, on_phase, on_kernels
        )
    return _tensor_engine(configuration, described, platform, backend, services, on_phase, on_kernels)


def _null_engine(configuration: WorkerConfiguration, described: Described, backend: Backend) -> StepEngine:
    from .platforms.null_engine import NullEngine, null_model_facts, parse_script

    settings = parse_script(configuration.null_script)
    model = null_model_facts(configuration.model, settings, configuration.max_model_len)
    return NullEngine(
        backend, settings, model, described.decisions, rank=configuration.rank, generation=configuration.generation
    )


def _declared_engine(
    configuration: WorkerConfiguration, described: Described, warn: Callable[[str], None]
) -> StepEngine:
    profile = described.profile
    config = described.encoder or described.config or described.module
    assert config is not None
    seconds = DtypeMeasurements(Path(configuration.cache_directory), profile, described.num_threads, warn).read()
    makes_vectors = _makes_vectors(configuration, described)
    dtype, dtype_decision = choose_dtype(
        configuration.dtype, config.dtype, profile, seconds, makes_vectors=makes_vectors
    )
    model, kernels, problem = _declared_model(configuration, described, dtype)
    if profile.memory_bytes is None:
        raise Refusal(
            f"the memory of {profile.name} is not declared: name a product, as in --device-config NAME:PRODUCT, or "
            "give memory_bytes in a file of your own"
        )

    def resolve(settled: Settled) -> tuple[Resolution, ...]:
        asked = problem(settled)
        return tuple(described.registry.resolve(name, profile, asked, described.choices) for name in kernels)

    return DeclaredEngine(
        profile,
        model,
        (
            *described.decisions,
            dtype_decision,
            *_threads_decision(configuration, described),
            *(described.module.decisions if described.module is not None else ()),
        ),
        MemoryFacts(total_bytes=profile.memory_bytes, free_bytes=profile.memory_bytes, ours_bytes=0),
        MemoryWishes(utilization=configuration.memory_utilization, kv_memory_bytes=configuration.kv_memory_bytes),
        resolve,
        described.num_sharing,
    )


def _declared_model(
    configuration: WorkerConfiguration, described: Described, dtype: str
) -> tuple[ModelFacts, tuple[str, ...], Callable[[Settled], Problem]]:
    """What the engine must know of it, the kernels it needs, and what is asked of them."""
    encoder, config, shard = described.encoder, described.config, described.shard
    if encoder is not None:
        model = encoder_facts(encoder, dtype=dtype, max_model_len=configuration.max_model_len)
        return model, ENCODER_KERNELS, lambda settled: encoder_problem(encoder, model, settled)
    if described.module is not None:
        return _declared_module(configuration, described.module, dtype)
    assert config is not None and shard is not None
    model = make_facts(
        config,
        shard,
        dtype=dtype,
        kv_dtype=configuration.kv_dtype,
        max_model_len=configuration.max_model_len,
        files=read_embedding_files(Path(configuration.model)),
    )
    return model, KERNELS, lambda settled: kernel_problem(config, shard, model, settled)


def _declared_module(
    configuration: WorkerConfiguration, module: ModuleConfig, dtype: str
) -> tuple[ModelFacts, tuple[str, ...], Callable[[Settled], Problem]]:
    model = _module_facts(configuration, module, dtype)
    kernels = () if module.is_encoder else MODULE_KERNELS
    return model, kernels, lambda settled: module_problem(module, model, settled)


def _module_facts(configuration: WorkerConfiguration, module: ModuleConfig, dtype: str) -> ModelFacts:
    kv_dtype, max_model_len = configuration.kv_dtype, configuration.max_model_len
    return module_facts(module, dtype=dtype, kv_dtype=kv_dtype, max_model_len=max_model_len)


def _encoder_engine(
    configuration: WorkerConfiguration,
    described: Described,
    config: EncoderConfig | ModuleConfig,
    backend: Backend,
    services: Services,
    on_phase: OnPhase,
    on_kernels: OnKernels,
) -> StepEngine:
    from .execution.encoder_engine import EncoderEngine, EncoderParts

    dtype, dtype_decision = _settle_dtype(configuration, described, config, services, on_phase)
    if isinstance(config, ModuleConfig):
        model = _module_facts(configuration, config, dtype)
    else:
        model = encoder_facts(config, dtype=dtype, max_model_len=configuration.max_model_len)
    return EncoderEngine(
        EncoderParts(
            backend=backend,
            profile=described.profile,
            config=config,
            model=model,
            decisions=(*described.decisions, dtype_decision, *_threads_decision(configuration, described)),
            open_source=_source_opener(configuration, dtype, backend),
            load_module=_module_loader(configuration, is_encoder=True),
            registry=described.registry,
            choices=described.choices,
            services=services,
            memory_utilization=configuration.memory_utilization,
            on_kernels=on_kernels,
            num_sharing=described.num_sharing,
        )
    )


def _tensor_engine(
    configuration: WorkerConfiguration,
    described: Described,
    platform: Platform,
    backend: Backend,
    services: Services,
    on_phase: OnPhase,
    on_kernels: OnKernels,
) -> StepEngine:
    from .execution.tensor_engine import EngineParts, TensorEngine

    config, shard = described.config, described.shard
    assert config is not None and shard is not None
    dtype, dtype_decision = _settle_dtype(configuration, described, config, services, on_phase)
    if configuration.rank == 0 and lacks(config.dtype, described.profile) and not dtype_decision.overridden:
        services.warn(f"the model runs in {dtype}: {dtype_decision.reason}")
    model = make_facts(
        config,
        shard,
        dtype=dtype,
        kv_dtype=configuration.kv_dtype,
        max_model_len=configuration.max_model_len,
        files=read_embedding_files(Path(configuration.model)),
    )
    sampled_ids = num_sampled_ids(Path(configuration.model), config)
    on_phase("collectives")
    communicator = backend.communicator(_group(configuration))
    return TensorEngine(
        EngineParts(
            backend=backend,
            profile=described.profile,
            config=config,
            shard=shard,
            model=model,
            decisions=(*described.decisions, dtype_decision, *_threads_decision(configuration, described)),
            open_source=_source_opener(configuration, dtype, backend),
            num_sampled_ids=sampled_ids,
            registry=described.registry,
            choices=described.choices,
            services=services,
            communicator=communicator,
            memory_utilization=configuration.memory_utilization,
            kv_memory_bytes=configuration.kv_memory_bytes,
            enforce_eager=configuration.enforce_eager,
            graph_refusal=platform.declines.get(Clause.GRAPH_CAPTURE),
            on_kernels=on_kernels,
            num_sharing=described.num_sharing,
        )
    )


def _module_engine(
    configuration: WorkerConfiguration,
    described: Described,
    config: ModuleConfig,
    platform: Platform,
    backend: Backend,
    services: Services,
    on_phase: OnPhase,
    on_kernels: OnKernels,
) -> StepEngine:
    from .execution.module_engine import ModuleEngine, ModuleParts

    dtype, dtype_decision = _settle_dtype(configuration, described, config, services, on_phase)
    if lacks(config.dtype, described.profile) and not dtype_decision.overridden:
        services.warn(f"the model runs in {dtype}: {dtype_decision.reason}")
    return ModuleEngine(
        ModuleParts(
            backend=backend,
            profile=described.profile,
            config=config,
            model=_module_facts(configuration, config, dtype),
            decisions=(
                *described.decisions,
                dtype_decision,
                *_threads_decision(configuration, described),
                *config.decisions,
            ),
            load_module=_module_loader(configuration, is_encoder=False),
            num_sampled_ids=num_sampled_ids(Path(configuration.model), config),
            registry=described.registry,
            choices=described.choices,
            services=services,
            communicator=None,
            memory_utilization=configuration.memory_utilization,
            kv_memory_bytes=configuration.kv_memory_bytes,
            enforce_eager=configuration.enforce_eager,
            graph_refusal=platform.declines.get(Clause.GRAPH_CAPTURE),
            on_kernels=on_kernels,
            num_sharing=described.num_sharing,
        )
    )


def _module_loader(
    configuration: WorkerConfiguration, *, is_encoder: bool
) -> Callable[[torch.dtype, torch.device], Any]:
    def load_module(dtype: torch.dtype, device: torch.device) -> Any:
        from .models.module_decoder import load_decoder
        from .models.module_encoder import load_encoder

        seed = configuration.seed if configuration.load_format == "dummy" else None
        load = load_encoder if is_encoder else load_decoder
        return load(Path(configuration.model), seed, dtype, device)

    return load_module


def _group(configuration: WorkerConfiguration) -> WorkerGroup:
    return WorkerGroup(
        rank=configuration.rank,
        num_ranks=configuration.num_ranks,
        generation=configuration.generation,
        run_directory=configuration.run_directory,
        timeout_s=configuration.collective_timeout_s,
    )


def _fair_threads(configuration: WorkerConfiguration) -> int:
    return max(1, usable_cores() // configuration.num_ranks)


def _threads_decision(configuration: WorkerConfiguration, described: Described) -> tuple[Decision, ...]:
    """Only of a processor that is here: elsewhere threads decide nothing."""
    if described.profile.platform != "cpu" or described.platform is None:
        return ()
    asked = described.num_threads != _fair_threads(configuration)
    shared = f"a fair share of {usable_cores()} cores"
    decision = Decision(
        name="threads",
        value=str(described.num_threads),
        reason="asked for by --worker-threads" if asked else shared,
        overridden=asked,
    )
    return (decision,)


def _settle_dtype(
    configuration: WorkerConfiguration,
    described: Described,
    config: ModelConfig | EncoderConfig | ModuleConfig,
    services: Services,
    on_phase: OnPhase,
) -> tuple[str, Decision]:
    """Ranks must agree, so only a group of one measures; several take a measurement that is cached already."""
    makes_vectors = _makes_vectors(configuration, described)
    tried = candidates(config.dtype, makes_vectors=makes_vectors)
    cached = DtypeMeasurements(services.cache_dir, described.profile, described.num_threads, services.warn)
    seconds = cached.read()
    missing = [dtype for dtype in tried if dtype not in seconds]
    is_open = configuration.dtype == "auto" and len(tried) > 1 and configuration.num_ranks == 1
    # accelerators compute half precision faster, all of them
    if missing and is_open and described.profile.platform == "cpu":
        on_phase("dtype measurement")
        seconds |= {dtype: _measured(described, dtype, services) for dtype in missing}
        cached.write(seconds)
    return choose_dtype(configuration.dtype, config.dtype, described.profile, seconds, makes_vectors=makes_vectors)


def _makes_vectors(configuration: WorkerConfiguration, described: Described) -> bool:
    is_encoder = described.encoder is not None or (described.module is not None and described.module.is_encoder)
    return is_encoder or read_embedding_files(Path(configuration.model)) is not None


def _measured(described: Described, dtype: str, services: Services) -> float:
    problem = Problem(dtype=dtype, hidden_size=64, intermediate_size=64, num_heads=1, head_dim=64)
    kernel, _ = described.registry.load("linear", described.profile, problem, services, described.choices)
    return measure(dtype, kernel)  # type: ignore[arg-type]


def _source_opener(
    configuration: WorkerConfiguration, dtype: str, backend: Backend
) -> Callable[[OnBytes], WeightSource]:
    def open_source(on_bytes: OnBytes) -> WeightSource:
        if configuration.load_format == "dummy":
            from ..kernels.trials import DTYPES
            from .weights.dummy_source import DummySource

            return DummySource(configuration.seed, DTYPES[dtype], on_bytes, backend.torch_device)
        from .weights.safetensors_source import SafetensorsSource

        return SafetensorsSource(Path(configuration.model), on_bytes, _upload_to(backend))

    return open_source


def _upload_to(backend: Backend) -> Upload | None:
    """None where weights stay in the host's memory, or none of it is pinned."""
    from .weights.upload import Upload

    if backend.torch_device.type == "cpu":
        return None
    try:
        return Upload(backend)
    except NotSupported:
        return None
