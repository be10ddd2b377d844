"""Owner of the KV cache's blocks: who holds each, which are free, which free ones still hold known content."""

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Blocks 0..num_blocks-1. A block is held (references > 0), or free; a free one may keep content until evicted.

    Eviction is least-recently-released among the free ones with content; those without content go first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._content: OrderedDict[int, None] = OrderedDict()
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give."""
        return len(self._blank) + len(self._content)

    @property
    def num_held(self) -> int:
        """Blocks some sequence or request holds."""
        return self.num_blocks - self.num_free

    def references(self, block: int) -> int:
        """How many holders the block has."""
        return self._references[block]

    def take(self, num_blocks: int) -> list[int]:
        """Blocks for one new holder each. The caller has asked `num_free` first."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks asked of {self.num_free} free"
        blocks = []
        for _ in range(num_blocks):
            block = self._blank.pop() if self._blank else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """One more holder of a block that is held or keeps content."""
        if self._references[block] == 0:
            del self._content[block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder fewer of each. Give a sequence's blocks last first: its tail is evicted before its head."""
        for block in blocks:
            count = self._references[block] - 1
            assert count >= 0, f"block {block} was released by nobody's holder"
            self._references[block] = count
            if count == 0:
                if self._hashes[block] is None:
                    self._blank.append(block)
                else:
                    self._content[block] = None

    def num_freed_by(self, blocks: Iterable[int]) -> int:
        """How many of these would become free if their one holder released them."""
        return sum(self._references[block] == 1 for block in blocks)

    # content

    def find(self, content: bytes) -> int | None:
        """The block that holds this content."""
        return self._by_hash.get(content)

    def remember(self, block: int, content: bytes) -> None:
        """Say what a held, full, committed block holds. Content that another block already holds stays there."""
        if content not in self._by_hash and self._hashes[block] is None:
            self._by_hash[content] = block
            self._hashes[block] = content

    def forget_free_content(self) -> int:
        """Drop all content that nobody holds; how many blocks that were."""
        blocks = list(self._content)
        for block in blocks:
            self._drop_content(block)
            self._blank.append(block)
        self._content.clear()
        return len(blocks)

    def _evict(self) -> int:
        block, _ = self._content.popitem(last=False)
        self._drop_content(block)
        self.num_evicted += 1
        return block

    def _drop_content(self, block: int) -> None:
        content = self._hashes[block]
        assert content is not None
        del self._by_hash[content]
        self._hashes[block] = None
