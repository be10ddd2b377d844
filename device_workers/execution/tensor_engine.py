"""Steps on tensors: kernels, weights, cache, forward and sample, for any platform that computes.

W work items, T tokens, S sampled rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from msgspec.structs import replace

from ...ipc.facts import SPARE_ROWS, Decision, DeviceHealth, DeviceProfile, Feature, ModelFacts, Problem, Resolution
from ...ipc.plan import StepPlan, TokenMasks, WorkFlag
from ...ipc.worker_messages import Settled
from ...kernels.compilations import Compilations, compiling
from ...kernels.implementation import Communicator, HostLengths, Kernel, Services
from ...kernels.registry import KernelChoices, Registry, failure_text
from ...kernels.trials import DTYPES
from ..memory.exhaustion import exhaustion_as_memory_error
from ..memory.kv_cache import KvCache, KvLayout
from ..memory.memory_plan import MemoryPlan, plan_memory, plan_spending, shared_limit
from ..memory.staging import HostLink, Readback, TurningBuffers
from ..models.config import ModelConfig
from ..models.decoder import Activations, Decoder, DecoderKernels, StepTensors, WeightReader
from ..models.facts import KERNELS, kernel_problem
from ..models.fused_decode import FusedKernels
from ..models.sharding import Shard
from ..platforms.contract import Backend, Clause
from ..weights.source import OnBytes, WeightSource
from .batch import Batch, BatchBuilder, StepSize
from .contract import LoadFacts, OnFraction, Spending
from .graphs import Graphs
from .guarded_kernels import KernelReplaced, KernelSet
from .penalty_table import PenaltyTable
from .progress import Progress
from .rehearsal import rehearse
from .row_table import RowTable
from .sampler import PendingLogprobs, Sampled, Sampler, SamplerKernels
from .tensor_step import Pooled, PromptLogprobs, StepClock, TensorStep

Array = np.ndarray[Any, np.dtype[Any]]

log = logging.getLogger("trimaran.worker")

_PROMPT_LOGPROBS = int(WorkFlag.PROMPT_LOGPROBS)  # numpy is slow with the enum itself
_POOLS = int(WorkFlag.POOLS)
_NO_ROWS: Array = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """What boot settled before the engine exists, whatever computes the model."""

    backend: Backend
    profile: DeviceProfile
    model: ModelFacts
    decisions: tuple[Decision, ...]
    num_sampled_ids: int
    registry: Registry
    choices: KernelChoices
    services: Services
    communicator: Communicator | None
    memory_utilization: float
    kv_memory_bytes: int | None
    enforce_eager: bool
    graph_refusal: str | None
    on_kernels: Callable[[tuple[Resolution, ...]], None]
    num_sharing: int = 1


@dataclass(frozen=True, kw_only=True)
class EngineParts(StepParts):
    """The same of a model that is computed by code of ours."""

    config: ModelConfig
    shard: Shard
    open_source: Callable[[OnBytes], WeightSource]


class StepDecoder(Protocol):
    """What computes a step: see `models.decoder.Decoder`."""

    fuses_decodes: bool
    decode_attention: Kernel | None

    def forward(
        self,
        batch: StepTensors,
        cache: tuple[tuple[torch.Tensor, torch.Tensor], ...],
        on_layer: Callable[[], None],
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def hidden(self, num_tokens: int, *, is_decode: bool) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def logits(self, residual_RD: torch.Tensor, delta_RD: torch.Tensor | None) -> torch.Tensor: ...

    def last_hidden(self, residual_RD: torch.Tensor, delta_RD: torch.Tensor | None) -> torch.Tensor: ...


class StepBuffers(Protocol):
    """What a step computes in: see `models.decoder.Activations`. `reserved_bytes` of `num_bytes` are not taken yet."""

    num_bytes: int
    reserved_bytes: int
    max_rows: int

    def hidden(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]: ...


class StepsOnTensors:
    """A StepEngine but for its model: subclasses load kernels, make buffers and load the decoder. Everything runs under
    inference mode on the step thread.
    """

    _activations: StepBuffers
    _decoder: StepDecoder
    _layout: KvLayout
    _weight_bytes: int

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self.profile = parts.profile
        self.model = parts.model
        self.decisions = parts.decisions
        memory = parts.backend.memory_facts()
        self.spending: Spending | None = plan_spending(
            memory,
            utilization=parts.memory_utilization,
            kv_memory_bytes=parts.kv_memory_bytes,
            shared_limit_bytes=shared_limit(parts.profile, memory.total_bytes, parts.num_sharing),
            num_sharing=parts.num_sharing,
        )
        self.progress = Progress()
        self._device = parts.backend.torch_device
        self._kernels = KernelSet(
            parts.registry,
            self.profile,
            parts.services,
            parts.choices,
            num_ranks=1 if parts.communicator is None else parts.communicator.num_ranks,
            on_changed=self._kernel_changed,
            synchronize=parts.backend.synchronize,
        )
        self._link = HostLink(parts.backend)
        self._batch: Batch | None = None
        self._hidden: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._logits: torch.Tensor | None = None
        self._only_last = False
        self._clock = StepClock()
        self._compilations = Compilations(self._compiled_late)

    # -- boot

    @torch.inference_mode()
    def load(self, settled: Settled, on_fraction: OnFraction) -> LoadFacts:
        self._settled = settled
        self._load_kernels(settled, on_fraction)
        self._make_buffers(settled)
        with self._compiling_steps(on_fraction):
            self._load_weights(settled, on_fraction)
        plan = self._plan_memory()
        return LoadFacts(
            resolutions=self._kernels.resolutions,
            decisions=(*self.decisions, plan.decision),
            memory=self._parts.backend.memory_facts(),
            weight_bytes=plan.weight_bytes,
            activation_bytes=plan.activation_bytes,
            kv_budget_bytes=plan.kv_budget_bytes,
            kv_bytes_per_block=self._layout.bytes_per_block,
            kv_is_limited=plan.kv_is_limited,
        )

    def _load_kernels(self, settled: Settled, on_fraction: OnFraction) -> None:
        problem, names = self._problem(settled), self._kernel_names
        self._kernels.prepare(names, problem, lambda: on_fraction("kernel compilation", 0.0))
        for index, name in enumerate(names):
            on_fraction("kernels", index / len(names))
            self._kernels.load(name, problem)
        on_fraction("kernels", 1.0)

    @property
    def _kernel_names(self) -> tuple[str, ...]:
        raise NotImplementedError

    def _problem(self, settled: Settled) -> Problem:
        """What is asked of every kernel."""
        raise NotImplementedError

    def _make_activations(self, settled: Settled, max_sequences: int) -> StepBuffers:
        raise NotImplementedError

    def _make_layout(self, settled: Settled) -> KvLayout:
        raise NotImplementedError

    def _load_decoder(self, settled: Settled, on_fraction: OnFraction) -> StepDecoder:
        """Sets `_weight_bytes` too."""
        raise NotImplementedError

    def _make_buffers(self, settled: Settled) -> None:
        """Of steps: what they read and write but for weights and cache."""
        parts, max_sequences = self._parts, settled.max_num_seqs + SPARE_ROWS
        self._activations = self._make_activations(settled, max_sequences)
        self._table = RowTable(-(-settled.max_model_len // settled.block_size), max_sequences)
        self._builder = BatchBuilder(
            settled.max_batched_tokens, max_sequences, self._table, settled.block_size, parts.backend
        )
        self._layout = self._make_layout(settled)

    @contextmanager
    def _compiling_steps(self, on_fraction: OnFraction) -> Iterator[None]:
        """Round the loading of weights: meanwhile what steps will launch may be compiled."""
        yield

    def _load_weights(self, settled: Settled, on_fraction: OnFraction) -> None:
        parts, max_sequences = self._parts, settled.max_num_seqs + SPARE_ROWS
        self._decoder = self._load_decoder(settled, on_fraction)
        self._graphs = Graphs(
            parts.backend, self._builder, max_sequences, self._forward_recorded, self._to_tokens_recorded
        )
        self._tokens = torch.zeros(max_sequences, dtype=torch.int64, device=self._device)
        self._tokens_on_host = TurningBuffers(max_sequences, torch.int64, parts.backend)
        self._penalties = PenaltyTable(parts.num_sampled_ids, self._device, self._link)
        sampling = SamplerKernels(**{name: self._kernels[name] for name in SamplerKernels.__dataclass_fields__})
        self._sampler = Sampler(
            sampling, self._penalties, parts.num_sampled_ids, self._link, draws_on_device=self._draws_on_device
        )

    @property
    def _draws_on_device(self) -> bool:
        draws_on_device = Feature.FP64 in self.profile.capability.features
        return draws_on_device

    def _serves(self, name: str) -> bool:
        """Whether anything but the plain reference was found for a kernel that only saves time."""
        chosen = next(found.chosen for found in self._kernels.resolutions if found.kernel == name)
        return chosen != self._parts.registry.chain(name)[-1].name

    def _plan_memory(self) -> MemoryPlan:
        parts, memory = self._parts, self._parts.backend.memory_facts()
        reserved = self._activations.reserved_bytes
        memory = replace(
            memory, free_bytes=max(memory.free_bytes - reserved, 0), ours_bytes=memory.ours_bytes + reserved
        )
        return plan_memory(
            memory,
            weight_bytes=self._weight_bytes,
            activation_bytes=self._activations.num_bytes + self._builder.num_bytes,
            utilization=parts.memory_utilization,
            kv_memory_bytes=parts.kv_memory_bytes,
            shared_limit_bytes=shared_limit(self.profile, memory.total_bytes, parts.num_sharing),
            share_bytes=self.spending.spendable_bytes if self.spending and parts.num_sharing > 1 else None,
        )

    @torch.inference_mode()
    def allocate(self, num_blocks: int) -> None:
        with self._memory_errors():
            self._cache = KvCache(self._layout, num_blocks, self._device)

    @torch.inference_mode()
    def warm_up(self) -> dict[str, int]:
        self._compilations.pause()
        self._capture()
        for num_tokens in sorted({1, min(64, self._settled.max_batched_tokens)}):
            size = StepSize(num_tokens, min(num_tokens, self._activations.max_rows))
            self._compute(self._builder.idle(size), replays=True)
            logits = self._logits_at(torch.zeros(1, dtype=torch.int64, device=self._device))
            token = torch.empty(1, dtype=torch.int64, device=self._device)
            self._kernels["greedy_sample"](token, logits, self._parts.num_sampled_ids)
        self._parts.backend.synchronize()
        self._compilations.watch()
        return {
            "weights": self._weight_bytes,
            "activations": self._activations.num_bytes + self._builder.num_bytes,
            "kv_cache": self._cache.num_bytes,
            **({"graphs": self._graphs.num_bytes} if self._graphs.num_bytes else {}),
        }

    def _capture(self) -> None:
        decision = None
        while decision is None:
            decision = self._captured()
        self._decide_graphs(decision)

    def _captured(self) -> Decision | None:
        """What was recorded, or why nothing is; None when a kernel was replaced meanwhile: to be tried anew."""
        refusal = self._refuse_graph()
        if refusal is not None:
            return Decision(name="graphs", value="eager", reason=refusal)
        try:
            with self._kernels.recording():
                return self._graphs.capture(self._settled.graph_buckets, self._settled.max_batched_tokens)
        except KernelReplaced:
            self._graphs.drop()
            return None

    def _decide_graphs(self, decision: Decision) -> None:
        others = tuple(other for other in self.decisions if other.name != "graphs")
        self.decisions = (*others, decision)

    def _forward_recorded(self, tensors: StepTensors) -> None:
        self._decoder.forward(tensors, self._cache.layers, lambda: None)

    def _to_tokens_recorded(self, size: StepSize) -> None:
        tokens, (places, rows) = self._tokens[: size.num_sequences], self._builder.sampled(size)
        inputs = self._builder.tensors(size, only_last=True)
        residual, delta = self._decoder.forward(inputs, self._cache.layers, lambda: None)
        if not size.is_decode:
            residual, delta = residual[places], None if delta is None else delta[places]
        self._kernels["greedy_sample"](tokens, self._decoder.logits(residual, delta), self._parts.num_sampled_ids)
        self._builder.last_tokens.index_copy_(0, rows, tokens)

    def _refuse_graph(self) -> str | None:
        if self._parts.enforce_eager:
            return "asked for by --enforce-eager"
        if self._parts.graph_refusal is not None:
            return f"{Clause.GRAPH_CAPTURE}: {self._parts.graph_refusal}"
        if self._parts.communicator is not None:
            return "collectives between ranks cannot be recorded"
        names = [*DecoderKernels.__dataclass_fields__, *filter(self._serves, FusedKernels.__dataclass_fields__)]
        if self._graphs.hold_tokens:
            names.append("greedy_sample")
        eager = [name for name in names if not self._kernels[name].capturable]
        return f"not capturable: {', '.join(eager)}" if eager else None

    # -- steps

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        self._clock.begin()
        self.progress.begin(int(plan.step[0]))
        self._plan = plan
        self._penalties.release(plan.freed_rows.tolist())
        for history in self._table.apply(plan):
            self._penalties.take(history)
        self._table.check(plan, self._cache.num_blocks, self._settled.block_size)
        # These need hidden states, of which a recording that goes on to tokens leaves none.
        wants_all = bool((plan.flags & (_PROMPT_LOGPROBS | _POOLS)).any())
        replays = not (self._graphs.hold_tokens and wants_all)
        self._only_last = self._graphs.hold_tokens and not wants_all
        size = StepSize(int(plan.counts.sum()), len(plan.rows))
        padded = self._graphs.padded(size) if replays else size
        self._batch = self._builder.build(plan, padded, only_last=self._only_last)
        self._clock.note("build")
        with self._memory_errors():
            self._compute(self._batch.size, self._batch.host, replays=replays)
        self._clock.note("launch")

    def _compute(self, size: StepSize, host: HostLengths | None = None, *, replays: bool) -> None:
        """Hidden states of the step whose inputs were built last; and its logits, where a recording holds them."""
        self._logits = None
        graph = self._graphs.find(size) if replays else None
        if size.num_tokens == 0:
            self._hidden = self._activations.hidden(0)
        elif graph is None:
            self._hidden = self._forward_eagerly(size, host)
        else:
            graph.replay(size.num_tokens, size.num_sequences, self.progress.counter)
            self._hidden = self._decoder.hidden(size.num_tokens, is_decode=size.is_decode)
            if self._graphs.hold_tokens:
                self._logits = self._recorded_buffer()[: size.num_sequences]

    def _recorded_buffer(self) -> torch.Tensor:
        """Where recordings leave logits."""
        raise NotImplementedError

    def _forward_eagerly(self, size: StepSize, host: HostLengths | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states as the decoder leaves them."""
        tensors = self._builder.tensors(size, host, only_last=self._only_last)
        while True:
            try:
                return self._decoder.forward(tensors, self._cache.layers, self.progress.bump)
            except KernelReplaced:
                continue  # from the embedding on: what the pass had changed, it makes anew

    @torch.inference_mode()
    def sample(self, masks: TokenMasks | None) -> TensorStep:
        batch, plan = self._batch, self._plan
        assert batch is not None and self._hidden is not None
        readback = self._link.readback()
        with self._memory_errors():
            prompt = self._prompt_logprobs(plan, batch, readback)
            pooled = self._pooled(batch, readback)
            sampled = self._sampled(batch, masks, readback)
            tokens = None if sampled is None else readback.take(sampled.tokens, self._tokens_on_host)
            readback.close()
        self._batch = self._hidden = self._logits = None
        step = int(plan.step[0])
        return TensorStep(step, batch, tokens, sampled, prompt, pooled, readback, self._clock.end(), self.progress)

    def _sampled(self, batch: Batch, masks: TokenMasks | None, readback: Readback) -> Sampled | None:
        """Tokens of the items that sample, kept as the last ones of their rows."""
        if not len(batch.sampled):
            return None
        rows, lengths = batch.rows[batch.sampled], batch.lengths[batch.sampled]
        recorded = self._recorded_logits(batch)
        if recorded is not None and batch.is_plain and masks is None:
            return Sampled(self._tokens[: len(rows)], _NO_ROWS, None)
        inputs = self._builder.sampling(batch)
        while True:
            try:
                logits_SV = self._logits_at(inputs.places_S) if recorded is None else recorded
                sampled = self._sampler.sample(logits_SV, rows, lengths, inputs.draws, self._table, masks, readback)
                break
            except KernelReplaced:  # the logits may be half penalised: they are computed again
                if self._logits is not None:
                    self._logits = recorded = None
                    self._hidden = self._forward_eagerly(batch.size, batch.host)
        self._builder.last_tokens.index_copy_(0, inputs.rows_S, sampled.tokens)
        return sampled

    def _recorded_logits(self, batch: Batch) -> torch.Tensor | None:
        """`[S, V]` where a recording left them in this order: of all decodes, or of those that sample."""
        if self._logits is None or (batch.size.is_decode and len(batch.sampled) < batch.num_sequences):
            return None
        return self._logits[: len(batch.sampled)]

    def _logits_at(self, index_S: torch.Tensor) -> torch.Tensor:
        """`[S, V]` at these tokens of the batch."""
        if self._logits is not None:  # a step of decodes, whose tokens are its sequences
            return self._logits[index_S]
        assert self._hidden is not None
        residual, delta = self._hidden
        while True:
            try:
                return self._decoder.logits(residual[index_S], None if delta is None else delta[index_S])
            except KernelReplaced:
                continue  # from copies of the hidden states, which are whole

    def _kernel_changed(self, name: str) -> None:
        """A recording holds the kernels that it was made of."""
        is_fused = name in FusedKernels.__dataclass_fields__
        if is_fused:
            self._decoder.fuses_decodes = False
        if name == "decode_attention" and not self._serves(name):
            self._decoder.decode_attention = None
        is_recorded = is_fused or name in DecoderKernels.__dataclass_fields__ or name == "greedy_sample"
        if self._graphs.are_captured and is_recorded:
            self._graphs.drop()
            reason = f"kernel {name} was replaced while serving"
            self._decide_graphs(Decision(name="graphs", value="eager", reason=reason))
            log.warning("graphs = eager: %s", reason)
        self._parts.on_kernels(self._kernels.resolutions)

    def _compiled_late(self, kernel: str) -> None:
        self.progress.compiled_after_ready += 1
        log.warning("a step waits for a kernel to be compiled, though all should have been at the start: %s", kernel)

    def _prompt_logprobs(self, plan: StepPlan, batch: Batch, readback: Readback) -> PromptLogprobs | None:
        """Of the targets of the items that ask, computed in slices so that the logits stay small."""
        items = np.nonzero(batch.flags & _PROMPT_LOGPROBS)[0]
        if not len(items):
            return None
        rows, counts = batch.rows[items], plan.target_counts.copy()
        first = np.repeat(batch.ends[items] - plan.counts[items], counts)
        places = first + np.arange(len(plan.targets)) - np.repeat(np.cumsum(counts) - counts, counts)
        num_top = np.minimum(self._table.columns["num_prompt_logprobs"][rows], self._parts.num_sampled_ids)
        parts = tuple(self._prompt_slices(places, plan.targets, np.repeat(num_top, counts), readback))
        return PromptLogprobs(rows, counts, num_top.astype(np.int32), parts)

    def _prompt_slices(
        self, places: Array, targets: Array, num_top: Array, readback: Readback
    ) -> Iterator[PendingLogprobs]:
        size = self._activations.max_rows
        for begin in range(0, len(places), size):
            part = slice(begin, begin + size)
            logits = self._logits_at(self._link.send(places[part].astype(np.int64)))
            self.progress.bump()
            tokens = self._link.send(targets[part].astype(np.int64))
            yield self._sampler.logprobs(logits, tokens, num_top[part], readback)

    def _pooled(self, batch: Batch, readback: Readback) -> Pooled | None:
        """The last hidden states of the items that pool: of the tokens that end their prompts."""
        items = np.nonzero(batch.flags & _POOLS)[0]
        if not len(items):
            return None
        assert self._hidden is not None
        residual, delta = self._hidden
        places = self._link.send(batch.ends[items].astype(np.int64) - 1)
        while True:
            try:
                vectors = self._decoder.last_hidden(residual[places], None if delta is None else delta[places])
                return Pooled(batch.rows[items], readback.take(vectors))
            except KernelReplaced:
                continue  # from copies of the hidden states, which are whole

    def health(self) -> DeviceHealth:
        return self._parts.backend.health()

    def _memory_errors(self) -> AbstractContextManager[None]:
        """Torch says by a RuntimeError that memory ran out; callers know MemoryError."""
        return exhaustion_as_memory_error(self._parts.backend.release_cached_memory)

    def drop_rows(self) -> None:
        self._table.clear()
        self._penalties.clear()
        self._batch = self._hidden = self._logits = None
        self.progress.end()


class TensorEngine(StepsOnTensors):
    """A StepEngine of a decoder of ours."""

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        self._own = parts

    @property
    def _kernel_names(self) -> tuple[str, ...]:
        return KERNELS

    def _problem(self, settled: Settled) -> Problem:
        return kernel_problem(self._own.config, self._own.shard, self.model, settled)

    def _make_activations(self, settled: Settled, max_sequences: int) -> Activations:
        self._buffers = Activations(
            self._own.config,
            self._own.shard,
            max_tokens=settled.max_batched_tokens,
            max_rows=max_sequences,
            dtype=DTYPES[self.model.dtype],
            device=self._device,
        )
        return self._buffers

    def _recorded_buffer(self) -> torch.Tensor:
        return self._buffers.logits_RV

    def _make_layout(self, settled: Settled) -> KvLayout:
        return KvLayout(
            num_layers=self._own.config.num_layers,
            num_kv_heads=self._own.shard.num_kv_heads,
            head_dim=self._own.config.head_dim,
            block_size=settled.block_size,
            dtype=DTYPES[self.model.kv_dtype],
        )

    @contextmanager
    def _compiling_steps(self, on_fraction: OnFraction) -> Iterator[None]:
        """Meanwhile other threads compile what steps will launch; at the end all of it is there."""
        if not self._kernels.are_compiled:
            yield
            return
        with self._kernels.together() as may:
            if not may:
                yield
                return
            services = self._parts.services
            with compiling(services.num_threads, services.device):
                on_fraction("rehearsal", 0.0)
                self._rehearse()
                yield
                on_fraction("step compilation", 0.0)

    def _rehearse(self) -> None:
        parts = self._own
        try:
            rehearse(
                parts.config,
                parts.shard,
                self._kernels,
                self._buffers,
                self._builder,
                self._layout,
                self._settled,
                num_sampled_ids=parts.num_sampled_ids,
                fuses=parts.communicator is None and all(map(self._serves, FusedKernels.__dataclass_fields__)),
                draws_on_device=self._draws_on_device,
                attends_to_decodes=self._serves("decode_attention"),
            )
        except Exception as error:  # kernels may raise anything; whoever calls them next says so
            log.info("not all that steps launch is compiled ahead: %s", failure_text(error))
        parts.backend.release_cached_memory()

    def _load_decoder(self, settled: Settled, on_fraction: OnFraction) -> Decoder:
        parts, dtype = self._own, DTYPES[self.model.dtype]
        kernels = DecoderKernels(**{name: self._kernels[name] for name in DecoderKernels.__dataclass_fields__})  # type: ignore[arg-type]
        source = parts.open_source(lambda done, total: on_fraction("weights", min(done / max(total, 1), 1.0)))
        reader = WeightReader(parts.config, parts.shard, source, kernels.linear, dtype, self._device)
        weights = reader.read()
        parts.backend.synchronize()  # copies from the source's buffers, which end here
        self._weight_bytes = weights.num_bytes
        return Decoder(
            parts.config,
            parts.shard,
            weights,
            kernels,
            self._buffers,
            settled.max_model_len,
            parts.communicator,
            self._device,
            self._fused_kernels(),
            self._kernels["decode_attention"] if self._serves("decode_attention") else None,
        )

    def _fused_kernels(self) -> FusedKernels | None:
        """None where the plain references would have to serve: they are slower than the ordinary path."""
        names = FusedKernels.__dataclass_fields__
        return FusedKernels(**{name: self._kernels[name] for name in names}) if all(map(self._serves, names)) else None
