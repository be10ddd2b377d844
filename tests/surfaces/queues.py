"""Streams that run late: work given to a side stream waits until somebody must see it, so that a missing event shows.

Operations that write (copies, `out=`, in-place) are deferred; others run at once. The default stream runs everything
at once, as a device that is fast would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


def writes(function: Any) -> bool:
    """Whether an operation changes one of its arguments."""
    return bool(function._schema.is_mutable)


class Queue:
    """Work of one stream, in order. `drain(upto)` runs what was given before the mark."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self._num_given = 0
        self._num_done = 0

    def give(self, work: Callable[[], object]) -> None:
        self._work.append(work)
        self._num_given += 1

    def mark(self) -> int:
        return self._num_given

    def is_past(self, mark: int) -> bool:
        return self._num_done >= mark

    def drain(self, upto: int | None = None) -> None:
        last = self._num_given if upto is None else upto
        while self._num_done < last:
            work = self._work.popleft()
            with _disable_current_modes():  # else work that runs while another stream is current would go there
                work()
            self._num_done += 1


class Deferred(TorchDispatchMode):
    """Within it, operations that write go to a queue."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self._queue = queue

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not writes(function):
            return function(*args, **kwargs)
        self._queue.give(lambda: function(*args, **kwargs))
        return kwargs.get("out", args[0])


class Recorded(TorchDispatchMode):
    """Within it, operations are recorded. Those that write do not run; the results of others get their place."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if writes(function):
            self.operations.append((function, args, kwargs, None))
            return kwargs.get("out", args[0])
        result = function(*args, **kwargs)
        if isinstance(result, torch.Tensor) and not _is_view(result, args):
            self.operations.append((function, args, kwargs, result))
        return result

    def replay(self) -> None:
        for function, args, kwargs, result in self.operations:
            again = function(*args, **kwargs)
            if result is not None:
                result.copy_(again)


def _is_view(result: torch.Tensor, args: Any) -> bool:
    storage = result.untyped_storage().data_ptr()
    return any(isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() == storage for a in args)


with Recorded():  # torch imports half of itself when a mode is first entered, and must meet the real modules then
    torch.zeros(1).add_(1)
