"""Whether the engine can make a token now, and if not, why and how long it has been so."""

from msgspec import Struct

from ...ipc.facts import Phase


class Readiness(Struct, frozen=True, kw_only=True):
    """`reason` is for a user. `phase` and `elapsed_s` are set while the engine starts."""

    ready: bool
    reason: str = ""
    phase: Phase | None = None
    elapsed_s: float | None = None
    retry_after_s: float = 1.0

    @property
    def text(self) -> str:
        """One sentence for an error message."""
        if self.phase is None:
            return f"the engine is not ready: {self.reason}"
        detail = f" ({self.phase.detail})" if self.phase.detail else ""
        return f"the engine is starting: {self.phase.name}{detail}, {self.elapsed_s or 0.0:.1f} s since it began"
