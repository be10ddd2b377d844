"""What users are owed by the scheduler: fairness, bounded preemption, prefix reuse, n choices."""

import numpy as np
import pytest

from trimaran.tests.pure.lockstep import VOCAB, Lockstep, words
from trimaran.tests.pure.oracle_worker import expected_tokens


def assert_right(drive: Lockstep, prompt: list[int], request_id: int, num: int, choices: int = 1) -> None:
    for choice in range(choices):
        assert drive.tokens[request_id, choice] == expected_tokens(prompt, choice, VOCAB, num)


@pytest.mark.user_pain("P5")
@pytest.mark.parametrize("output", [100, 300, 600])
def test_oversubscribed_four_times(output: int) -> None:
    """Every request finishes, few are preempted, and little is computed twice."""
    prompt_length, num_requests = 64, 64
    per_request = -(-(prompt_length + output) // 16)
    drive = Lockstep(num_blocks=per_request * 16, max_num_seqs=64, budget=512)
    requests = [drive.submit(words(index, prompt_length), output) for index in range(num_requests)]
    drive.run()
    scheduler = drive.engine.scheduler
    assert scheduler.num_preemptions > 0, "the pool was meant to be too small"
    assert max(request.sequences[0].num_preemptions for request in requests) <= 5
    assert scheduler.num_recomputed_tokens <= 0.5 * scheduler.num_computed_tokens
    for index in range(num_requests):
        assert_right(drive, words(index, prompt_length), index, output)


@pytest.mark.user_pain("P5")
def test_preempted_resume_before_later_arrivals() -> None:
    drive = Lockstep(num_blocks=20, max_num_seqs=8, max_model_len=320, prefix_caching=False)
    for index in range(3):
        drive.submit(words(index, 32), 180)
    while drive.engine.scheduler.num_preemptions == 0:
        drive.step()
    late = drive.submit(words(9, 16), 4)
    resumed = [request for request in drive.engine.requests.values() if request.sequences[0].num_preemptions]
    drive.run()
    assert resumed
    for request in resumed:
        place = next(index for index, plan in enumerate(drive.steps) if late.request_id in plan.request_ids)
        again = [index for index, plan in enumerate(drive.steps) if request.request_id in plan.request_ids]
        assert len(again) > 1 and again[1] <= place, "a later arrival was seated first"


@pytest.mark.user_pain("P4")
def test_long_prompt_leaves_room_for_short_ones() -> None:
    """Streams keep their pace, short prompts come through, the long one is not starved."""
    alone = Lockstep(num_blocks=2000, max_model_len=20_000, budget=512, token_s=0.001)
    alone.submit(words(0, 16_000), 2)
    alone.run()
    lone_s = alone.token_times[0, 0][0]

    drive = Lockstep(num_blocks=2000, max_model_len=20_000, budget=512, token_s=0.001)
    for index in range(4):
        drive.submit(words(index, 16), 3000)
    for _ in range(50):
        drive.step()
    began = drive.now
    long = drive.submit(words(50, 16_000), 2)
    shorts = [drive.submit(words(60 + index, 64), 4) for index in range(8)]
    while (long.request_id, 0) not in drive.token_times:
        drive.step()
    long_s = drive.token_times[long.request_id, 0][0] - began
    assert long_s <= 3 * lone_s
    for short in shorts:
        assert drive.token_times[short.request_id, 0][0] - began <= 0.25 * long_s
    for index in range(4):
        times = np.array(drive.token_times[index, 0])
        gaps = np.diff(times[times > began])
        assert gaps.max() <= 1.0


@pytest.mark.user_pain("P4")
def test_a_big_one_at_the_head_does_not_block_small_ones() -> None:
    drive = Lockstep(num_blocks=64, max_num_seqs=8, max_model_len=1024)
    holder = drive.submit(words(0, 320), 400)
    for _ in range(5):
        drive.step()
    big = drive.submit(words(1, 900), 4)
    small = drive.submit(words(2, 16), 4)
    drive.run()
    assert drive.token_times[small.request_id, 0][-1] < drive.token_times[holder.request_id, 0][-1]
    assert len(drive.tokens[big.request_id, 0]) == 4


def test_a_big_one_is_not_passed_for_ever() -> None:
    drive = Lockstep(num_blocks=64, max_num_seqs=8, max_model_len=1024)
    drive.submit(words(0, 320), 100)
    for _ in range(5):
        drive.step()
    big = drive.submit(words(1, 900), 4)
    for index in range(400):
        drive.submit(words(100 + index, 64), 20)
    drive.run()
    last = max(times[-1] for times in drive.token_times.values())
    assert drive.token_times[big.request_id, 0][0] < 0.5 * last


def test_priority_goes_first() -> None:
    drive = Lockstep(max_num_seqs=1)
    drive.submit(words(0, 8), 10)
    drive.step()
    slow = drive.submit(words(1, 8), 2, priority=5)
    urgent = drive.submit(words(2, 8), 2, priority=-1)
    drive.run()
    assert drive.token_times[urgent.request_id, 0][0] < drive.token_times[slow.request_id, 0][0]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 64])
def test_choices_share_the_prompt(caching: bool, length: int) -> None:
    drive = Lockstep(prefix_caching=caching, budget=64)
    prompt = words(3, length)
    drive.submit(prompt, 20, n=4)
    drive.run()
    assert_right(drive, prompt, 0, 20, choices=4)
    computed = sum(len(plan.token_ids) for plan in drive.steps)
    shared = (length - 1) // 16 * 16
    assert computed == length + 3 * (length - shared)


@pytest.mark.user_pain("Q1")
@pytest.mark.parametrize("length", range(15, 130, 6))
def test_prefix_hits_change_nothing(length: int) -> None:
    drive = Lockstep(budget=48)
    prompt = words(5, length)
    for index in range(3):
        drive.submit(prompt, 24)
        drive.run()
        assert_right(drive, prompt, index, 24)
        assert drive.cached[index] == ((length - 1) // 16 * 16 if index else 0)


@pytest.mark.user_pain("Q2")
def test_salts_do_not_share() -> None:
    drive = Lockstep()
    prompt = words(5, 100)
    for index, (salt, cached) in enumerate([("a", 0), ("b", 0), (None, 0), ("a", 96), ("b", 96)]):
        drive.submit(prompt, 4, salt=salt)
        drive.run()
        assert drive.cached[index] == cached, f"salt {salt}"


@pytest.mark.user_pain("C2")
def test_aborts_in_every_phase_give_all_blocks_back() -> None:
    drive = Lockstep(num_blocks=64, max_num_seqs=4, budget=16)
    for round_ in range(100):
        request = drive.submit(words(round_ % 7, 40), 10, n=1 + round_ % 3)
        for _ in range(round_ % 9):
            drive.step()
        if request.request_id in drive.engine.requests:
            drive.engine.abort(request, drive.now)
    drive.run()
    assert drive.engine.pool.num_held == 0
    assert drive.engine.table.num_free_rows == 4


def test_mixed_steps_shrink_to_what_the_device_manages() -> None:
    """A device that needs 10 ms a prompt token gets small chunks beside streams, and whole budgets alone."""
    drive = Lockstep(num_blocks=2000, max_model_len=20_000, budget=512, token_s=0.01)
    drive.submit(words(0, 16), 500)
    for _ in range(5):
        drive.step()
    drive.submit(words(1, 4000), 2)
    for _ in range(20):
        drive.step()
    assert max(len(plan.token_ids) for plan in drive.steps[-10:]) <= 32


@pytest.mark.user_pain("P2")
@pytest.mark.parametrize(
    ("host_s", "waited_s", "most"),
    [(0.0004, 0.0006, 3), (0.0004, 0.002, 2), (0.0004, 0.0, 2)],
    ids=["a quick device", "a slow device", "the host itself"],
)
def test_p2_a_third_step_is_in_flight_where_two_do_not_keep_the_device_busy(
    host_s: float, waited_s: float, most: int
) -> None:
    drive = Lockstep(host_s=host_s, waited_s=waited_s)
    prompt = words(1, 40)
    drive.submit(prompt, 60)
    seen = 0
    while drive.engine.requests:
        drive.step()
        seen = max(seen, len(drive.plans) + 1)
    assert seen == most
    assert_right(drive, prompt, 0, 60)
