"""Sums what the frontends report, so that any of them can answer for all, also for those that have died."""

from ..ipc.frontend_messages import Report
from ..ipc.metrics import MetricFamily, MetricKind, Sample


class MetricTotals:
    """The latest report of each frontend life. Dead lives' counters stay, as counters never fall; gauges go."""

    def __init__(self) -> None:
        self._reports: dict[tuple[int, int], tuple[MetricFamily, ...]] = {}

    def report(self, report: Report) -> None:
        """A frontend's metrics, cumulative since its start."""
        self._reports[report.index, report.incarnation] = report.families

    def families(self) -> list[MetricFamily]:
        """The sum over all frontend lives, by metric and labels."""
        heads: dict[str, MetricFamily] = {}
        sums: dict[str, dict[tuple[tuple[str, str], ...], Sample]] = {}
        newest = dict(sorted(self._reports))
        for (index, incarnation), families in self._reports.items():
            for family in families:
                if family.kind is MetricKind.GAUGE and incarnation != newest[index]:
                    continue
                heads[family.name] = family
                by_labels = sums.setdefault(family.name, {})
                for sample in family.samples:
                    key = tuple(sorted(sample.labels.items()))
                    by_labels[key] = _add(by_labels.get(key), sample)
        return [
            MetricFamily(name, head.kind, head.help, tuple(sums[name].values()), head.bounds)
            for name, head in heads.items()
        ]


def _add(total: Sample | None, sample: Sample) -> Sample:
    if total is None:
        return sample
    counts = tuple(a + b for a, b in zip(total.bucket_counts, sample.bucket_counts, strict=True))
    return Sample(sample.labels, total.value + sample.value, counts)
