"""Turns outcomes into the figures people compare, under the names that `vllm bench serve` writes."""

import statistics
from typing import Any

from .stream_client import Outcome

PERCENTILES = (50, 90, 99)


def summarize(outcomes: list[Outcome], duration_s: float, about: dict[str, Any]) -> dict[str, Any]:
    """The JSON report: `about` (date, model, settings) first, then counts, throughputs and latencies in ms."""
    good = [outcome for outcome in outcomes if outcome.success]
    total_input = sum(outcome.prompt_tokens for outcome in good)
    total_output = sum(outcome.output_tokens for outcome in good)
    report: dict[str, Any] = {
        **about,
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / duration_s,
        "output_throughput": total_output / duration_s,
        "total_token_throughput": (total_input + total_output) / duration_s,
    }
    tpots = [
        (outcome.latency_s - outcome.ttft_s) / (outcome.output_tokens - 1)
        for outcome in good
        if outcome.output_tokens > 1
    ]
    report |= _latencies("ttft", [outcome.ttft_s for outcome in good])
    report |= _latencies("tpot", tpots)
    report |= _latencies("itl", [gap for outcome in good for gap in outcome.itls_s])
    report |= _latencies("e2el", [outcome.latency_s for outcome in good])
    report["errors"] = sorted({outcome.error for outcome in outcomes if outcome.error})[:20]
    return report


def _latencies(name: str, seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ms = sorted(value * 1e3 for value in seconds)
    figures = {
        f"mean_{name}_ms": statistics.fmean(ms),
        f"median_{name}_ms": statistics.median(ms),
        f"std_{name}_ms": statistics.pstdev(ms),
    }
    return figures | {f"p{point}_{name}_ms": _percentile(ms, point) for point in PERCENTILES}


def _percentile(ordered: list[float], point: float) -> float:
    place = (len(ordered) - 1) * point / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (without the first)",
    "itl": "Inter-token latency",
    "e2el": "End to end",
}


def table(report: dict[str, Any]) -> str:
    """The report for a terminal."""
    lines = [
        f"{'Completed / failed requests':<44}{report['completed']} / {report['failed']}",
        f"{'Duration (s)':<44}{report['duration']:.2f}",
        f"{'Requests per second':<44}{report['request_throughput']:.2f}",
        f"{'Output tokens per second':<44}{report['output_throughput']:.1f}",
        f"{'All tokens per second':<44}{report['total_token_throughput']:.1f}",
        "",
        f"{'Latency (ms)':<44}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
    ]
    for name, title in TITLES.items():
        if f"mean_{name}_ms" in report:
            values = [report[f"mean_{name}_ms"], *(report[f"p{point}_{name}_ms"] for point in PERCENTILES)]
            lines.append(f"{title:<44}" + "".join(f"{value:>10.2f}" for value in values))
    lines += ["", *(f"error: {error}" for error in report["errors"])]
    return "\n".join(lines).rstrip()
