"""When Triton compiles: ahead, on several threads, what calls in a rehearsal would launch; and late, which is told.

Imports neither torch nor Triton before it has to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

_MAX_THREADS = 16
"""More of them would wait for the interpreter, which reads every kernel's source."""

_asked_for: ContextVar[set[Hashable] | None] = ContextVar("asked_for", default=None)
"""In a rehearsal: the code that was asked for so far."""


def is_rehearsing() -> bool:
    """Whether kernels that this thread calls are to launch nothing, and only to ask for what that would take."""
    return _asked_for.get() is not None


def asks_anew(code: Hashable) -> bool:
    """Whether this rehearsal did not yet ask for that code: Triton takes a millisecond to find that it was."""
    asked = _asked_for.get()
    if asked is None or code in asked:
        return asked is None
    asked.add(code)
    return True


@contextmanager
def rehearsing() -> Iterator[None]:
    """Kernels that this thread calls meanwhile launch nothing. What they would write holds whatever it held."""
    token = _asked_for.set(set())
    try:
        yield
    finally:
        _asked_for.reset(token)


@contextmanager
def compiling(num_threads: int, device: str) -> Iterator[None]:
    """What this thread rehearses meanwhile is compiled and loaded by other threads, each launch's code once; at the end
    all of it is there. What fails is left to the launch that meets it again.
    """
    from triton import AsyncCompileMode

    compilers = _Compilers(min(num_threads, _MAX_THREADS), device)
    try:
        with AsyncCompileMode(compilers, ignore_errors=True):
            yield
    finally:
        compilers.shutdown()


class _Compilers(ThreadPoolExecutor):
    """Threads that also load on the device what they have compiled: that takes a launcher, compiled from C."""

    def __init__(self, num_threads: int, device: str) -> None:
        super().__init__(num_threads, thread_name_prefix="compiler", initializer=_take_device, initargs=(device,))

    def submit(self, compile: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        def compile_and_load() -> Any:
            kernel = compile(*arguments, **options)
            with suppress(Exception):  # the launch meets it again
                _ = kernel.run  # its property loads
            return kernel

        return super().submit(compile_and_load)


def _take_device(device: str) -> None:
    """Each thread has a current device of its own."""
    import torch

    place = torch.device(device)
    if place.index is not None and place.type not in ("cpu", "meta"):
        getattr(torch, place.type).set_device(place)


class Compilations:
    """Tells of every kernel that Triton compiles, or takes from its cache on disk, while it watches: a step waits for
    each.
    """

    def __init__(self, on_late: Callable[[str], None]) -> None:
        """`on_late` is told what was compiled."""
        self._on_late = on_late
        self._is_watching = False
        self._hears = False
        self._next: Callable[..., Any] | None = None

    def watch(self) -> None:
        """From now on nothing should be compiled. Without Triton in this process nothing can be."""
        self._is_watching = True
        triton = sys.modules.get("triton")
        if triton is not None and not self._hears:
            self._hears = True
            runtime = triton.knobs.runtime
            self._next, runtime.jit_post_compile_hook = runtime.jit_post_compile_hook, self._compiled

    def pause(self) -> None:
        """What is compiled from now on is expected."""
        self._is_watching = False

    def _compiled(self, **facts: Any) -> Any:
        if self._is_watching:
            self._on_late(str(facts.get("repr", "a kernel")))
        return None if self._next is None else self._next(**facts)
