"""How often, and after what pause, a part that died is started again."""

import time

STEADY_S = 60.0  # a part that lived so long did not die of its start
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0


class Restarts:
    """Counts the deaths in a row of one part; the pause doubles with each."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_deaths = 0
        self._started_s = time.monotonic()

    def started(self) -> None:
        """The part was started now."""
        self._started_s = time.monotonic()

    def died(self) -> float | None:
        """The pause before the next start, in seconds; None when there shall be none."""
        if time.monotonic() - self._started_s > STEADY_S:
            self.num_deaths = 0
        self.num_deaths += 1
        if self.num_deaths > self.limit:
            return None
        return min(FIRST_PAUSE_S * 2.0 ** (self.num_deaths - 1), LONGEST_PAUSE_S)
