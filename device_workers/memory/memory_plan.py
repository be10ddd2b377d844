"""What a worker's memory is for: weights, activations, KV cache, each a number of its own. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ...ipc.conditions import Refusal
from ...ipc.facts import Decision, MemoryFacts

SHARED_MEMORY_KV_LIMIT_BYTES = 2 << 30
"""KV cache by default where the device's memory is the host's, which other programs need too."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of each kind, and the story of the KV budget."""

    weight_bytes: int
    activation_bytes: int
    kv_budget_bytes: int
    decision: Decision


def plan_memory(
    facts: MemoryFacts,
    *,
    weight_bytes: int,
    activation_bytes: int,
    utilization: float,
    kv_memory_bytes: int | None,
    memory_is_shared: bool,
) -> MemoryPlan:
    """The KV budget from what is left once weights and activations are allocated. Raises Refusal when nothing is."""
    if kv_memory_bytes is not None:
        budget, reason = kv_memory_bytes, "as asked by --kv-memory-bytes"
    else:
        budget, reason = _budget(facts, utilization, memory_is_shared)
    if budget <= 0:
        raise Refusal(
            f"no memory is left for the KV cache: {_mib(weight_bytes)} weights and {_mib(activation_bytes)} "
            f"activations of {_mib(facts.total_bytes)}, {_mib(facts.free_bytes)} free; raise --memory-utilization, "
            "end other programs or take a smaller model"
        )
    decision = Decision(name="kv_cache_bytes", value=str(budget), reason=reason, overridden=kv_memory_bytes is not None)
    return MemoryPlan(
        weight_bytes=weight_bytes, activation_bytes=activation_bytes, kv_budget_bytes=budget, decision=decision
    )


def _budget(facts: MemoryFacts, utilization: float, memory_is_shared: bool) -> tuple[int, str]:
    used = facts.total_bytes - facts.free_bytes
    left = int(facts.total_bytes * utilization) - used
    story = f"{utilization:.0%} of {_mib(facts.total_bytes)} less {_mib(used)} in use"
    if memory_is_shared and left > SHARED_MEMORY_KV_LIMIT_BYTES:
        return (
            SHARED_MEMORY_KV_LIMIT_BYTES,
            f"{story}, at most {_mib(SHARED_MEMORY_KV_LIMIT_BYTES)} of memory shared with the host",
        )
    return left, story


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"
