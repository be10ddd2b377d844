"""Metric families as Prometheus text."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ...ipc.metrics import MetricFamily, MetricKind, Sample

_PREFIX = "trimaran:"


class _Families(Collector):
    def __init__(self, families: Sequence[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return map(_metric, self._families)


def render(families: Sequence[MetricFamily]) -> bytes:
    """The text exposition format, every name with our prefix."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


def _metric(family: MetricFamily) -> Metric:
    labels = list(family.samples[0].labels) if family.samples else []
    name = _PREFIX + family.name
    match family.kind:
        case MetricKind.COUNTER:
            counter = CounterMetricFamily(name, family.help, labels=labels)
            for sample in family.samples:
                counter.add_metric(list(sample.labels.values()), sample.value)
            return counter
        case MetricKind.GAUGE:
            gauge = GaugeMetricFamily(name, family.help, labels=labels)
            for sample in family.samples:
                gauge.add_metric(list(sample.labels.values()), sample.value)
            return gauge
        case MetricKind.HISTOGRAM:
            histogram = HistogramMetricFamily(name, family.help, labels=labels)
            for sample in family.samples:
                histogram.add_metric(list(sample.labels.values()), _cumulative(family, sample), sample.value)
            return histogram


def _cumulative(family: MetricFamily, sample: Sample) -> list[tuple[str, float]]:
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip([*map(_bound, family.bounds), "+Inf"], sample.bucket_counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets


def _bound(bound: float) -> str:
    return repr(float(bound))
