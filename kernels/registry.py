"""Chooses an implementation for each kernel and says why not the others. Torch-free until an implementation loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from ..ipc.conditions import Refusal
from ..ipc.facts import DeviceProfile, Feature, Problem, Resolution
from .implementation import Implementation, Kernel, Services


class Memory(Protocol):
    """What earlier starts found out about implementations on this device, and what this one finds."""

    def known_failure(self, implementation: Implementation, profile: DeviceProfile, problem: Problem) -> str | None:
        """Why not to load it again; None when nothing is held against it."""
        ...

    def known_failures(self, implementation: Implementation, profile: DeviceProfile) -> tuple[str, ...]:
        """The same for any problem on this device."""
        ...

    def begin(self, implementation: Implementation, profile: DeviceProfile, problem: Problem) -> None:
        """It is about to be loaded and run: should the process die of that, the next one shall know."""
        ...

    def interrupt(self) -> None:
        """The process ends because it was told to: nothing is held against what it was loading."""
        ...

    def failed(
        self, implementation: Implementation, profile: DeviceProfile, problem: Problem, error: Exception | str
    ) -> None: ...

    def has_agreed(self, implementation: Implementation, profile: DeviceProfile, problem: Problem) -> bool:
        """An earlier start found nothing against it: it will not be tried again."""
        ...

    def together(self, profile: DeviceProfile) -> AbstractContextManager[bool]:
        """For work on many implementations at once. Should the process die of that, none is blamed, and the next one
        shall go without: False then.
        """
        ...


Verify = Callable[[Implementation, Kernel, DeviceProfile, Problem, Services], str | None]


class KernelChoiceRefused(Refusal):
    """What the user asked of the registry cannot be: unknown name, pin that does not fit, everything forbidden."""


@dataclass(frozen=True)
class KernelChoices:
    """What the user pinned (kernel -> implementation) and forbade (implementation names)."""

    pins: Mapping[str, str]
    forbidden: frozenset[str]

    @staticmethod
    def from_options(pins: Iterable[str] = (), forbidden: Iterable[str] = ()) -> KernelChoices:
        """`pins` as typed: "paged_attention=NAME". Raises KernelChoiceRefused for another form or for two pins of a
        kernel.
        """
        parsed: dict[str, str] = {}
        for pin in pins:
            kernel, separator, name = pin.partition("=")
            if not separator or not kernel or not name:
                raise KernelChoiceRefused(f"--kernel {pin}: write it as KERNEL=IMPLEMENTATION")
            if parsed.get(kernel, name) != name:
                raise KernelChoiceRefused(f"--kernel {kernel} is pinned twice: {parsed[kernel]} and {name}; keep one")
            parsed[kernel] = name
        return KernelChoices(parsed, frozenset(forbidden))


NO_CHOICES = KernelChoices({}, frozenset())


def prohibition(implementation: Implementation, choices: KernelChoices) -> str | None:
    """Why the user's choices forbid it; None when they do not."""
    if implementation.name in choices.forbidden:
        return "forbidden by --without-kernel"
    parts = sorted(implementation.metadata.uses & choices.forbidden)
    return f"made with {parts[0]}, which is forbidden by --without-kernel" if parts else None


class Registry:
    """Chains of implementations by kernel, in order of preference; the last link of each is plain PyTorch."""

    def __init__(
        self, catalog: Sequence[Implementation], verify: Verify | None = None, memory: Memory | None = None
    ) -> None:
        self._chains: dict[str, list[Implementation]] = {}
        self._verify = verify
        self._memory = memory
        for implementation in catalog:
            self._chains.setdefault(implementation.kernel, []).append(implementation)

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(self._chains)

    def chain(self, kernel: str) -> Sequence[Implementation]:
        return self._chains[kernel]

    def known_failures(self, implementation: Implementation, profile: DeviceProfile) -> tuple[str, ...]:
        """Why earlier starts demoted it on this device."""
        return () if self._memory is None else self._memory.known_failures(implementation, profile)

    def interrupt(self) -> None:
        """See Memory.interrupt; from any thread."""
        if self._memory is not None:
            self._memory.interrupt()

    def check(self, choices: KernelChoices) -> None:
        """Raise KernelChoiceRefused when a pin or a forbid names something that does not exist."""
        for kernel, name in choices.pins.items():
            if kernel not in self._chains:
                raise KernelChoiceRefused(
                    f"--kernel {kernel}={name}: no such kernel; there are {', '.join(self._chains)}"
                )
            names = [implementation.name for implementation in self._chains[kernel]]
            if name not in names:
                raise KernelChoiceRefused(
                    f"--kernel {kernel}={name}: no such implementation; there are {', '.join(names)}"
                )
        known = {implementation.name for chain in self._chains.values() for implementation in chain}
        for name in sorted(choices.forbidden - known):
            raise KernelChoiceRefused(
                f"--without-kernel {name}: no such implementation; there are {', '.join(sorted(known))}"
            )

    def order(self, kernel: str, problem: Problem) -> Sequence[Implementation]:
        """The chain as this problem sees it: of those that follow a strategy, the ones of the strategy asked for go
        first. Those that name none keep their places: another package's at the head, plain PyTorch at the end.
        """
        asked, chain = problem.attention_strategy, self._chains[kernel]
        if asked is None:
            return chain
        following = (candidate for candidate in chain if candidate.metadata.strategy is not None)
        ordered = iter(sorted(following, key=lambda candidate: candidate.metadata.strategy is not asked))
        return [candidate if candidate.metadata.strategy is None else next(ordered) for candidate in chain]

    def resolve(
        self, kernel: str, profile: DeviceProfile, problem: Problem, choices: KernelChoices = NO_CHOICES
    ) -> Resolution:
        """The first implementation that fits, with the reasons of those before it. Raises KernelChoiceRefused."""
        self.check(choices)
        implementation, resolution = self._choose(kernel, profile, problem, choices, {})
        assert implementation.name == resolution.chosen
        return resolution

    def together(self, profile: DeviceProfile) -> AbstractContextManager[bool]:
        """See Memory.together."""
        return nullcontext(True) if self._memory is None else self._memory.together(profile)

    def to_prepare(
        self, kernels: Iterable[str], profile: DeviceProfile, problem: Problem, choices: KernelChoices = NO_CHOICES
    ) -> list[Implementation]:
        """Of these kernels' first choices, those that `load` will try with code that is compiled while it runs."""
        found = []
        for kernel in kernels:
            implementation = self._first(kernel, profile, problem, choices)
            if implementation is None or Feature.TRITON not in implementation.metadata.features:
                continue
            if self._memory is None or not self._memory.has_agreed(implementation, profile, problem):
                found.append(implementation)
        return found

    def load(
        self,
        kernel: str,
        profile: DeviceProfile,
        problem: Problem,
        services: Services,
        choices: KernelChoices = NO_CHOICES,
    ) -> tuple[Kernel, Resolution]:
        """Load the choice; one that raises or disagrees with the reference is demoted and the next takes over.

        Raises KernelChoiceRefused when a pinned one fails, RuntimeError when the whole chain did.
        """
        self.check(choices)
        return self._load(kernel, profile, problem, services, choices, {})

    def replace(
        self,
        resolution: Resolution,
        reason: str,
        profile: DeviceProfile,
        problem: Problem,
        services: Services,
        choices: KernelChoices = NO_CHOICES,
    ) -> tuple[Kernel, Resolution]:
        """The next link for a kernel whose chosen one failed while serving; it stays demoted. Raises as `load`."""
        if resolution.pinned:
            raise KernelChoiceRefused(
                f"--kernel {resolution.kernel}={resolution.chosen} failed: {reason}; drop the pin"
            )
        failed = next(found for found in self._chains[resolution.kernel] if found.name == resolution.chosen)
        if self._memory is not None:
            self._memory.failed(failed, profile, problem, reason)
        demoted = {**resolution.demoted, resolution.chosen: reason}
        return self._load(resolution.kernel, profile, problem, services, choices, demoted)

    def _load(
        self,
        kernel: str,
        profile: DeviceProfile,
        problem: Problem,
        services: Services,
        choices: KernelChoices,
        demoted: dict[str, str],
    ) -> tuple[Kernel, Resolution]:
        while True:
            implementation, resolution = self._choose(kernel, profile, problem, choices, demoted)
            loaded, failure = self._try(implementation, profile, problem, services)
            if loaded is not None:
                return loaded, resolution
            if resolution.pinned:
                raise KernelChoiceRefused(f"--kernel {kernel}={implementation.name} failed: {failure}; drop the pin")
            demoted[implementation.name] = failure

    def _try(
        self, implementation: Implementation, profile: DeviceProfile, problem: Problem, services: Services
    ) -> tuple[Kernel | None, str]:
        if self._memory is not None:
            known = self._memory.known_failure(implementation, profile, problem)
            if known is not None:
                return None, known
            self._memory.begin(implementation, profile, problem)
        try:
            loaded = implementation.load(profile, problem, services)
            failure = self._verify(implementation, loaded, profile, problem, services) if self._verify else None
        except Exception as error:  # any failure of vendor code or of a compiler means: take the next one
            if self._memory is not None:
                self._memory.failed(implementation, profile, problem, error)
            return None, failure_text(error)
        return (loaded, "") if failure is None else (None, failure)

    def _first(
        self, kernel: str, profile: DeviceProfile, problem: Problem, choices: KernelChoices
    ) -> Implementation | None:
        """The choice, by all that is known; None where nothing is left, which `load` will say."""
        demoted: dict[str, str] = {}
        while True:
            try:
                implementation, _ = self._choose(kernel, profile, problem, choices, demoted)
            except (KernelChoiceRefused, RuntimeError):
                return None
            known = self._memory and self._memory.known_failure(implementation, profile, problem)
            if not known:
                return implementation
            demoted[implementation.name] = known

    def _choose(
        self,
        kernel: str,
        profile: DeviceProfile,
        problem: Problem,
        choices: KernelChoices,
        demoted: Mapping[str, str],
    ) -> tuple[Implementation, Resolution]:
        pin = choices.pins.get(kernel)
        rejected: dict[str, str] = {}
        for candidate in self.order(kernel, problem):
            if candidate.name in demoted:
                continue
            reason = _rejection(candidate, profile, problem, choices, pin)
            if reason is None:
                resolution = Resolution(
                    kernel=kernel,
                    chosen=candidate.name,
                    rejected=rejected,
                    demoted=dict(demoted),
                    pinned=pin is not None,
                )
                return candidate, resolution
            if candidate.name == pin:
                raise KernelChoiceRefused(
                    f"--kernel {kernel}={pin} does not fit: {reason}; drop the pin or take another"
                )
            rejected[candidate.name] = reason
        raise _exhausted(problem, kernel, rejected, demoted, choices)


def failure_text(error: Exception) -> str:
    """One line: compilers write pages."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:500]


def _rejection(
    candidate: Implementation, profile: DeviceProfile, problem: Problem, choices: KernelChoices, pin: str | None
) -> str | None:
    forbidden = prohibition(candidate, choices)
    if forbidden is not None:
        return forbidden
    if pin is not None and candidate.name != pin:
        return f"{pin} is pinned"
    try:
        return candidate.misfit(profile, problem)
    except Exception as error:  # another package's match may raise anything: it is passed over
        return f"its match failed: {failure_text(error)}"


def _exhausted(
    problem: Problem, kernel: str, rejected: Mapping[str, str], demoted: Mapping[str, str], choices: KernelChoices
) -> Exception:
    story = "; ".join(f"{name}: {reason}" for name, reason in {**rejected, **demoted}.items())
    if choices.forbidden & set(rejected):
        return KernelChoiceRefused(f"no implementation of {kernel} is left ({story}); allow one again")
    if problem.batch_invariant:
        return KernelChoiceRefused(
            f"--batch-invariant: no implementation of {kernel} gives the same alone and in a batch here ({story}); "
            "leave it out"
        )
    return RuntimeError(f"no implementation of {kernel} works here ({story})")
