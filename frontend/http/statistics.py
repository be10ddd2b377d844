"""This frontend's own counts, pushed to the engine core, which adds them up over all frontends."""

import asyncio
from collections import Counter

from ...ipc.metrics import MetricFamily, MetricKind, Sample


class Statistics:
    """Cumulative since the process began. Never raises into a request."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._num_disconnects = 0
        self._num_slow_readers = 0
        self._num_open = 0
        self.changed = asyncio.Event()

    def opened(self) -> None:
        """A request came."""
        self._num_open += 1
        self.changed.set()

    def closed(self, method: str, route: str, status: int) -> None:
        """A request was answered; status 0: the client left before its status was sent."""
        self._num_open -= 1
        self._requests[method, route, status] += 1
        self.changed.set()

    def client_left(self) -> None:
        """A client went while its tokens were made."""
        self._num_disconnects += 1

    def reader_cut(self) -> None:
        """A stream was ended because its client did not read."""
        self._num_slow_readers += 1

    def families(self) -> tuple[MetricFamily, ...]:
        """As they travel."""
        requests = tuple(
            Sample({"method": method, "route": route, "status": str(status)}, float(count))
            for (method, route, status), count in sorted(self._requests.items())
        )
        return (
            MetricFamily("http_requests_total", MetricKind.COUNTER, "HTTP requests answered.", requests),
            MetricFamily("http_requests_open", MetricKind.GAUGE, "HTTP requests being answered.", _one(self._num_open)),
            MetricFamily(
                "http_disconnects_total",
                MetricKind.COUNTER,
                "Clients that left before their answer was complete.",
                _one(self._num_disconnects),
            ),
            MetricFamily(
                "http_slow_readers_total",
                MetricKind.COUNTER,
                "Streams ended because their client did not read.",
                _one(self._num_slow_readers),
            ),
        )


def _one(value: int) -> tuple[Sample, ...]:
    return (Sample({}, float(value)),)
