"""What a second pair of eyes found in the engine core and in ipc: one test for each."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from trimaran.engine_core.core import Core
from trimaran.engine_core.engine import Engine
from trimaran.engine_core.metric_totals import MetricTotals
from trimaran.engine_core.scheduler import CALM_STEPS, MAX_BYPASSED
from trimaran.engine_core.worker_group import WorkerGroup
from trimaran.ipc.configuration import CoreConfiguration
from trimaran.ipc.control import FROM_CHILD, Attach, GroupFault, WorkersLost
from trimaran.ipc.frontend_messages import Report
from trimaran.ipc.metrics import MetricFamily, MetricKind, Sample
from trimaran.ipc.process import ControlLink
from trimaran.ipc.ring import RingWriter, create_doorbell, create_ring
from trimaran.ipc.server_info import EngineLimits
from trimaran.ipc.worker_messages import Heartbeat, StepError, StepErrorKind
from trimaran.tests.pure.lockstep import Lockstep, words

_ACKNOWLEDGE = """
import sys, time
from trimaran.ipc.ring import RingReader
reader = RingReader(int(sys.argv[1]), 0, int(sys.argv[2]))
end = time.monotonic() + float(sys.argv[3])
while time.monotonic() < end:
    for _ in range(1000):
        reader.release()
"""


def test_an_acknowledgement_is_never_seen_half_written() -> None:
    ring, doorbell = create_ring(num_slots=2, slot_bytes=64, num_readers=1, generation=1), create_doorbell()
    writer = RingWriter(ring, [doorbell])
    command = [sys.executable, "-c", _ACKNOWLEDGE, str(ring), str(doorbell), "0.5"]
    child = subprocess.Popen(command, pass_fds=(ring, doorbell))
    last = num_moves = 0
    while child.poll() is None:
        for _ in range(1000):
            seen = writer._slowest()
            assert seen >= last, f"the acknowledgement fell from {last} to {seen}"
            num_moves += seen > last
            last = seen
    writer.close()
    os.close(ring)
    os.close(doorbell)
    assert child.returncode == 0 and num_moves > 0


def test_inter_token_latency_goes_on_after_a_preemption() -> None:
    """A resumed sequence's next gap begins at its own last token, not at that of its row's last tenant."""
    drive = Lockstep(num_blocks=20, max_num_seqs=8, max_model_len=320, prefix_caching=False)
    drive.now = 1000.0
    for index in range(3):
        drive.submit(words(index, 32), 180)
    drive.run()
    assert drive.engine.scheduler.num_preemptions > 0
    waited = sum(times[-1] - times[0] for times in drive.token_times.values())
    assert drive.engine.statistics.inter_token_latency.sample().value == pytest.approx(waited)


def test_who_waited_behind_an_aborted_one_is_looked_at_again() -> None:
    drive = Lockstep(num_blocks=64, max_num_seqs=8, max_model_len=1024)
    holder = drive.submit(words(0, 320), 400)
    for _ in range(5):
        drive.step()
    big = drive.submit(words(1, 900), 4)
    big.sequences[0].bypassed = MAX_BYPASSED
    small = drive.submit(words(2, 16), 4)
    for _ in range(5):
        drive.step()
    assert small.sequences[0].is_queued
    drive.engine.abort(big, drive.now)
    drive.run()
    assert drive.token_times[small.request_id, 0][-1] < drive.token_times[holder.request_id, 0][-1]


def test_a_shorter_horizon_lets_those_in_line_in() -> None:
    drive = Lockstep(num_blocks=64, max_num_seqs=8, max_model_len=1024)
    scheduler = drive.engine.scheduler
    drive.submit(words(0, 16), 1000)
    drive.step()
    scheduler._horizon, scheduler._calm_steps = 512, CALM_STEPS - 20
    late = drive.submit(words(1, 64), 900)
    for _ in range(10):
        drive.step()
    assert late.sequences[0].is_queued, "it was meant not to fit"
    for _ in range(20):
        drive.step()
    assert not late.sequences[0].is_queued


@pytest.mark.parametrize("num_steps", [0, 5])
def test_shared_blocks_go_with_the_last_follower(num_steps: int) -> None:
    """Before the first token, when it waits for its leader, and after, when it stands in line."""
    drive = Lockstep(max_num_seqs=1)
    request = drive.submit(words(0, 64), 50, n=2)
    for _ in range(num_steps):
        drive.step()
    assert bool(request.shared_blocks) == bool(num_steps)
    drive.engine.finish_sequence(request, 1, drive.now)
    for _ in range(5):
        drive.step()
    assert drive.tokens[request.request_id, 0] and not request.shared_blocks


def test_a_dead_frontends_gauges_do_not_count() -> None:
    totals = MetricTotals()
    for incarnation in (1, 2):
        families = tuple(
            MetricFamily(kind.value, kind, "", (Sample({}, 5.0),)) for kind in (MetricKind.GAUGE, MetricKind.COUNTER)
        )
        totals.report(Report(index=0, incarnation=incarnation, families=families))
    values = {family.kind: family.samples[0].value for family in totals.families()}
    assert values == {MetricKind.GAUGE: 5.0, MetricKind.COUNTER: 10.0}


def test_a_closed_control_link_keeps_no_descriptors() -> None:
    async def work() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link = ControlLink(ours, FROM_CHILD)
        link.open(lambda message, descriptors: None, lambda: None)
        doorbell = create_doorbell()
        before = len(os.listdir("/proc/self/fd"))
        while not link._pending:
            link.send(Attach(1), [doorbell])
        assert len(os.listdir("/proc/self/fd")) == before + 1
        link.close()
        assert len(os.listdir("/proc/self/fd")) == before - 1
        theirs.close()
        os.close(doorbell)

    asyncio.run(work())


def _configuration(folder: Path) -> CoreConfiguration:
    return CoreConfiguration(
        incarnation=1,
        generation=1,
        num_ranks=1,
        frontends_address=f"ipc://{folder}/f",
        workers_address=f"ipc://{folder}/w",
    )


def _engine(core: Core) -> Engine:
    limits = EngineLimits(max_model_len=64, vocab_size=97, max_num_seqs=2, num_blocks=8, block_size=16, dtype="float32")
    return Engine(limits, max_batched_tokens=16, prefix_caching=True, statistics=core.statistics)


class _Control:
    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


def test_a_boot_token_that_fails_is_a_fault_of_the_group(tmp_path: Path) -> None:
    control = _Control()
    core = Core(_configuration(tmp_path), control, [])  # type: ignore[arg-type]
    core.engine = _engine(core)
    core._submit_own()
    plan = core.engine.plan(0.0)
    assert plan is not None
    core._result(StepError(0, 1, int(plan.step[0]), StepErrorKind.OUT_OF_MEMORY, "no room"))
    asyncio.run(core.close())
    faults = [message for message in control.sent if isinstance(message, GroupFault)]
    assert len(faults) == 1 and "no room" in faults[0].text
    assert core.engine is None and core.statistics.num_failed == 0


def test_late_words_of_a_lost_group_are_dropped(tmp_path: Path) -> None:
    context: zmq.Context = zmq.Context()

    def never(*_: object) -> None:
        raise AssertionError

    group = WorkerGroup(
        context, _configuration(tmp_path), on_ready=never, on_result=never, on_refusal=never, on_fault=never
    )
    group.generation = 1
    group.detach()
    group._message(b"w", Heartbeat(0, 1, None, 0.0, 0.0, 0), [])
    assert not group.heartbeats and not group._peers
    group._channel.close()
    context.term()


def test_counters_do_not_fall_when_workers_are_lost(tmp_path: Path) -> None:
    core = Core(_configuration(tmp_path), _Control(), [])  # type: ignore[arg-type]

    def computed() -> float:
        return next(family for family in core._metrics() if family.name == "computed_tokens_total").samples[0].value

    for generation in (1, 2):
        core.group.generation = generation
        core.engine = _engine(core)
        core._submit_own()
        assert core.engine.plan(0.0) is not None
        assert computed() == generation
        core._from_supervisor(WorkersLost(generation, "test"), [])
        assert computed() == generation
    asyncio.run(core.close())


def test_the_engines_own_tokens_change_nobodys_seed(tmp_path: Path) -> None:
    """A request without a seed is keyed by its place in line; how often the server was idle must not show."""
    core = Core(_configuration(tmp_path), _Control(), [])  # type: ignore[arg-type]
    core.engine = _engine(core)
    core._submit_own()
    core._submit_own()
    assert core._next_order == 0
    keys = [sequence.key for sequence in core.engine.waiting]
    assert len(set(keys)) == 2
    asyncio.run(core.close())
