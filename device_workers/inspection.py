"""Looks at the machine for a command: what is there, what fits, what works. One task, then the process ends.

Each task is a function that sends messages of `ipc/inspection.py` on the control link and returns; a Refusal it raises
is sent as one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Struct

from ..ipc.conditions import Refusal
from ..ipc.configuration import InspectionConfiguration, Task, WorkerConfiguration
from ..ipc.control import Refused, ToChild
from ..ipc.inspection import Inspected
from ..ipc.process import ControlLink

EXIT_DONE, EXIT_REFUSED = 0, 3

log = logging.getLogger("trimaran.worker")


@dataclass(frozen=True)
class Look:
    """What a task works with: its configuration, and where to tell what it saw."""

    configuration: InspectionConfiguration
    tell: Callable[[Struct], None]
    say: Callable[[str], None]

    @property
    def worker(self) -> WorkerConfiguration:
        return self.configuration.worker


def inspect(link: ControlLink[ToChild], configuration: InspectionConfiguration) -> int:
    """Run the task; the process's exit code."""
    try:
        text = _task(configuration.task)(Look(configuration, link.send, log.warning))
    except Refusal as refusal:
        link.send(Refused(str(refusal)))
        return EXIT_REFUSED
    link.send(Inspected(text=text or ""))
    return EXIT_DONE


def _task(task: Task) -> Callable[[Look], str | None]:
    """Imported when asked for: most tasks need little of the others."""
    match task:
        case Task.PROBE:
            from .inspecting.probe import probe

            return probe
        case Task.KERNELS_LIST:
            from .inspecting.kernels import list_kernels

            return list_kernels
        case Task.KERNELS_MATRIX:
            from .inspecting.kernels import show_matrix

            return show_matrix
        case Task.KERNELS_CHECK:
            from .inspecting.kernels import check_kernels

            return check_kernels
        case Task.DOCTOR:
            from .inspecting.doctor import examine

            return examine
        case Task.DIAGNOSE:
            from .inspecting.diagnose import diagnose

            return diagnose
