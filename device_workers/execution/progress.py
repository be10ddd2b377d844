"""What the control loop may read of the step thread's work. Torch-free."""

from __future__ import annotations

import ctypes
import time


class Progress:
    """Written by the step thread (and by recorded kernels), read by the heartbeat. Each field is one machine word."""

    def __init__(self) -> None:
        self.counter = ctypes.c_int64(0)
        self.step: int | None = None
        self.began_s = 0.0
        self.compiled_after_ready = 0

    def begin(self, step: int) -> None:
        self.began_s = time.monotonic()
        self.bump()
        self.step = step

    def bump(self) -> None:
        """Something moved: a layer, a slice."""
        self.counter.value += 1

    def end(self, step: int | None = None) -> None:
        """This step is over, or (None) all are; the one begun last may be a later one, which runs from now on."""
        if step is None or step == self.step:
            self.step = None
        else:
            self.began_s = time.monotonic()
        self.bump()


class ProgressWatch:
    """The control loop's view: how long ago the counter moved."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._last = progress.counter.value
        self._moved_s = time.monotonic()

    def look(self) -> tuple[int | None, float, float]:
        """(running step or None, its age, time since it last got anywhere), in seconds."""
        now, step, counter = time.monotonic(), self._progress.step, self._progress.counter.value
        if counter != self._last or step is None:
            self._last, self._moved_s = counter, now
        return step, 0.0 if step is None else now - self._progress.began_s, now - self._moved_s
