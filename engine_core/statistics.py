"""The engine's totals: counters, gauges and latency histograms, observed per step with numpy."""

from bisect import bisect_left
from typing import Any

import numpy as np

from ..ipc.frontend_messages import FinishReason
from ..ipc.metrics import MetricFamily, MetricKind, Sample

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
_REASONS = {
    FinishReason.END_TOKEN: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
    FinishReason.POOLED: "pooled",
}

STEP_PARTS = ("build", "forward", "sample", "copy")  # StepResult.seconds

Array = np.ndarray[Any, Any]


class Histogram:
    """Counts per bucket. `bounds` are upper bounds, inclusive."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._edges = np.array(bounds, np.float64)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """One value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def observe_many(self, values: Array) -> None:
        """Many values at once, float64."""
        if len(values) == 1:
            self.observe(float(values[0]))
        elif len(values):
            self._counts += np.bincount(self._edges.searchsorted(values), minlength=len(self._counts))
            self._sum += float(values.sum())

    def sample(self) -> Sample:
        """The histogram as it travels."""
        return Sample({}, self._sum, tuple(self._counts.tolist()))


class Statistics:
    """What the core counts. Gauges are read from the engine when the families are made."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_cached_tokens = 0
        self.num_steps = 0
        self.num_failed = 0
        self.num_rejected = 0
        self.num_generations = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        self.step_seconds = np.zeros(len(STEP_PARTS), np.float64)
        self.time_to_first_token = Histogram(_SECONDS)
        self.inter_token_latency = Histogram(_SECONDS)
        self.request_latency = Histogram(_SECONDS)
        self.queue_time = Histogram(_SECONDS)
        self.step_time = Histogram(_SECONDS)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)

    def families(
        self, gauges: dict[str, tuple[float, str]], counters: dict[str, tuple[float, str]]
    ) -> list[MetricFamily]:
        """Everything as metric families. `gauges` and `counters` add what the engine holds itself: value and help."""
        counted = {
            "prompt_tokens_total": (self.num_prompt_tokens, "Prompt tokens of requests that produced a first token"),
            "generation_tokens_total": (self.num_generation_tokens, "Tokens sampled and kept"),
            "prompt_tokens_cached_total": (self.num_cached_tokens, "Prompt tokens taken from the prefix cache"),
            "engine_steps_total": (self.num_steps, "Steps returned"),
            "request_failure_total": (self.num_failed, "Accepted requests that could not be finished"),
            "request_rejected_total": (self.num_rejected, "Requests turned away by the engine core"),
            **counters,
        }
        families = [
            MetricFamily(name, MetricKind.COUNTER, text, (Sample({}, float(value)),))
            for name, (value, text) in counted.items()
        ]
        families += [
            MetricFamily(name, MetricKind.GAUGE, text, (Sample({}, float(value)),))
            for name, (value, text) in gauges.items()
        ]
        reasons: dict[str, int] = {}
        for reason, count in self.finished.items():
            if reason in _REASONS:
                reasons[_REASONS[reason]] = reasons.get(_REASONS[reason], 0) + count
        families.append(
            MetricFamily(
                "request_success_total",
                MetricKind.COUNTER,
                "Sequences finished, by reason",
                tuple(Sample({"finished_reason": reason}, float(count)) for reason, count in reasons.items()),
            )
        )
        families.append(
            MetricFamily(
                "worker_step_seconds_total",
                MetricKind.COUNTER,
                "Time that rank 0 spent in steps, by part; the rest of the time it waited",
                tuple(
                    Sample({"part": part}, float(seconds))
                    for part, seconds in zip(STEP_PARTS, self.step_seconds, strict=True)
                ),
            )
        )
        for name, histogram, text in self._histograms():
            families.append(MetricFamily(name, MetricKind.HISTOGRAM, text, (histogram.sample(),), histogram.bounds))
        return families

    def _histograms(self) -> list[tuple[str, Histogram, str]]:
        return [
            ("time_to_first_token_seconds", self.time_to_first_token, "From arrival to the first token"),
            ("inter_token_latency_seconds", self.inter_token_latency, "Between two tokens of one sequence"),
            ("e2e_request_latency_seconds", self.request_latency, "From arrival to the end of the request"),
            ("request_queue_time_seconds", self.queue_time, "From arrival to the first step that computes it"),
            ("engine_step_time_seconds", self.step_time, "From plan to result of one step"),
            ("request_prompt_tokens", self.prompt_tokens, "Prompt lengths"),
            ("request_generation_tokens", self.generation_tokens, "Output lengths of finished sequences"),
        ]
