"""What a worker drives: one engine of steps, on tensors or on nothing. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from ...ipc.facts import Decision, DeviceHealth, DeviceProfile, MemoryFacts, ModelFacts, Resolution
from ...ipc.plan import StepPlan, StepResult, TokenMasks
from ...ipc.worker_messages import Settled
from .progress import Progress

OnFraction = Callable[[str, float], None]
"""Called with a phase's name and how much of it is done, 0 to 1."""


class LoadFacts(Struct, frozen=True, kw_only=True):
    """What loading found out. Bytes of each kind on this rank."""

    resolutions: tuple[Resolution, ...]
    decisions: tuple[Decision, ...]
    memory: MemoryFacts
    weight_bytes: int
    activation_bytes: int
    kv_budget_bytes: int
    kv_bytes_per_block: int
    kv_is_limited: bool = False


class Spending(Struct, frozen=True, kw_only=True):
    """Memory as found before weights are read: what this worker may take in all, and the KV cache's bound."""

    memory: MemoryFacts
    spendable_bytes: int
    kv_limit_bytes: int | None


class StepEngine(Protocol):
    """Used by the step thread alone, except `progress`, which the control loop reads.

    Order of calls: `load`, `allocate`, `warm_up`, then pairs of `forward` and `sample`. `forward` and `sample` raise
    MemoryError (or a subclass) when memory ran out and StepFailed when the step cannot be done; the engine stays
    usable. DeviceFault means it does not.
    """

    profile: DeviceProfile
    model: ModelFacts
    spending: Spending | None
    decisions: tuple[Decision, ...]
    progress: Progress

    def load(self, settled: Settled, on_fraction: OnFraction) -> LoadFacts: ...

    def allocate(self, num_blocks: int) -> None: ...

    def warm_up(self) -> dict[str, int]:
        """Run what the first steps will need. Returns bytes by kind."""
        ...

    def forward(self, plan: StepPlan) -> None:
        """Apply the plan's row changes and compute its hidden states. The plan may be overwritten after `sample`."""
        ...

    def sample(self, masks: TokenMasks | None) -> StepResult:
        """Tokens of the plan given to `forward` last."""
        ...

    def health(self) -> DeviceHealth:
        """How the device is. May be called from any thread, at any time; touches nothing that steps use."""
        ...

    def drop_rows(self) -> None:
        """Forget all sequences: the core that knew them is gone."""
        ...
