"""Steps of an encoder: whole texts in, one vector each out. No cache, no rows to remember, nothing sampled.

T tokens, S texts, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...ipc.conditions import DeviceFault, TrimaranError
from ...ipc.facts import Decision, DeviceHealth, DeviceProfile, ModelFacts, Resolution
from ...ipc.plan import StepPlan, StepResult, TokenMasks, WorkFlag, hash_tokens
from ...ipc.worker_messages import Settled
from ...kernels.implementation import Services
from ...kernels.registry import KernelChoices, Registry
from ...kernels.trials import DTYPES
from ..memory.exhaustion import exhaustion_as_memory_error
from ..memory.memory_plan import plan_memory, plan_spending, shared_limit
from ..memory.staging import HostLink, Readback
from ..models.encoder import Encoder, EncoderInputs, EncoderReader
from ..models.encoder_config import ENCODER_KERNELS, EncoderConfig, encoder_problem
from ..models.encoding import group_by_length
from ..models.module_config import ModuleConfig
from ..models.module_encoder import ModuleEncoder
from ..platforms.contract import Backend
from ..weights.source import OnBytes, WeightSource
from .contract import LoadFacts, OnFraction, Spending
from .guarded_kernels import KernelReplaced, KernelSet
from .progress import Progress
from .tensor_step import Pooled, StepClock, StepTimes

Array = np.ndarray[Any, np.dtype[Any]]

_POOLS = int(WorkFlag.POOLS)


@dataclass(frozen=True, kw_only=True)
class EncoderParts:
    """What boot settled before the engine exists."""

    backend: Backend
    profile: DeviceProfile
    config: EncoderConfig | ModuleConfig
    model: ModelFacts
    decisions: tuple[Decision, ...]
    open_source: Callable[[OnBytes], WeightSource]
    load_module: Callable[[torch.dtype, torch.device], Any] | None = None
    registry: Registry
    choices: KernelChoices
    services: Services
    memory_utilization: float
    on_kernels: Callable[[tuple[Resolution, ...]], None]
    num_sharing: int = 1


@dataclass(frozen=True)
class EncoderStep:
    """A PendingStep."""

    step: int
    pooled: Pooled
    readback: Readback
    times: StepTimes
    progress: Progress

    def is_done(self) -> bool:
        return self.readback.is_done()

    def result(self) -> StepResult:
        try:
            self.readback.wait()
        except TrimaranError:
            raise
        except RuntimeError as error:
            raise DeviceFault(f"step {self.step} ({len(self.pooled.rows)} texts): {error}") from error
        self.progress.end(self.step)
        nothing = np.empty(0, np.int32)
        return StepResult(
            step=np.array([self.step], np.int64),
            seconds=self.times.column(),
            tokens_hash=hash_tokens(nothing, nothing),
            **self.pooled.columns(),
        )


class EncoderEngine:
    """A StepEngine. Everything runs under inference mode on the step thread."""

    def __init__(self, parts: EncoderParts) -> None:
        self._parts = parts
        self.profile = parts.profile
        self.model = parts.model
        self.decisions = (*parts.decisions, *parts.config.decisions)
        memory = parts.backend.memory_facts()
        self._shared_limit = shared_limit(parts.profile, memory.total_bytes, parts.num_sharing)
        self.spending: Spending | None = plan_spending(
            memory,
            utilization=parts.memory_utilization,
            kv_memory_bytes=None,
            shared_limit_bytes=self._shared_limit,
            num_sharing=parts.num_sharing,
        )
        self.progress = Progress()
        self._device = parts.backend.torch_device
        self._kernels = KernelSet(
            parts.registry,
            parts.profile,
            parts.services,
            parts.choices,
            num_ranks=1,
            on_changed=lambda name: parts.on_kernels(self._kernels.resolutions),
            synchronize=parts.backend.synchronize,
        )
        self._link = HostLink(parts.backend)
        self._clock = StepClock()

    # -- boot

    @torch.inference_mode()
    def load(self, settled: Settled, on_fraction: OnFraction) -> LoadFacts:
        parts = self._parts
        if isinstance(parts.config, ModuleConfig):
            self._load_module(parts.config, on_fraction)
        else:
            self._load_own(parts.config, settled, on_fraction)
        self._max_tokens = settled.max_batched_tokens
        activation_bytes = self.model.step_bytes(
            max_tokens=settled.max_batched_tokens, max_rows=settled.max_num_seqs, max_blocks=0
        )
        memory = parts.backend.memory_facts()
        plan = plan_memory(
            memory,
            weight_bytes=self._weight_bytes,
            activation_bytes=activation_bytes,
            utilization=parts.memory_utilization,
            kv_memory_bytes=None,
            shared_limit_bytes=self._shared_limit,
        )
        return LoadFacts(
            resolutions=self._kernels.resolutions,
            decisions=self.decisions,
            memory=memory,
            weight_bytes=plan.weight_bytes,
            activation_bytes=activation_bytes,
            kv_budget_bytes=0,
            kv_bytes_per_block=0,
        )

    def _load_own(self, config: EncoderConfig, settled: Settled, on_fraction: OnFraction) -> None:
        parts, problem = self._parts, encoder_problem(config, self.model, settled)
        self._kernels.prepare(ENCODER_KERNELS, problem, lambda: on_fraction("kernel compilation", 0.0))
        for name in ENCODER_KERNELS:
            self._kernels.load(name, problem)
        on_fraction("kernels", 1.0)
        source = parts.open_source(lambda done, total: on_fraction("weights", min(done / max(total, 1), 1.0)))
        linear = self._kernels["linear"]
        weights = EncoderReader(config, source, linear, DTYPES[self.model.dtype], self._device).read()  # type: ignore[arg-type]
        parts.backend.synchronize()  # copies from the source's buffers, which end here
        self._encoder: Encoder | ModuleEncoder = Encoder(config, weights, linear)  # type: ignore[arg-type]
        self._weight_bytes = weights.num_bytes

    def _load_module(self, config: ModuleConfig, on_fraction: OnFraction) -> None:
        assert self._parts.load_module is not None
        on_fraction("weights", 0.0)
        with torch.inference_mode(False):
            model = self._parts.load_module(DTYPES[self.model.dtype], self._device)
        self._parts.backend.synchronize()
        on_fraction("weights", 1.0)
        self._encoder = encoder = ModuleEncoder(config, model)
        self._weight_bytes = encoder.num_bytes

    def allocate(self, num_blocks: int) -> None:
        """Nothing is kept between steps."""
        assert num_blocks == 0, f"{num_blocks} blocks for an encoder"

    @torch.inference_mode()
    def warm_up(self) -> dict[str, int]:
        for length in sorted({1, min(self.model.max_model_len, self._max_tokens)}):
            ids, counts = np.zeros(length, np.int32), np.array([length], np.int32)
            with self._memory_errors():
                self._vectors(self._inputs(ids, counts))
        self._parts.backend.synchronize()
        return {"weights": self._weight_bytes, "kv_cache": 0}

    # -- steps

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        self._clock.begin()
        self._step = int(plan.step[0])
        self.progress.begin(self._step)
        assert (plan.flags == _POOLS).all() and not plan.starts.any(), f"step {self._step} is not of whole texts"
        self._rows = plan.rows.copy()
        inputs = self._inputs(plan.token_ids, plan.counts)
        self._clock.note("build")
        with self._memory_errors():
            self._vectors_SD = self._vectors(inputs)
        self._clock.note("launch")

    @torch.inference_mode()
    def sample(self, masks: TokenMasks | None) -> EncoderStep:
        assert masks is None, "vectors are not masked"
        readback = self._link.readback()
        pooled = Pooled(self._rows, readback.take(self._vectors_SD))
        readback.close()
        return EncoderStep(self._step, pooled, readback, self._clock.end(), self.progress)

    def health(self) -> DeviceHealth:
        return self._parts.backend.health()

    def drop_rows(self) -> None:
        self.progress.end()

    def _inputs(self, token_ids_T: Array, counts_S: Array) -> EncoderInputs:
        begins_S = np.cumsum(counts_S) - counts_S
        positions_T = np.arange(len(token_ids_T)) - np.repeat(begins_S, counts_S)
        return EncoderInputs(
            token_ids=self._link.send(token_ids_T.astype(np.int64)),
            positions=self._link.send(positions_T.astype(np.int64)),
            counts=self._link.send(counts_S.astype(np.int64)),
            groups=group_by_length(counts_S, self._device),
        )

    def _vectors(self, inputs: EncoderInputs) -> torch.Tensor:
        while True:
            try:
                return self._encoder.pool(self._encoder.forward(inputs, self.progress.bump), inputs)
            except KernelReplaced:
                continue  # from the tokens on

    def _memory_errors(self) -> AbstractContextManager[None]:
        return exhaustion_as_memory_error(self._parts.backend.release_cached_memory)
