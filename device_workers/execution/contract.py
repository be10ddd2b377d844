"""What a worker drives: one engine of steps, on tensors or on nothing. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


class PendingStep(Protocol):
    """A step whose work was given to the device."""

    def is_done(self) -> bool:
        """Whether `result` returns at once."""
        ...

    def result(self) -> StepResult:
        """What the step sampled; waits for the device. To be called once, in the order of the steps. Raises
        DeviceFault.
        """
        ...


@dataclass(frozen=True)
class FinishedStep:
    """A PendingStep of a device that has done its work when the call returns."""

    finished: StepResult

    def is_done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.finished


class StepEngine(Protocol):
    """Used by the step thread alone, except `progress`, which the control loop reads.

    Order of calls: `load`, `allocate`, `warm_up`, then pairs of `forward` and `sample`. Neither waits for the device: a
    step may be given to it while the one before runs. `forward` and `sample` raise MemoryError (or a subclass) when
    memory ran out and StepFailed when the step cannot be done; the engine stays usable. DeviceFault means it does not.
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

    def sample(self, masks: TokenMasks | None) -> PendingStep:
        """Tokens of the plan given to `forward` last, as soon as the device has them."""
        ...

    def health(self) -> DeviceHealth:
        """How the device is. May be called from any thread, at any time; touches nothing that steps use."""
        ...

    def drop_rows(self) -> None:
        """Forget all sequences: the core that knew them is gone."""
        ...
