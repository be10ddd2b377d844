"""Kernels that go wrong in one way each; copied into a package that is made on the spot.

They compute by Trimaran's own first choice, so that only the fault tells them apart.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimaran.ipc.facts import DeviceProfile, Problem
from trimaran.kernels.catalog import CATALOG
from trimaran.kernels.implementation import DeclaredImplementation, Kernel, Services
from trimaran.kernels.registry import Registry

Act = Callable[[tuple[Any, ...]], None]


class OutOfResources(Exception):
    """Named as a compiler names a launch that asks for too much shared memory."""


class FaultyKernel:
    """Does something before and something after the right computation."""

    workspace_bytes = 0

    def __init__(self, right: Any, before: Act, after: Act, *, capturable: bool) -> None:
        self._right, self._before, self._after = right, before, after
        self.capturable = capturable and right.capturable

    def __call__(self, *arguments: Any) -> None:
        self._before(arguments)
        self._right(*arguments)
        self._after(arguments)

    def pack(self, weight: Any, bias: Any) -> Any:
        return self._right.pack(weight, bias)


def offer(kernel: str, fault: str, trigger: str, *, recorded: bool) -> tuple[DeclaredImplementation, ...]:
    """The catalog's first choice under the name `bad_KERNEL`, with a fault. `trigger` is a file: a fault under load
    begins when it exists. `recorded`: graphs may record it as they may the right one.
    """

    def load(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
        if fault in _IN_LOAD:
            _IN_LOAD[fault](())
        registry = Registry(CATALOG)
        name = registry.resolve(kernel, profile, problem).chosen
        chosen = next(found for found in registry.chain(kernel) if found.name == name)
        before, after = _IN_CALL.get(fault, _nothing), _AFTER_CALL.get(fault, _nothing)
        if fault == "under load":
            after = _under_load(kernel, Path(trigger))
        elif fault == "breaks the device":
            after = _break_device(Path(trigger))
        elif fault == "exhausts the device":
            after = _exhaust_device(Path(trigger))
        return FaultyKernel(chosen.load(profile, problem, services), before, after, capturable=recorded)

    return (DeclaredImplementation(name=f"bad_{kernel}", kernel=kernel, loader=load),)


def _nothing(arguments: tuple[Any, ...]) -> None: ...


def _crash(arguments: tuple[Any, ...]) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _miscompile(arguments: tuple[Any, ...]) -> None:
    raise RuntimeError("ptxas fatal: unexpected instruction\n  at line 1 of many")


def _exceed(arguments: tuple[Any, ...]) -> None:
    raise OutOfResources("out of resource: shared memory, required: 262144, hardware limit: 101376")


def _spoil(arguments: tuple[Any, ...]) -> None:
    out = arguments[0]
    out.mul_(-3) if out.dtype.is_floating_point else out.add_(1)


def _raise_inside(caller: str) -> Act:
    """Only in calls that come from a function of this name."""

    def act(arguments: tuple[Any, ...]) -> None:
        frame = sys._getframe()
        while (outer := frame.f_back) is not None:
            if outer.f_code.co_name == caller:
                raise RuntimeError(f"it does not work in {caller}")
            frame = outer

    return act


def _under_load(kernel: str, trigger: Path) -> Act:
    """What it writes is done and spoilt when it raises; in place, that is what it would read again."""

    def act(arguments: tuple[Any, ...]) -> None:
        if trigger.exists():
            _spoil(arguments)
            if kernel == "fused_add_rms_norm":
                _spoil(arguments[1:])
            raise RuntimeError("an illegal memory access was encountered")

    return act


def _break_device(trigger: Path) -> Act:
    """Once: the trigger is used up, so that a worker that starts again finds a sound device."""

    def act(arguments: tuple[Any, ...]) -> None:
        if trigger.exists():
            trigger.unlink()
            import torch

            far = torch.full((1,), 1 << 40, device=arguments[0].device)
            torch.zeros(4, device=arguments[0].device)[far]  # the device notices, some time later

    return act


def _exhaust_device(trigger: Path) -> Act:
    """Once: it asks for more memory than the device has."""

    def act(arguments: tuple[Any, ...]) -> None:
        if trigger.exists():
            trigger.unlink()
            import torch

            torch.empty(1 << 45, dtype=torch.int8, device=arguments[0].device)

    return act


_IN_LOAD: dict[str, Act] = {
    "slow": lambda arguments: time.sleep(60),
    "compile": _miscompile,
    "resources in load": _exceed,
    "crash in load": _crash,
}
_IN_CALL: dict[str, Act] = {
    "resources in call": _exceed,
    "crash in call": _crash,
    "capture": _raise_inside("_capture"),
    "warm-up": _raise_inside("warm_up"),
}
_AFTER_CALL: dict[str, Act] = {"wrong": _spoil, "meddles": lambda arguments: _spoil(arguments[1:])}
