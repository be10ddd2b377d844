"""The clauses of the suite by what a platform must offer to be judged on them."""

LIFE_CYCLE = {
    "detection.usable",
    "detection.stateless",
    "detection.devices",
    "declines.reasons",
    "profile.stable",
    "life_cycle.busy",
    "life_cycle.twice",
    "life_cycle.compute",
}
COMPUTING = {
    "memory.alignment",
    "memory.apart",
    "memory.views",
    "memory.reuse",
    "memory.exhaustion",
    "memory.accounting",
    "memory.facts",
    "copies.contents",
    "copies.order",
    "copies.after_long_work",
    "copies.partial_views",
    "copies.pageable_source",
    "streams.priorities_kept",
    "streams.order_by_events",
    "streams.order_back",
    "streams.current",
    "events.not_early",
    "events.wait_blocking",
    "fences.stream",
    "fences.device",
    "kernels.agree",
    "kernels.demotion",
    "kernels.offered",
    "model.tokens",
    "model.memory_returned",
}
RECORDING = {f"graph_capture.{name}" for name in ("replay", "several", "any_size", "empty", "refusal")}
TOGETHER = {"collectives.alone", "collectives.two_ranks"}
HEALTH = {"health.plausible", "health.any_thread"}
PINNED = {"memory.alignment_pinned", "memory.accounting_pinned", "copies.pinned"}
OWN_MEMORY = {"memory.exhaustion_by_and_by"}
SIDE_BY_SIDE = {"streams.concurrent", "copies.asynchronous"}
