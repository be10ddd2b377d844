"""Steps on tensors: kernels, weights, cache, forward and sample, for any platform that computes.

W work items, T tokens, S sampled rows, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...ipc.facts import SPARE_ROWS, Decision, DeviceHealth, DeviceProfile, Feature, ModelFacts, Resolution
from ...ipc.plan import ResultFlag, StepPlan, StepResult, TokenMasks, WorkFlag, hash_tokens
from ...ipc.worker_messages import Settled
from ...kernels.implementation import Communicator, Services
from ...kernels.registry import KernelChoices, Registry
from ...kernels.trials import DTYPES
from ..memory.exhaustion import exhaustion_as_memory_error
from ..memory.kv_cache import KvCache, KvLayout
from ..memory.memory_plan import MemoryPlan, plan_memory, plan_spending, shared_limit
from ..models.config import ModelConfig
from ..models.decoder import Activations, Decoder, DecoderKernels, StepTensors, WeightReader
from ..models.facts import KERNELS, kernel_problem
from ..models.fused_decode import FusedKernels
from ..models.sharding import Shard
from ..platforms.contract import Backend, Clause
from ..weights.source import OnBytes, WeightSource
from .batch import Batch, BatchBuilder
from .contract import LoadFacts, OnFraction, Spending
from .graphs import Graphs
from .guarded_kernels import KernelReplaced, KernelSet
from .penalty_table import PenaltyTable
from .progress import Progress
from .row_table import RowTable
from .sampler import Logprobs, Sampled, Sampler, SamplerKernels

Array = np.ndarray[Any, np.dtype[Any]]

log = logging.getLogger("trimaran.worker")


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What boot settled before the engine exists."""

    backend: Backend
    profile: DeviceProfile
    config: ModelConfig
    shard: Shard
    model: ModelFacts
    decisions: tuple[Decision, ...]
    open_source: Callable[[OnBytes], WeightSource]
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


class TensorEngine:
    """A StepEngine. Everything runs under inference mode on the step thread."""

    def __init__(self, parts: EngineParts) -> None:
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
        )
        self._batch: Batch | None = None
        self._hidden: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._seconds = [0.0, 0.0, 0.0, 0.0]

    # -- boot

    @torch.inference_mode()
    def load(self, settled: Settled, on_fraction: OnFraction) -> LoadFacts:
        self._settled = settled
        self._load_kernels(settled, on_fraction)
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
        parts = self._parts
        problem = kernel_problem(parts.config, parts.shard, self.model, settled)
        for index, name in enumerate(KERNELS):
            on_fraction("kernels", index / len(KERNELS))
            self._kernels.load(name, problem)
        on_fraction("kernels", 1.0)

    def _load_weights(self, settled: Settled, on_fraction: OnFraction) -> None:
        parts, dtype = self._parts, DTYPES[self.model.dtype]
        kernels = DecoderKernels(**{name: self._kernels[name] for name in DecoderKernels.__dataclass_fields__})  # type: ignore[arg-type]
        source = parts.open_source(lambda done, total: on_fraction("weights", min(done / max(total, 1), 1.0)))
        reader = WeightReader(parts.config, parts.shard, source, kernels.linear, dtype, self._device)
        weights = reader.read()
        self._weight_bytes = weights.num_bytes
        max_sequences = settled.max_num_seqs + SPARE_ROWS
        self._activations = Activations(
            parts.config,
            parts.shard,
            max_tokens=settled.max_batched_tokens,
            max_rows=max_sequences,
            dtype=dtype,
            device=self._device,
        )
        self._decoder = Decoder(
            parts.config,
            parts.shard,
            weights,
            kernels,
            self._activations,
            settled.max_model_len,
            parts.communicator,
            self._device,
            self._fused_kernels(),
        )
        max_blocks = -(-settled.max_model_len // settled.block_size)
        self._builder = BatchBuilder(
            settled.max_batched_tokens, max_sequences, max_blocks, settled.block_size, parts.backend
        )
        self._graphs = Graphs(parts.backend, self._builder, max_sequences, self._forward_recorded)
        self._table = RowTable(max_blocks, max_sequences)
        self._last_tokens = torch.zeros(max_sequences, dtype=torch.int32, device=self._device)
        self._penalties = PenaltyTable(parts.num_sampled_ids, self._device)
        sampling = SamplerKernels(**{name: self._kernels[name] for name in SamplerKernels.__dataclass_fields__})
        draws_on_device = Feature.FP64 in self.profile.capability.features
        self._sampler = Sampler(sampling, self._penalties, parts.num_sampled_ids, draws_on_device=draws_on_device)
        self._layout = KvLayout(
            num_layers=parts.config.num_layers,
            num_kv_heads=parts.shard.num_kv_heads,
            head_dim=parts.config.head_dim,
            block_size=settled.block_size,
            dtype=DTYPES[self.model.kv_dtype],
        )

    def _fused_kernels(self) -> FusedKernels | None:
        """None where the plain references would have to serve: they are slower than the ordinary path."""
        names, registry = FusedKernels.__dataclass_fields__, self._parts.registry
        chosen = {resolution.kernel: resolution.chosen for resolution in self._kernels.resolutions}
        if any(chosen[name] == registry.chain(name)[-1].name for name in names):
            return None
        return FusedKernels(**{name: self._kernels[name] for name in names})

    def _plan_memory(self) -> MemoryPlan:
        parts, memory = self._parts, self._parts.backend.memory_facts()
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
        self._capture()
        for num_tokens in sorted({1, min(64, self._settled.max_batched_tokens)}):
            tensors = self._builder.idle(num_tokens, self._activations.max_rows)
            residual, delta = self._run(tensors, len(tensors.token_ids), len(tensors.kv_lengths))
            logits = self._logits((residual, delta), torch.zeros(1, dtype=torch.int64, device=self._device))
            token = torch.empty(1, dtype=torch.int64, device=self._device)
            self._kernels["greedy_sample"](token, logits, self._parts.num_sampled_ids)
        self._parts.backend.synchronize()
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

    def _refuse_graph(self) -> str | None:
        if self._parts.enforce_eager:
            return "asked for by --enforce-eager"
        if self._parts.graph_refusal is not None:
            return f"{Clause.GRAPH_CAPTURE}: {self._parts.graph_refusal}"
        if self._parts.communicator is not None:
            return "collectives between ranks cannot be recorded"
        fused = FusedKernels.__dataclass_fields__ if self._decoder.fuses_decodes else {}
        names = (*DecoderKernels.__dataclass_fields__, *fused)
        eager = [name for name in names if not self._kernels[name].capturable]
        return f"not capturable: {', '.join(eager)}" if eager else None

    # -- steps

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        began = time.perf_counter()
        self.progress.begin(int(plan.step[0]))
        self._plan = plan
        self._penalties.release(plan.freed_rows.tolist())
        for history in self._table.apply(plan):
            self._penalties.take(history)
        self._table.check(plan, self._cache.num_blocks, self._settled.block_size)
        self._grow_last_tokens()
        padded = self._graphs.bucket(int(plan.counts.sum()), len(plan.rows))
        self._batch = self._builder.build(plan, self._table, self._last_tokens, padded)
        built = time.perf_counter()
        with self._memory_errors():
            tensors = self._builder.tensors(self._batch, padded)
            self._hidden = self._run(tensors, len(tensors.token_ids), len(tensors.kv_lengths))
        self._seconds[:2] = built - began, time.perf_counter() - built

    def _run(self, tensors: Any, num_tokens: int, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states `(residual, delta)`, each `[T, D]`; no delta where the decoder's path has none."""
        if num_tokens == 0:
            return self._activations.hidden(0)
        while (graph := self._graphs.find(num_tokens, num_sequences)) is None:
            try:
                return self._decoder.forward(tensors, self._cache.layers, self.progress.bump)
            except KernelReplaced:
                continue  # from the embedding on: what the pass had changed, it makes anew
        graph.replay(num_tokens, num_sequences, self.progress.counter)
        return self._decoder.hidden(num_tokens, is_decode=tensors.is_decode)

    def _grow_last_tokens(self) -> None:
        missing = self._table.num_rows - len(self._last_tokens)
        if missing > 0:
            self._last_tokens = torch.cat((self._last_tokens, self._last_tokens.new_zeros(missing)))

    @torch.inference_mode()
    def sample(self, masks: TokenMasks | None) -> StepResult:
        began = time.perf_counter()
        batch, plan = self._batch, self._plan
        assert batch is not None and self._hidden is not None
        with self._memory_errors():
            prompt = self._prompt_logprobs(plan, batch)
            items = batch.sampled_items()
            columns = self._sampled(batch, items, masks)
        self._seconds[2] = time.perf_counter() - began
        self._batch = self._hidden = None
        self.progress.end()
        return StepResult(step=plan.step.copy(), seconds=np.array(self._seconds), **columns, **prompt)

    def _sampled(self, batch: Batch, items: Array, masks: TokenMasks | None) -> dict[str, Array]:
        rows = batch.rows[items]
        if not len(rows):
            return {"tokens_hash": hash_tokens(rows, rows)}
        sampled = self._drawn(batch, items, masks)
        tokens = sampled.tokens.numpy(force=True)
        broken = tokens < 0
        ids = np.where(broken, 0, tokens).astype(np.int32)
        places = torch.from_numpy(rows.astype(np.int64)).to(self._device)
        self._last_tokens[places] = torch.from_numpy(ids).to(self._device)
        logprobs = sampled.logprobs
        return {
            "rows": rows,
            "token_ids": ids,
            "flags": np.where(broken, ResultFlag.INVALID, 0).astype(np.uint8),
            "tokens_hash": hash_tokens(rows, ids),
            "logprob_rows": sampled.logprob_rows.astype(np.int32),
            "logprobs": logprobs.values,
            "ranks": logprobs.ranks,
            "top_counts": logprobs.counts,
            "top_ids": logprobs.top_ids,
            "top_logprobs": logprobs.top_values,
        }

    def _drawn(self, batch: Batch, items: Array, masks: TokenMasks | None) -> Sampled:
        while True:
            try:
                logits_SV = self._logits_at(batch.ends[items] - 1)
                return self._sampler.sample(logits_SV, batch.rows[items], batch.lengths[items], self._table, masks)
            except KernelReplaced:
                continue  # the logits may be half penalised: they are computed again

    def _kernel_changed(self, name: str) -> None:
        """A recording holds the kernels that it was made of; those of sampling are in none."""
        is_fused = name in FusedKernels.__dataclass_fields__
        if is_fused:
            self._decoder.fuses_decodes = False
        if self._graphs.are_captured and (is_fused or name in DecoderKernels.__dataclass_fields__):
            self._graphs.drop()
            reason = f"kernel {name} was replaced while serving"
            self._decide_graphs(Decision(name="graphs", value="eager", reason=reason))
            log.warning("graphs = eager: %s", reason)
        self._parts.on_kernels(self._kernels.resolutions)

    def _logits_at(self, places: Array) -> torch.Tensor:
        """`[S, V]` of the hidden states at these tokens of the batch."""
        assert self._hidden is not None
        return self._logits(self._hidden, torch.from_numpy(places.astype(np.int64)).to(self._device))

    def _logits(self, hidden: tuple[torch.Tensor, torch.Tensor | None], index_S: torch.Tensor) -> torch.Tensor:
        residual, delta = hidden
        while True:
            try:
                return self._decoder.logits(residual[index_S], None if delta is None else delta[index_S])
            except KernelReplaced:
                continue  # from copies of the hidden states, which are whole

    def _prompt_logprobs(self, plan: StepPlan, batch: Batch) -> dict[str, Array]:
        """Of the targets of the items that ask, computed in slices so that the logits stay small."""
        items = np.nonzero(batch.flags & WorkFlag.PROMPT_LOGPROBS)[0]
        if not len(items):
            return {}
        rows, counts = batch.rows[items], plan.target_counts
        first = np.repeat(batch.ends[items] - plan.counts[items], counts)
        places = first + np.arange(len(plan.targets)) - np.repeat(np.cumsum(counts) - counts, counts)
        num_top = self._table.columns["num_prompt_logprobs"][rows]
        parts = list(self._prompt_slices(places, plan.targets, np.repeat(num_top, counts)))
        return {
            "prompt_rows": rows,
            "prompt_counts": counts.copy(),
            "prompt_top_counts": np.minimum(num_top, self._parts.num_sampled_ids).astype(np.int32),
            "prompt_logprobs": _joined([part.values for part in parts], np.float32),
            "prompt_ranks": _joined([part.ranks for part in parts], np.int32),
            "prompt_top_ids": _joined([part.top_ids for part in parts], np.int32),
            "prompt_top_logprobs": _joined([part.top_values for part in parts], np.float32),
        }

    def _prompt_slices(self, places: Array, targets: Array, num_top: Array) -> Iterator[Logprobs]:
        size = self._activations.max_rows
        for begin in range(0, len(places), size):
            part = slice(begin, begin + size)
            logits = self._logits_at(places[part])
            self.progress.bump()
            tokens = torch.from_numpy(targets[part].astype(np.int64)).to(self._device)
            yield self._sampler.logprobs(logits, tokens, num_top[part])

    def health(self) -> DeviceHealth:
        return self._parts.backend.health()

    def _memory_errors(self) -> AbstractContextManager[None]:
        """Torch says by a RuntimeError that memory ran out; callers know MemoryError."""
        return exhaustion_as_memory_error(self._parts.backend.release_cached_memory)

    def drop_rows(self) -> None:
        self._table.clear()
        self._penalties.clear()
        self._batch = self._hidden = None
        self.progress.end()


def _joined(parts: list[Array], dtype: Any) -> Array:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
