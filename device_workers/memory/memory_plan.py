"""What a worker's memory is for: weights, step buffers, KV cache, each a number of its own. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ...ipc.conditions import Refusal
from ...ipc.facts import Decision, DeviceProfile, MemoryFacts
from ..execution.contract import Spending

SHARED_MEMORY_KV_LIMIT_BYTES = 2 << 30
"""KV cache by default on a processor, whose memory other programs need too."""
_SHARED_MEMORY_DIVISOR = 4
"""Of a GPU that shares its memory with such programs, this part at most."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of each kind, and the story of the KV budget, which is not positive when nothing is left."""

    weight_bytes: int
    activation_bytes: int
    kv_budget_bytes: int
    kv_is_limited: bool
    decision: Decision


def shared_limit(profile: DeviceProfile, total_bytes: int, num_sharing: int = 1) -> int | None:
    """The most that a KV cache takes unasked where the device's memory is the host's; None: as much as there is.

    A server's accelerator on a board with its host (such as an MI300A) is there for nothing else.
    """
    if not profile.memory_is_shared:
        return None
    if profile.platform == "cpu":
        return SHARED_MEMORY_KV_LIMIT_BYTES // num_sharing
    if profile.is_integrated or profile.platform == "metal":
        return max(SHARED_MEMORY_KV_LIMIT_BYTES, total_bytes // _SHARED_MEMORY_DIVISOR)
    return None


def plan_spending(
    memory: MemoryFacts,
    *,
    utilization: float,
    kv_memory_bytes: int | None,
    shared_limit_bytes: int | None,
    num_sharing: int = 1,
) -> Spending:
    """What may be allocated in all, from memory as it is now. An asked KV size bounds the cache, not the rest.

    `num_sharing` ranks on one device, as on a processor, have an equal part each.
    """
    limit = shared_limit_bytes if kv_memory_bytes is None else kv_memory_bytes
    spendable = int(memory.total_bytes * utilization) - (memory.total_bytes - available_bytes(memory))
    return Spending(memory=memory, spendable_bytes=max(spendable, 0) // num_sharing, kv_limit_bytes=limit)


def plan_memory(
    memory: MemoryFacts,
    *,
    weight_bytes: int,
    activation_bytes: int,
    utilization: float,
    kv_memory_bytes: int | None,
    shared_limit_bytes: int | None,
    share_bytes: int | None = None,
) -> MemoryPlan:
    """The KV budget from what is left once weights and step buffers are allocated.

    `memory` is of this moment: what neighbours took or gave back before plays no part. An asked size is taken as it is,
    or refused where it cannot be had. `share_bytes`, of before anyone loaded, bounds a rank whose neighbours on the
    same device may not have taken theirs yet.
    """
    spending = plan_spending(
        memory, utilization=utilization, kv_memory_bytes=kv_memory_bytes, shared_limit_bytes=shared_limit_bytes
    )
    left, limit = spending.spendable_bytes, spending.kv_limit_bytes
    if share_bytes is not None:
        left = max(min(left, share_bytes - weight_bytes - activation_bytes), 0)
    used = _mib(memory.total_bytes - available_bytes(memory))
    reason = f"{utilization:.0%} of {_mib(memory.total_bytes)} less {used} in use"
    is_limited = limit is not None and limit < left
    if kv_memory_bytes is not None:
        _check_asked(kv_memory_bytes, memory, weight_bytes, activation_bytes)
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


def _check_asked(kv_memory_bytes: int, memory: MemoryFacts, weight_bytes: int, activation_bytes: int) -> None:
    most = available_bytes(memory)
    if kv_memory_bytes > most:
        raise Refusal(
            f"--kv-memory-bytes wants {_mib(kv_memory_bytes)} and {_mib(most)} can be had beside {_mib(weight_bytes)} "
            f"weights and {_mib(activation_bytes)} of step buffers: {_story(memory)}; end other programs, or take at "
            f"most --kv-memory-bytes {most}"
        )


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
