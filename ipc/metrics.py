"""Metrics as they travel: the core owns the totals, frontends push theirs to it, any frontend renders them."""

from enum import StrEnum

from msgspec import Struct


class MetricKind(StrEnum):
    """The Prometheus types in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Sample(Struct, frozen=True, array_like=True, gc=False):
    """One labelled value; a histogram has its bucket counts (not cumulative, one more than bounds) and sum instead."""

    labels: dict[str, str]
    value: float = 0.0
    bucket_counts: tuple[int, ...] = ()


class MetricFamily(Struct, frozen=True, array_like=True, gc=False):
    """One metric without its `trimaran:` prefix. `bounds` are a histogram's upper bounds, infinity left out."""

    name: str
    kind: MetricKind
    help: str
    samples: tuple[Sample, ...]
    bounds: tuple[float, ...] = ()
