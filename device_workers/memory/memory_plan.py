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
    """The KV budget from what is left once weights and activations are allocated. Raises Refusal when nothing is.

    `facts` are of this moment: what neighbours took or gave back before plays no part.
    """
    own = f"{_mib(weight_bytes)} weights and {_mib(activation_bytes)} activations"
    if kv_memory_bytes is not None:
        budget, reason = kv_memory_bytes, "as asked by --kv-memory-bytes"
        if budget > available_bytes(facts):
            raise Refusal(
                f"--kv-memory-bytes wants {_mib(budget)} and {_mib(available_bytes(facts))} can be had beside {own}: "
                f"{_story(facts)}; end other programs, or take at most --kv-memory-bytes {available_bytes(facts)}"
            )
    else:
        budget, reason = _budget(facts, utilization, memory_is_shared)
    if budget <= 0:
        wanted = int(facts.total_bytes * utilization)
        raise Refusal(
            f"no memory is left for the KV cache: --memory-utilization {utilization:g} wants {_mib(wanted)}, of which "
            f"{own} and other programs take all: {_story(facts)}; raise --memory-utilization, end other programs or "
            "take a smaller model"
        )
    decision = Decision(name="kv_cache_bytes", value=str(budget), reason=reason, overridden=kv_memory_bytes is not None)
    return MemoryPlan(
        weight_bytes=weight_bytes, activation_bytes=activation_bytes, kv_budget_bytes=budget, decision=decision
    )


def _budget(facts: MemoryFacts, utilization: float, memory_is_shared: bool) -> tuple[int, str]:
    used = facts.total_bytes - available_bytes(facts)
    left = int(facts.total_bytes * utilization) - used
    story = f"{utilization:.0%} of {_mib(facts.total_bytes)} less {_mib(used)} in use"
    if memory_is_shared and left > SHARED_MEMORY_KV_LIMIT_BYTES:
        return (
            SHARED_MEMORY_KV_LIMIT_BYTES,
            f"{story}, at most {_mib(SHARED_MEMORY_KV_LIMIT_BYTES)} of memory shared with the host",
        )
    return left, story


def available_bytes(facts: MemoryFacts) -> int:
    """What this process can still allocate: what is free, and what its allocator keeps for later."""
    return facts.free_bytes + (facts.fragment_bytes or 0)


def _story(facts: MemoryFacts) -> str:
    """Total, free, and who holds the rest, where that can be read."""
    holders = ", ".join(f"{name} {_mib(size)}" for name, size in facts.holders.items())
    held = f"; held by {holders}" if holders else ""
    return f"{_mib(facts.total_bytes)} in all, {_mib(facts.free_bytes)} free{held}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"
