"""Chooses how a device works: the attention strategy, the graphs to record, the order of waiting prompts.

Each choice is a Decision with its reason, from the device's profile and what the user asked.
"""

from collections.abc import Mapping, Sequence

from ..ipc.conditions import Refusal
from ..ipc.configuration import CoreConfiguration
from ..ipc.facts import (
    AttentionStrategy,
    Decision,
    DeviceCapability,
    DeviceProfile,
    Feature,
    ModelFacts,
    QueueOrdering,
)

HOST_PLATFORMS = ("cpu", "null")
"""Those whose device is the host itself: it waits for nothing else."""
MAX_GRAPH_TOKENS = 512
MANY_BLOCKS, FEW_BLOCKS = 256, 64
"""Thread blocks that run at once: from MANY on, long sequences first; up to FEW, short ones first."""
_PROMPT_STEPS_S = (0.025, 0.05)
_READINGS = 12
"""So many readings of the weights is what a step with prompts may take, within those bounds."""
_SMALL_BLOCK_BYTES = 64 << 10
_SMALL_MULTIPROCESSORS = 32
_LEAST_BULK_BLOCK = 16


def choose_attention_strategy(
    asked: CoreConfiguration, model: ModelFacts, profile: DeviceProfile, misfits: Mapping[AttentionStrategy, str]
) -> Decision:
    name = "attention_strategy"
    if asked.attention_strategy is not None:
        misfit = misfits.get(AttentionStrategy(asked.attention_strategy))
        reason = "as asked" if misfit is None else f"as asked, but the next that fits serves: {misfit}"
        return Decision(name=name, value=asked.attention_strategy, reason=reason, overridden=True)
    value, reason = _fitting_strategy(model, profile, misfits, asked.block_size)
    return Decision(name=name, value=value, reason=reason)


def _fitting_strategy(
    model: ModelFacts, profile: DeviceProfile, misfits: Mapping[AttentionStrategy, str], block_size: int | None
) -> tuple[AttentionStrategy, str]:
    capability = profile.capability
    if Feature.TRITON not in capability.features:
        return AttentionStrategy.PLAIN, f"the others need Triton, which {profile.name} does not have"
    shared = capability.shared_memory_per_block_bytes
    sizes = _sizes_in_words(capability)
    no_bulk = _why_no_bulk_copies(model, capability, misfits, block_size)
    if no_bulk is None:
        return AttentionStrategy.BULK_COPY, f"the device copies whole tiles by itself; {sizes}"
    multiprocessors = capability.num_multiprocessors
    is_small = multiprocessors is not None and multiprocessors <= _SMALL_MULTIPROCESSORS
    is_small = is_small or (shared is not None and shared < _SMALL_BLOCK_BYTES)
    small, large = AttentionStrategy.LOW_OCCUPANCY, AttentionStrategy.TILED
    if small not in misfits and (is_small or large in misfits):
        return small, f"small tiles leave no multiprocessor idle; {sizes}"
    if large not in misfits:
        return large, f"{no_bulk}, and there is room for large tiles; {sizes}"
    return AttentionStrategy.PLAIN, f"no tiles fit: {misfits[large]}"


def _sizes_in_words(capability: DeviceCapability) -> str:
    count, shared = capability.num_multiprocessors, capability.shared_memory_per_block_bytes
    known = [] if count is None else [f"{count} multiprocessors"]
    known += [] if shared is None else [f"{shared >> 10} KiB of shared memory a block"]
    return " with ".join(known) or "the device's sizes are not known"


def _why_no_bulk_copies(
    model: ModelFacts,
    capability: DeviceCapability,
    misfits: Mapping[AttentionStrategy, str],
    block_size: int | None,
) -> str | None:
    if Feature.BULK_TENSOR_COPY not in capability.features:
        return "no bulk copies"
    if AttentionStrategy.BULK_COPY in misfits:
        return f"no bulk copies ({misfits[AttentionStrategy.BULK_COPY]})"
    if model.head_dim * 2 % 16:
        return f"no bulk copies of heads of {model.head_dim}"
    if block_size is not None and block_size < _LEAST_BULK_BLOCK:
        return f"no bulk copies of --block-size {block_size}"
    return None


def choose_graph_buckets(
    asked: CoreConfiguration, profile: DeviceProfile, max_num_seqs: int, budget: int
) -> tuple[tuple[int, ...], Decision]:
    name, capability = "graph_buckets", profile.capability
    if asked.enforce_eager:
        return (), Decision(name=name, value="eager", reason="asked for by --enforce-eager", overridden=True)
    if Feature.GRAPH_CAPTURE not in capability.features:
        return (), Decision(name=name, value="eager", reason=f"{profile.name} captures no graphs")
    if profile.platform == "cpu":
        return (), Decision(name=name, value="any size", reason="one recording of launches serves every size")
    if asked.graph_buckets is not None:
        kept = tuple(sorted({size for size in asked.graph_buckets if size <= budget}))
        over = [size for size in asked.graph_buckets if size > budget]
        reason = f"as asked, without those over a step's {budget} tokens" if over else "as asked"
        return kept, Decision(name=name, value=_listed(kept), reason=reason, overridden=True)
    launch, replay = capability.launch_latency_us, capability.graph_launch_us
    if launch is not None and replay is not None and replay >= launch:
        reason = f"measured: a replayed launch takes {replay:g} us, a plain one {launch:g} us"
        return (), Decision(name=name, value="eager", reason=reason)
    most = min(max_num_seqs, MAX_GRAPH_TOKENS)
    sizes = [1, 2, 4, *range(8, most + 1, 8)]
    kept = tuple(size for size in sizes if size <= 32 or (size % 16 == 0 and (size <= 128 or size % 32 == 0)))
    kept = tuple(sorted({*(size for size in kept if size <= most), most}))
    reason = "decodes launch many small kernels; one graph for each number of sequences saves their launches"
    if launch is not None and replay is not None:
        reason = f"measured: a replayed launch takes {replay:g} us, a plain one {launch:g} us"
    return kept, Decision(name=name, value=_listed(kept), reason=reason)


def choose_batch_invariance(asked: CoreConfiguration, model: ModelFacts) -> Decision:
    """Raises Refusal where what a sequence gets cannot be kept apart from its batch."""
    if model.is_encoder:
        raise Refusal("--batch-invariant: an encoder's vectors depend on their batch in the last bits; leave it out")
    if asked.num_ranks > 2:
        raise Refusal(
            f"--batch-invariant: {asked.num_ranks} ranks add their parts up in an order that depends on the batch; use "
            "--tensor-parallel 1 or 2"
        )
    reason = "as asked: kernels that compute a row alike in any batch; the others are passed over"
    return Decision(name="batch_invariant", value="yes", reason=reason, overridden=True)


def choose_prompt_step(asked: CoreConfiguration, model: ModelFacts, profile: DeviceProfile) -> Decision:
    """Seconds that a step with prompts may take while streams or other prompts wait for it.

    A new prompt waits for two or three steps, so short ones answer sooner. But each computes the running decodes too,
    and where those took most of it, prompts would come in more slowly than streams end (`tools/simulate_serving.py`).
    """
    name = "prompt_step_s"
    if asked.prompt_step_s is not None:
        return Decision(name=name, value=f"{asked.prompt_step_s:g}", reason="as asked", overridden=True)
    if profile.platform in HOST_PLATFORMS:
        return Decision(name=name, value="0.25", reason="shorter steps would hold too few tokens for a processor")
    longest = _PROMPT_STEPS_S[1]
    if profile.bandwidth is None:
        return Decision(name=name, value=f"{longest:g}", reason="longer ones gain no speed; the bandwidth is not known")
    reading_s = model.weight_bytes / (profile.bandwidth * 1e9)
    value = round(min(max(_READINGS * reading_s, _PROMPT_STEPS_S[0]), longest), 3)
    reason = f"streams and other prompts wait for it, and reading the weights alone takes {reading_s * 1e3:.2g} ms"
    return Decision(name=name, value=f"{value:g}", reason=reason)


def choose_queue_ordering(asked: CoreConfiguration, profile: DeviceProfile) -> Decision:
    name = "queue_ordering"
    if asked.queue_ordering is not None:
        return Decision(name=name, value=asked.queue_ordering, reason="as asked", overridden=True)
    found = _concurrent_blocks(profile)
    if found is None:
        reason = "first come, first served: how much runs at once is not known"
        return Decision(name=name, value=QueueOrdering.ARRIVAL, reason=reason)
    blocks, how = found
    if blocks >= MANY_BLOCKS:
        reason = f"{how}: long sequences are spread over many and would otherwise end last"
        return Decision(name=name, value=QueueOrdering.LONG_FIRST, reason=reason)
    if blocks <= FEW_BLOCKS:
        reason = f"{how}: a long sequence would hold all of them, so short ones go first"
        return Decision(name=name, value=QueueOrdering.SHORT_FIRST, reason=reason)
    return Decision(name=name, value=QueueOrdering.ARRIVAL, reason=f"{how}: no length gains by going first")


def _concurrent_blocks(profile: DeviceProfile) -> tuple[int, str] | None:
    """Thread blocks that run at once: as measured, else from declared sizes and an attention tile's shared memory."""
    capability = profile.capability
    if capability.concurrent_blocks is not None:
        return capability.concurrent_blocks, f"{capability.concurrent_blocks} thread blocks run at once, as measured"
    multiprocessors, shared = capability.num_multiprocessors, capability.shared_memory_per_multiprocessor_bytes
    if multiprocessors is None or profile.platform in HOST_PLATFORMS:
        return None
    each = max(1, min(4, (shared or _SMALL_BLOCK_BYTES) // (48 << 10)))
    blocks = multiprocessors * each
    return blocks, f"about {blocks} thread blocks run at once on {multiprocessors} multiprocessors"


def _listed(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes)) or "none"
