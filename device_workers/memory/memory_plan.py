"""What a worker's memory is for: weights, step buffers, KV cache, each a number of its own. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ...ipc.facts import Decision, MemoryFacts
from ..execution.contract import Spending

SHARED_MEMORY_KV_LIMIT_BYTES = 2 << 30
"""KV cache by default where the device's memory is the host's, which other programs need too."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of each kind, and the story of the KV budget, which is not positive when nothing is left."""

    weight_bytes: int
    activation_bytes: int
    kv_budget_bytes: int
    kv_is_limited: bool
    decision: Decision


def plan_spending(
    memory: MemoryFacts, *, utilization: float, kv_memory_bytes: int | None, memory_is_shared: bool
) -> Spending:
    """What may be allocated in all, from memory as it is now. An asked KV size bounds the cache, not the rest."""
    limit = kv_memory_bytes
    if limit is None and memory_is_shared:
        limit = SHARED_MEMORY_KV_LIMIT_BYTES
    spendable = int(memory.total_bytes * utilization) - (memory.total_bytes - memory.free_bytes)
    return Spending(memory=memory, spendable_bytes=max(spendable, 0), kv_limit_bytes=limit)


def plan_memory(
    memory: MemoryFacts,
    *,
    weight_bytes: int,
    activation_bytes: int,
    utilization: float,
    kv_memory_bytes: int | None,
    memory_is_shared: bool,
) -> MemoryPlan:
    """The KV budget from what is left once weights and step buffers are allocated. An asked size is taken as it is."""
    spending = plan_spending(
        memory, utilization=utilization, kv_memory_bytes=kv_memory_bytes, memory_is_shared=memory_is_shared
    )
    left, limit = spending.spendable_bytes, spending.kv_limit_bytes
    used = _mib(memory.total_bytes - memory.free_bytes)
    reason = f"{utilization:.0%} of {_mib(memory.total_bytes)} less {used} in use"
    is_limited = limit is not None and limit < left
    if kv_memory_bytes is not None:
        left, reason = kv_memory_bytes, "as asked by --kv-memory-bytes"
    elif is_limited:
        assert limit is not None
        left, reason = limit, f"{reason}, at most {_mib(limit)} of memory shared with the host"
    decision = Decision(name="kv_cache_bytes", value=str(left), reason=reason, overridden=kv_memory_bytes is not None)
    return MemoryPlan(
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        kv_budget_bytes=left,
        kv_is_limited=is_limited,
        decision=decision,
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"
