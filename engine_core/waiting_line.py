"""The sequences that wait for a row, in order: priority first, then arrival, then choice."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from .request import Key, Sequence


def _key(sequence: Sequence) -> Key:
    return sequence.key


class WaitingLine:
    """Sorted by key. A preempted sequence keeps its key, so it stands ahead of later arrivals."""

    def __init__(self) -> None:
        self._line: list[Sequence] = []
        self.num_tokens = 0
        self.num_added = 0

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def __getitem__(self, index: int) -> Sequence:
        return self._line[index]

    def add(self, sequence: Sequence) -> None:
        """Stand in line."""
        assert not sequence.is_queued
        sequence.is_queued = True
        self.num_added += 1
        self.num_tokens += len(sequence.tokens)
        insort(self._line, sequence, key=_key)

    def remove(self, sequence: Sequence) -> None:
        """Leave the line."""
        index = bisect_left(self._line, sequence.key, key=_key)
        assert self._line[index] is sequence
        del self._line[index]
        sequence.is_queued = False
        self.num_tokens -= len(sequence.tokens)
