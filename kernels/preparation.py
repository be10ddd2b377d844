"""Compiles side by side what loading and checking kernels one by one will run. Torch-free to import."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..ipc.facts import DeviceProfile, Problem
from .compilations import compiling, rehearsing
from .implementation import Implementation, Services

log = logging.getLogger("trimaran.worker")


def prepare(chosen: Sequence[Implementation], profile: DeviceProfile, problem: Problem, services: Services) -> None:
    """Rehearse the trials of these implementations. What fails here is left to the check, which says why."""
    from .trials import make_trials
    from .verification import run_trial

    with compiling(services.num_threads, services.device), rehearsing():
        for implementation in chosen:
            try:
                loaded = implementation.load(profile, problem, services)
                for trial in make_trials(implementation.kernel, problem, services.device):
                    run_trial(implementation.kernel, loaded, trial.arguments)
            except Exception as error:  # any failure of vendor code or of a compiler
                log.debug("%s was not compiled ahead: %r", implementation.name, error)
