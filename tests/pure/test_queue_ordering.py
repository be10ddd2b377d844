"""Who is seated first: by arrival, longest or shortest; nobody waits for ever, and priority comes before length."""

import pytest

from trimaran.engine_core.scheduler import MAX_BYPASSED
from trimaran.ipc.facts import QueueOrdering
from trimaran.tests.pure.lockstep import VOCAB, Lockstep, words
from trimaran.tests.pure.oracle_worker import expected_tokens

LENGTHS = (40, 8, 96, 24)


def seated_order(drive: Lockstep) -> list[int]:
    """Request ids in the order of their first step."""
    order: list[int] = []
    for plan in drive.steps:
        order += [int(found) for found in plan.request_ids if int(found) not in order]
    return order


@pytest.mark.parametrize(
    ("ordering", "expected"),
    [
        (QueueOrdering.ARRIVAL, [0, 1, 2, 3]),
        (QueueOrdering.LONG_FIRST, [2, 0, 3, 1]),
        (QueueOrdering.SHORT_FIRST, [1, 3, 0, 2]),
    ],
)
def test_order_of_seats(ordering: QueueOrdering, expected: list[int]) -> None:
    drive = Lockstep(max_num_seqs=1, ordering=ordering)
    for index, length in enumerate(LENGTHS):
        drive.submit(words(index, length), 3)
    drive.run()
    assert seated_order(drive) == expected
    for index, length in enumerate(LENGTHS):
        assert drive.tokens[index, 0] == expected_tokens(words(index, length), 0, VOCAB, 3)


def test_priority_comes_before_length() -> None:
    drive = Lockstep(max_num_seqs=1, ordering=QueueOrdering.SHORT_FIRST)
    for index, (length, priority) in enumerate(((8, 1), (64, 0), (4, 1), (32, 0))):
        drive.submit(words(index, length), 2, priority=priority)
    drive.run()
    assert seated_order(drive) == [3, 1, 2, 0]


@pytest.mark.parametrize("ordering", [QueueOrdering.LONG_FIRST, QueueOrdering.SHORT_FIRST])
def test_nobody_waits_for_ever(ordering: QueueOrdering) -> None:
    """One of the wrong length among a stream of the right one is passed a bounded number of times."""
    drive = Lockstep(max_num_seqs=1, num_blocks=600, ordering=ordering)
    wrong, right = (4, 64) if ordering is QueueOrdering.LONG_FIRST else (64, 4)
    unlucky = drive.submit(words(0, wrong), 1)
    for index in range(1, 3 * MAX_BYPASSED):
        drive.submit(words(index, right), 1)
    drive.run()
    assert seated_order(drive).index(unlucky.request_id) <= MAX_BYPASSED


def test_prompts_are_cut_to_the_chunk() -> None:
    whole, cut = Lockstep(budget=256), Lockstep(budget=256, max_chunk_tokens=64)
    for drive in (whole, cut):
        drive.submit(words(0, 200), 2)
        drive.run()
        assert drive.tokens[0, 0] == expected_tokens(words(0, 200), 0, VOCAB, 2)
    assert max(int(plan.counts.max()) for plan in whole.steps if len(plan.counts)) == 200
    assert max(int(plan.counts.max()) for plan in cut.steps if len(plan.counts)) == 64
