"""Names content: a chain of keyed hashes over full blocks, so that equal prefixes find each other's blocks.

A block's hash covers its tokens and, through its parent, everything before it, and the root covers what must never
be shared: the salt and the adapter, each tagged by kind so that a salt can never equal an adapter's name. BLAKE2b
keyed with 32 random bytes per process: nobody outside can construct a collision or predict a hash.
"""

import secrets
from hashlib import blake2b

import numpy as np

from .block_pool import BlockPool

_HASH_BYTES = 16


class PrefixCache:
    """Finds and registers content in a block pool. When disabled it finds nothing and registers nothing."""

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool, key: bytes | None = None) -> None:
        self.enabled = enabled
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._pool = pool
        self._block_size = block_size
        self._key = secrets.token_bytes(32) if key is None else key

    def root(self, *, salt: str | None, adapter: str | None) -> bytes:
        """The parent of a first block."""
        tagged = b"".join(
            kind + len(value.encode()).to_bytes(8, "little") + value.encode()
            for kind, value in ((b"salt", salt), (b"adapter", adapter))
            if value is not None
        )
        return blake2b(tagged, digest_size=_HASH_BYTES, key=self._key).digest()

    def extend(self, hashes: list[bytes], root: bytes, tokens: np.ndarray, num_blocks: int) -> None:
        """Lengthen a sequence's chain `hashes` to `num_blocks` entries. `tokens`: its int32 history."""
        size = self._block_size
        parent = hashes[-1] if hashes else root
        for index in range(len(hashes), num_blocks):
            block = tokens[index * size : (index + 1) * size].tobytes()
            parent = blake2b(parent + block, digest_size=_HASH_BYTES, key=self._key).digest()
            hashes.append(parent)

    def match(self, hashes: list[bytes], root: bytes, tokens: np.ndarray, max_blocks: int) -> list[int]:
        """The longest run of cached blocks from the start, at most `max_blocks`; each gets one more holder.

        Lengthens `hashes` as far as it looks.
        """
        if not self.enabled:
            return []
        blocks: list[int] = []
        for index in range(max_blocks):
            self.extend(hashes, root, tokens, index + 1)
            block = self._pool.find(hashes[index])
            if block is None:
                break
            self._pool.share(block)
            blocks.append(block)
        self.num_queried_tokens += max_blocks * self._block_size
        self.num_hit_tokens += len(blocks) * self._block_size
        return blocks

    def remember(self, blocks: list[int], hashes: list[bytes], first: int, last: int) -> None:
        """Register blocks [first, last) of a sequence, whose tokens are committed."""
        if self.enabled:
            for index in range(first, last):
                self._pool.remember(blocks[index], hashes[index])
