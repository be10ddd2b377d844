"""Settles the engine's sizes from what the model needs, what the devices have and what the user asked.

Every choice comes back as a Decision with its reason; a value the user gave is taken, or refused with the cure.
"""

from collections.abc import Sequence

from ..ipc.conditions import Refusal
from ..ipc.configuration import CoreConfiguration
from ..ipc.facts import Decision, DeviceProfile, ModelFacts
from ..ipc.worker_messages import Loaded, Settled

_GIB = 1 << 30


def settle(asked: CoreConfiguration, model: ModelFacts, profile: DeviceProfile) -> Settled:
    """Sizes that do not depend on free memory. Raises Refusal."""
    decisions = [
        _block_size(asked, profile),
        _max_num_seqs(asked, profile),
    ]
    block_size, max_num_seqs = (int(decision.value) for decision in decisions)
    max_model_len = _max_model_len(asked, model)
    budget = _max_batched_tokens(asked, profile, max_num_seqs)
    decisions += [max_model_len, budget]
    return Settled(
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=int(budget.value),
        max_model_len=int(max_model_len.value),
        decisions=tuple(decisions),
    )


def count_blocks(
    asked: CoreConfiguration, settled: Settled, loaded: Sequence[Loaded]
) -> tuple[int, int, tuple[Decision, ...]]:
    """Blocks that every rank can hold, the context they allow, and why. Raises Refusal (row M1 of the user's pains)."""
    least = min(loaded, key=lambda rank: rank.kv_budget_bytes // rank.kv_bytes_per_block)
    num_blocks = least.kv_budget_bytes // least.kv_bytes_per_block
    needed = -(-settled.max_model_len // settled.block_size)
    reason = (
        f"{least.kv_budget_bytes / _GIB:.2f} GiB for the KV cache on rank {least.rank}, "
        f"{least.kv_bytes_per_block} bytes a block"
    )
    useful = needed * settled.max_num_seqs
    if num_blocks > useful:
        num_blocks, reason = useful, f"enough for {settled.max_num_seqs} sequences of {settled.max_model_len} tokens"
    if asked.num_blocks is not None:
        if asked.num_blocks > num_blocks and asked.num_blocks * least.kv_bytes_per_block > least.kv_budget_bytes:
            raise Refusal(
                f"--num-blocks {asked.num_blocks} needs {asked.num_blocks * least.kv_bytes_per_block / _GIB:.2f} GiB, "
                f"{least.kv_budget_bytes / _GIB:.2f} GiB are available; the largest that fits is {num_blocks}"
            )
        num_blocks, reason = asked.num_blocks, "as asked"
    decisions = [Decision(name="num_blocks", value=str(num_blocks), reason=reason, overridden=reason == "as asked")]
    max_model_len = settled.max_model_len
    if num_blocks < needed:
        max_model_len = num_blocks * settled.block_size
        if asked.max_model_len is not None or max_model_len < 2:
            raise Refusal(_too_small(settled, needed, least, num_blocks))
        decisions.append(
            Decision(
                name="max_model_len",
                value=str(max_model_len),
                reason=f"the KV cache holds {num_blocks} blocks of {settled.block_size}; "
                f"the model would allow {settled.max_model_len}",
            )
        )
    return num_blocks, max_model_len, tuple(decisions)


def _too_small(settled: Settled, needed: int, least: Loaded, num_blocks: int) -> str:
    return (
        f"a context of {settled.max_model_len} tokens needs {needed * least.kv_bytes_per_block / _GIB:.2f} GiB of KV "
        f"cache, {num_blocks * least.kv_bytes_per_block / _GIB:.2f} GiB are available; the largest context that fits "
        f"is {num_blocks * settled.block_size}: start with --max-model-len {num_blocks * settled.block_size}, "
        "or raise --memory-utilization"
    )


def _block_size(asked: CoreConfiguration, profile: DeviceProfile) -> Decision:
    if asked.block_size is not None:
        if asked.block_size not in (8, 16, 32, 64, 128):
            raise Refusal(f"--block-size {asked.block_size} is not supported; choose 8, 16, 32, 64 or 128")
        return Decision(name="block_size", value=str(asked.block_size), reason="as asked", overridden=True)
    return Decision(name="block_size", value="16", reason="small blocks waste little of the last one of a sequence")


def _max_num_seqs(asked: CoreConfiguration, profile: DeviceProfile) -> Decision:
    if asked.max_num_seqs is not None:
        return Decision(name="max_num_seqs", value=str(asked.max_num_seqs), reason="as asked", overridden=True)
    if profile.platform == "cpu":
        return Decision(name="max_num_seqs", value="256", reason="a CPU gains little from larger batches")
    return Decision(name="max_num_seqs", value="1024", reason="decode is bound by memory bandwidth far beyond this")


def _max_model_len(asked: CoreConfiguration, model: ModelFacts) -> Decision:
    if asked.max_model_len is None:
        return Decision(
            name="max_model_len", value=str(model.max_model_len), reason="the model's own limit, from its config.json"
        )
    if asked.max_model_len > model.max_model_len:
        raise Refusal(
            f"--max-model-len {asked.max_model_len} is over the model's own limit of {model.max_model_len} "
            f"(max_position_embeddings in config.json); ask for {model.max_model_len} or less"
        )
    return Decision(name="max_model_len", value=str(asked.max_model_len), reason="as asked", overridden=True)


def _max_batched_tokens(asked: CoreConfiguration, profile: DeviceProfile, max_num_seqs: int) -> Decision:
    name = "max_batched_tokens"
    if asked.max_batched_tokens is not None:
        if asked.max_batched_tokens < max_num_seqs:
            raise Refusal(
                f"--max-batched-tokens {asked.max_batched_tokens} is below --max-num-seqs {max_num_seqs}: each running "
                f"sequence needs one token of a step; raise it to {max_num_seqs} or lower --max-num-seqs"
            )
        return Decision(name=name, value=str(asked.max_batched_tokens), reason="as asked", overridden=True)
    if profile.platform == "cpu":
        value, reason = max(512, max_num_seqs), "keeps one step on a CPU near a second"
    else:
        value, reason = max(8192, max_num_seqs), "fills the device in prefill and bounds a step's time"
    return Decision(name=name, value=str(value), reason=reason)
