"""What a list of measured times comes to. One definition for both engines and every test."""

import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share lies; no interpolation, as the baseline was taken."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def median(values: Sequence[float]) -> float:
    """Of a few runs: the middle one, or the mean of the two in the middle."""
    return float(statistics.median(values))


def in_ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
