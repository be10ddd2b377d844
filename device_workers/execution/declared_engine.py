"""The boot of an engine that never opens its device: what `explain` runs in the place of the real one. Torch-free.

It answers the handshake from declared facts. Weights count as the model's sizes say and memory as if nobody else held
any, so that the core settles as it would when serving.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...ipc.facts import Decision, DeviceHealth, DeviceProfile, MemoryFacts, ModelFacts, Resolution
from ...ipc.plan import StepPlan, TokenMasks
from ...ipc.worker_messages import Settled
from ..memory.memory_plan import plan_memory, plan_spending, shared_limit
from .contract import LoadFacts, OnFraction, PendingStep, Spending
from .progress import Progress


@dataclass(frozen=True, kw_only=True)
class MemoryWishes:
    """What the user said of memory."""

    utilization: float
    kv_memory_bytes: int | None


class DeclaredEngine:
    """A StepEngine up to `load`."""

    def __init__(
        self,
        profile: DeviceProfile,
        model: ModelFacts,
        decisions: tuple[Decision, ...],
        memory: MemoryFacts,
        wishes: MemoryWishes,
        resolve: Callable[[Settled], tuple[Resolution, ...]],
        num_sharing: int = 1,
    ) -> None:
        self.profile = profile
        self.model = model
        self.decisions = decisions
        self.progress = Progress()
        self._memory = memory
        self._wishes = wishes
        self._resolve = resolve
        self.spending: Spending | None = plan_spending(
            memory,
            utilization=wishes.utilization,
            kv_memory_bytes=wishes.kv_memory_bytes,
            shared_limit_bytes=shared_limit(profile, memory.total_bytes, num_sharing),
            num_sharing=num_sharing,
        )
        self._num_sharing = num_sharing

    def load(self, settled: Settled, on_fraction: OnFraction) -> LoadFacts:
        """The choices and sizes that loading would come to."""
        weight_bytes = self.model.loaded_bytes
        max_blocks = -(-settled.max_model_len // settled.block_size)
        activation_bytes = self.model.step_bytes(
            max_tokens=settled.max_batched_tokens, max_rows=settled.max_num_seqs, max_blocks=max_blocks
        )
        taken = weight_bytes + activation_bytes
        memory = MemoryFacts(
            total_bytes=self._memory.total_bytes,
            free_bytes=self._memory.free_bytes - taken,
            ours_bytes=self._memory.ours_bytes + taken,
        )
        plan = plan_memory(
            memory,
            weight_bytes=weight_bytes,
            activation_bytes=activation_bytes,
            utilization=self._wishes.utilization,
            kv_memory_bytes=self._wishes.kv_memory_bytes,
            shared_limit_bytes=shared_limit(self.profile, memory.total_bytes, self._num_sharing),
            share_bytes=self.spending.spendable_bytes if self.spending and self._num_sharing > 1 else None,
        )
        return LoadFacts(
            resolutions=self._resolve(settled),
            decisions=(*self.decisions, plan.decision),
            memory=memory,
            weight_bytes=weight_bytes,
            activation_bytes=activation_bytes,
            kv_budget_bytes=plan.kv_budget_bytes,
            kv_bytes_per_block=self.model.kv_bytes_per_token * settled.block_size,
            kv_is_limited=plan.kv_is_limited,
        )

    def allocate(self, num_blocks: int) -> None:
        raise AssertionError("nothing is allocated on a declared device")

    def warm_up(self) -> dict[str, int]:
        raise AssertionError("nothing runs on a declared device")

    def forward(self, plan: StepPlan) -> None:
        raise AssertionError("nothing runs on a declared device")

    def sample(self, masks: TokenMasks | None) -> PendingStep:
        raise AssertionError("nothing runs on a declared device")

    def health(self) -> DeviceHealth:
        return DeviceHealth()

    def drop_rows(self) -> None:
        return None
