"""How a model divides among the ranks of a worker group. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ...ipc.conditions import Refusal
from ...ipc.configuration import MAX_RANKS
from .config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's part: counts of heads and channels, and half-open ranges into the whole.

    Query heads and intermediate channels divide evenly. Key/value heads divide, or each is held by several ranks.
    The vocabulary is cut into equal parts of `vocab_part` ids, the last of which may be short.
    """

    rank: int
    num_ranks: int
    num_heads: int
    num_kv_heads: int
    first_kv_head: int
    intermediate_size: int
    vocab_part: int
    vocab_begin: int
    vocab_end: int


def sizes_that_divide(config: ModelConfig) -> tuple[int, ...]:
    """Tensor parallel sizes this model can run at."""
    most = min(config.num_heads, MAX_RANKS)
    return tuple(size for size in range(1, most + 1) if _divides(config, size))


def _divides(config: ModelConfig, num_ranks: int) -> bool:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    shares_kv = kv_heads % num_ranks == 0 or num_ranks % kv_heads == 0
    return heads % num_ranks == 0 and shares_kv and config.intermediate_size % num_ranks == 0


def make_shard(config: ModelConfig, rank: int, num_ranks: int) -> Shard:
    """Raises Refusal, naming the sizes that divide."""
    if not _divides(config, num_ranks):
        sizes = ", ".join(map(str, sizes_that_divide(config)))
        raise Refusal(
            f"tensor parallel size {num_ranks} does not divide this model ({config.num_heads} heads, "
            f"{config.num_kv_heads} key/value heads, {config.intermediate_size} intermediate channels); "
            f"sizes that do: {sizes}"
        )
    num_kv_heads = max(1, config.num_kv_heads // num_ranks)
    vocab_part = -(-config.vocab_size // num_ranks)
    return Shard(
        rank=rank,
        num_ranks=num_ranks,
        num_heads=config.num_heads // num_ranks,
        num_kv_heads=num_kv_heads,
        first_kv_head=rank * config.num_kv_heads // num_ranks,
        intermediate_size=config.intermediate_size // num_ranks,
        vocab_part=vocab_part,
        vocab_begin=min(rank * vocab_part, config.vocab_size),
        vocab_end=min((rank + 1) * vocab_part, config.vocab_size),
    )
