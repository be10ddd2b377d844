"""Kernels that may be replaced while they serve: the first failure under load costs a step's time, not its requests.

A guarded kernel that raises is demoted for good, the next link of its chain takes over, and the call is made again. One
that reads what it writes cannot just be called again, because it may have written some of it: then `KernelReplaced`
tells the caller to begin anew from inputs that are whole. One whose weights are packed for it costs a new worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ...ipc.conditions import DeviceFault, StepFailed, TrimaranError
from ...ipc.facts import DeviceProfile, Feature, Problem, Resolution
from ...kernels.implementation import Kernel, Services
from ...kernels.preparation import prepare
from ...kernels.registry import KernelChoiceRefused, KernelChoices, Registry, failure_text
from ..memory.exhaustion import is_exhaustion

PACKED = ("linear",)
"""Their weights are packed for the implementation that serves: another one could not read them."""
IN_PLACE = ("fused_add_rms_norm", "apply_penalties", "linear_add")

log = logging.getLogger("trimaran.worker")


class KernelReplaced(Exception):
    """Another implementation serves from now on; what the failed call was to change may be half changed."""


class _FailedInRecording(Exception):
    """Nothing may be replaced yet: the check of the next one would be recorded instead of run."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(name)
        self.name, self.error = name, error


class GuardedKernel:
    """A `Kernel` with its chain behind it."""

    def __init__(self, name: str, kernel: Kernel, on_failure: Callable[[str, Exception], Kernel]) -> None:
        self._name = name
        self._on_failure = on_failure
        self._is_in_place = name in IN_PLACE
        self._take(kernel)

    def _take(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.workspace_bytes, self.capturable = kernel.workspace_bytes, kernel.capturable

    def __call__(self, *arguments: Any) -> torch.Tensor | None:
        try:
            return self._kernel(*arguments)
        except (MemoryError, TrimaranError):
            raise
        except Exception as error:  # vendor code and compilers may raise anything
            if isinstance(error, RuntimeError) and is_exhaustion(error):
                raise  # no fault of the kernel's
            self.replace(error)
            if self._is_in_place:
                raise KernelReplaced(self._name) from error
            return self(*arguments)

    @property
    def served(self) -> Kernel:
        """The link of the chain that serves now."""
        return self._kernel

    def replace(self, error: Exception) -> None:
        """By the next of its chain. Raises StepFailed and DeviceFault."""
        self._take(self._on_failure(self._name, error))


class PackedKernel(GuardedKernel):
    """A `LinearKernel` in a chain; its failure is a DeviceFault."""

    def _take(self, kernel: Kernel) -> None:
        super()._take(kernel)
        self.pack = kernel.pack  # type: ignore[attr-defined]


class KernelSet:
    """The kernels of an engine, loaded and guarded, with the story of each."""

    def __init__(
        self,
        registry: Registry,
        profile: DeviceProfile,
        services: Services,
        choices: KernelChoices,
        *,
        num_ranks: int,
        on_changed: Callable[[str], None],
        synchronize: Callable[[], None],
    ) -> None:
        """`synchronize` waits for the device, and raises where it is broken for good."""
        self._synchronize = synchronize
        self._registry, self._profile = registry, profile
        self._services, self._choices = services, choices
        self._num_ranks = num_ranks
        self._on_changed = on_changed
        self._kernels: dict[str, GuardedKernel] = {}
        self._is_recording = False
        self._found: dict[str, Resolution] = {}
        self._problems: dict[str, Problem] = {}

    @property
    def resolutions(self) -> tuple[Resolution, ...]:
        return tuple(self._found.values())

    def __getitem__(self, name: str) -> Kernel:
        return self._kernels[name]

    def unguarded(self, name: str) -> Kernel:
        """As loaded: its failures are the caller's."""
        return self._kernels[name].served

    def prepare(self, names: Iterable[str], problem: Problem, on_begin: Callable[[], None]) -> None:
        """Compile ahead what loading these will run; nothing where that is known or was once the end of a process."""
        chosen = self._registry.to_prepare(names, self._profile, problem, self._choices)
        if not chosen:
            return
        with self.together() as may:
            if may:
                on_begin()
                prepare(chosen, self._profile, problem, self._services)
            else:
                log.info("kernels are compiled one by one: a process died when they were compiled side by side")

    def together(self) -> AbstractContextManager[bool]:
        """See Memory.together."""
        return self._registry.together(self._profile)

    @property
    def are_compiled(self) -> bool:
        """Whether any of them is compiled when it is first called."""
        chosen = {resolution.chosen for resolution in self._found.values()}
        offered = (found for kernel in self._registry.kernels for found in self._registry.chain(kernel))
        return any(found.name in chosen and Feature.TRITON in found.metadata.features for found in offered)

    def load(self, name: str, problem: Problem) -> None:
        """Raises KernelChoiceRefused, or RuntimeError when the whole chain fails."""
        self._problems[name] = problem
        kernel, self._found[name] = self._registry.load(name, self._profile, problem, self._services, self._choices)
        guard = PackedKernel if name in PACKED else GuardedKernel
        self._kernels[name] = guard(name, kernel, self._replace)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """For calls that a graph records. Raises KernelReplaced when one failed: all of it is to be recorded anew."""
        self._is_recording = True
        try:
            yield
        except _FailedInRecording as failed:
            self._is_recording = False
            self._kernels[failed.name].replace(failed.error)
            raise KernelReplaced(failed.name) from failed.error
        finally:
            self._is_recording = False

    def _check_device(self, name: str, error: Exception) -> None:
        """A device that broke says so at whatever is launched next: that kernel is not to blame, and no other can run.

        Raises DeviceFault.
        """
        try:
            self._synchronize()
        except RuntimeError as broken:
            reason = failure_text(broken)
            raise DeviceFault(f"the device broke, as the launch of kernel {name} showed: {reason}") from error

    def _replace(self, name: str, error: Exception) -> Kernel:
        """Raises StepFailed where nothing can take over, and DeviceFault where weights are packed for the one that
        failed or ranks would come to disagree: the group that starts again finds the verdict.
        """
        if self._is_recording:
            raise _FailedInRecording(name, error)
        self._check_device(name, error)
        failed = self._found[name]
        reason = f"failed while serving: {failure_text(error)}"
        try:
            kernel, resolution = self._registry.replace(
                failed, reason, self._profile, self._problems[name], self._services, self._choices
            )
        except (KernelChoiceRefused, RuntimeError) as refusal:
            raise StepFailed(f"kernel {name}: {failed.chosen} {reason}, and nothing takes over: {refusal}") from error
        log.warning("kernel %s: %s %s; %s takes over", name, failed.chosen, reason, resolution.chosen)
        self._found[name] = resolution
        if self._num_ranks > 1 or name in PACKED:
            raise DeviceFault(f"kernel {name}: {failed.chosen} {reason}; workers start again without it") from error
        self._on_changed(name)
        return kernel
