"""Recorded work: replaying equals running, nothing is recorded in silence, and what cannot be recorded is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from ...ipc.facts import Problem
from ...kernels.catalog import CATALOG
from ...kernels.implementation import FunctionKernel, Kernel
from ..platforms.contract import Clause, Graph, NotSupported
from .judgement import clause, demand, raises, told, violated
from .subject import Subject

_ROWS, _WIDTH = 6, 8
_POISON = -77.0


@dataclass(frozen=True, kw_only=True)
class Recordable:
    """A kernel that a graph may hold, with places for its numbers."""

    subject: Subject
    kernel: Kernel
    out: torch.Tensor
    gate_up: torch.Tensor

    def run(self) -> None:
        self.kernel(self.out, self.gate_up)

    def fill(self, seed: int) -> None:
        """New numbers in the same places."""
        generator = torch.Generator().manual_seed(seed)
        self.gate_up.copy_(torch.randn(_ROWS, 2 * _WIDTH, generator=generator))
        self.subject.backend.synchronize()

    def eager(self) -> torch.Tensor:
        self.run()
        return self.subject.read(self.out)

    def replayed(self, graph: Graph) -> torch.Tensor:
        self.out.fill_(_POISON)
        self.subject.backend.synchronize()
        graph.replay(_ROWS, 1, None)
        return self.subject.read(self.out)


@pytest.fixture
def recordable(subject: Subject) -> Recordable:
    """The first implementation of a kernel that says it can be recorded; on a device whose graphs hold any work, else
    torch's own operations.
    """
    made = Recordable(
        subject=subject,
        kernel=_kernel(subject),
        out=subject.put(torch.zeros(_ROWS, _WIDTH)),
        gate_up=subject.put(torch.zeros(_ROWS, 2 * _WIDTH)),
    )
    made.fill(0)
    made.run()
    subject.backend.synchronize()
    return made


def _kernel(subject: Subject) -> Kernel:
    profile, problem = subject.backend.profile, Problem(dtype="float32", intermediate_size=_WIDTH)
    for implementation in CATALOG:
        if implementation.kernel == "silu_and_mul" and implementation.misfit(profile, problem) is None:
            kernel = implementation.load(profile, problem, subject.services)
            if kernel.capturable:
                return kernel
    return FunctionKernel(_torch_silu_and_mul)


def _torch_silu_and_mul(out: torch.Tensor, gate_up: torch.Tensor) -> None:
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(torch.nn.functional.silu(gate), up, out=out)


def _captured(subject: Subject, run: Callable[[], None]) -> Graph:
    try:
        return subject.backend.capture_graph(run)
    except NotSupported as error:
        violated(f"a kernel that can be recorded was refused ({error}); decline {Clause.GRAPH_CAPTURE}")


@clause("graph_capture.replay", Clause.GRAPH_CAPTURE)
def test_replay_equals_running(subject: Subject, recordable: Recordable) -> None:
    """On numbers that came after the recording, several times."""
    recordable.fill(1)
    at_recording = recordable.eager()
    graph = _captured(subject, recordable.run)
    for seed in (2, 3, 4):
        recordable.fill(seed)
        expected = recordable.eager()
        got = recordable.replayed(graph)
        if bool((got == _POISON).any()):
            violated("a replay left its output as it was: the recording holds less than what was launched")
        stale = torch.allclose(got, at_recording, rtol=1e-5, atol=1e-6)
        demand(not stale, "a replay computed with the inputs of the recording, not with the new ones in their places")
        is_right = torch.allclose(got, expected, rtol=1e-5, atol=1e-6)
        worst = float((got - expected).abs().max())
        demand(is_right, f"a replay differs from running the same work by {worst:.3g}")


@clause("graph_capture.several", Clause.GRAPH_CAPTURE)
def test_recordings_do_not_disturb_each_other(subject: Subject, recordable: Recordable) -> None:
    other = Recordable(
        subject=subject,
        kernel=recordable.kernel,
        out=subject.put(torch.zeros(_ROWS, _WIDTH)),
        gate_up=subject.put(torch.ones(_ROWS, 2 * _WIDTH)),
    )
    graphs = [_captured(subject, work.run) for work in (recordable, other)]
    for seed in (5, 6):
        for work, graph in zip((recordable, other), graphs, strict=True):
            work.fill(seed)
            expected = work.eager()
            is_right = torch.allclose(work.replayed(graph), expected, rtol=1e-5, atol=1e-6)
            demand(is_right, "of two recordings that are alive, one replays wrongly")


@clause("graph_capture.any_size", Clause.GRAPH_CAPTURE)
def test_fewer_tokens_than_recorded(subject: Subject, recordable: Recordable) -> None:
    if not subject.backend.graphs_take_any_size:
        pytest.skip("its recordings hold the sizes that they were made with")
    graph = _captured(subject, recordable.run)
    recordable.fill(7)
    expected = recordable.eager()
    recordable.out.fill_(_POISON)
    graph.replay(_ROWS - 2, 1, None)
    got = subject.read(recordable.out)
    is_right = torch.allclose(got[:-2], expected[:-2], rtol=1e-5, atol=1e-6)
    demand(is_right, "a replay for fewer tokens than were recorded is wrong")
    demand(bool((got[-2:] == _POISON).all()), "a replay for fewer tokens wrote those beyond them")


@clause("graph_capture.empty", Clause.GRAPH_CAPTURE)
def test_nothing_is_not_recorded(subject: Subject, recordable: Recordable) -> None:
    """A recording of nothing would replay as a success that computes nothing. Some vendors' graphs cannot tell."""
    try:
        graph = subject.backend.capture_graph(lambda: None)
    except NotSupported:
        _check_usable(subject, recordable)
        return
    except Exception as error:
        violated(f"recording work that launches nothing raised {told(error)}; the contract says NotSupported")
    demand(graph.num_launches is None, f"work that launches nothing was recorded as {graph.num_launches} launches")
    _check_usable(subject, recordable)
    pytest.skip("its recordings do not tell how much they hold, so that one of nothing cannot be refused")


@clause("graph_capture.refusal", Clause.GRAPH_CAPTURE)
def test_what_cannot_be_recorded_is_refused(subject: Subject, recordable: Recordable) -> None:
    """Work that gives up midway, and work that reads a number on the host: NotSupported, and life goes on."""

    def gives_up() -> None:
        recordable.run()
        raise NotSupported("this work cannot be recorded")

    with raises(NotSupported, "recording work that gives up midway"):
        subject.backend.capture_graph(gives_up)
    _check_usable(subject, recordable)

    def reads_on_the_host() -> None:
        recordable.run()
        float(recordable.out.sum())

    try:
        graph = subject.backend.capture_graph(reads_on_the_host)
    except NotSupported:
        _check_usable(subject, recordable)
        return
    except Exception as error:
        violated(f"recording work that reads a number on the host raised {told(error)}; the contract says NotSupported")
    recordable.fill(8)
    expected = recordable.eager()
    is_right = torch.allclose(recordable.replayed(graph), expected, rtol=1e-5, atol=1e-6)
    demand(is_right, "work that reads a number on the host was recorded, and its replay is wrong")


def _check_usable(subject: Subject, recordable: Recordable) -> None:
    recordable.fill(9)
    expected = recordable.eager()
    gate, up = subject.read(recordable.gate_up).chunk(2, -1)
    is_right = torch.allclose(expected, torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-5)
    demand(is_right, "after a refused recording the device computes wrongly")
    graph = _captured(subject, recordable.run)
    is_right = torch.allclose(recordable.replayed(graph), expected, rtol=1e-5, atol=1e-6)
    demand(is_right, "after a refused recording the next one replays wrongly")
