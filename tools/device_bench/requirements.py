"""What is asked of Trimaran on one H200: rows with floor, must and aim; and what a figure is worth against them.

The baseline column is vLLM 0.26.0 as measured earlier, on another host unless said; ratios are to vLLM of the same run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEVICE = "H200"
BASELINE_SOURCE = "measured 2026-11-29, host A"


@dataclass(frozen=True)
class Row:
    """`path` leads to the figure below an engine's name. `is_ratio`: must and aim are of ours by the peer's."""

    test: str
    group: str
    path: tuple[str, ...]
    unit: str
    baseline: str
    must: float
    aim: float
    floor: float | None = None
    is_ratio: bool = False

    @property
    def is_rate(self) -> bool:
        """More is better."""
        return self.unit == "tok/s"


def _throughput(shape: str, baseline: str, floor: float, must: float, aim: float) -> Row:
    path = (shape, "throughput", "out_tok_s")
    return Row(f"{shape.upper()} offline 512/256: out tok/s", "offline", path, "tok/s", baseline, must, aim, floor)


def _batch(shape: str, size: int, baseline: float, floor: float, must: float, aim: float) -> Row:
    path = (shape, "batch", str(size), "itl_ms_median")
    return Row(f"{shape.upper()} batch {size}: ITL", "offline", path, "ms", f"{baseline:g}", must, aim, floor)


def _served(shape: str, clients: int, rate: str, ttft: str | None, must: float, aim: float) -> list[Row]:
    group, place = f"http-{shape}", ("loads", str(clients))
    test = f"{shape.upper()} HTTP {clients} clients"
    rows = [Row(f"{test}: out tok/s", group, (*place, "out_tok_s"), "tok/s", rate, must, aim, is_ratio=True)]
    if ttft is not None:
        rows.append(Row(f"{test}: TTFT", group, (*place, "ttft_ms_median"), "ms", ttft, 0.9, 0.6, is_ratio=True))
    return rows


ROWS = (
    _throughput("m1", "30.3-30.9 k", 42.6e3, 34e3, 40e3),
    _throughput("m2", "9.97-10.0 k", 11.5e3, 10.3e3, 11e3),
    _batch("m1", 1, 1.606, 0.51, 0.75, 0.56),
    _batch("m1", 32, 1.979, 0.96, 1.3, 1.05),
    _batch("m1", 256, 4.55, 2.26, 3.0, 2.5),
    _batch("m2", 1, 4.822, 3.62, 4.1, 3.75),
    _batch("m2", 32, 5.391, 4.34, 4.9, 4.45),
    _batch("m2", 256, 10.54, 8.63, 9.6, 8.9),
    Row("M1 batch 1: TTFT of 128", "offline", ("m1", "batch", "1", "ttft_ms_median"), "ms", "9.5", 4, 2.5),
    Row("M2 batch 1: TTFT of 128", "offline", ("m2", "batch", "1", "ttft_ms_median"), "ms", "11.7", 8, 6),
    Row("M2 prompt of 16384: TTFT", "offline", ("m2", "prompt", "16384", "ttft_ms_median"), "ms", "490", 480, 455, 415),
    *_served("m1", 64, "17.6-17.9 k", "49-50", 1.15, 1.4),
    *_served("m1", 256, "27.1-27.8 k", "72-73", 1.15, 1.3),
    *_served("m1", 512, "21.6 k (host B)", "156 (host B)", 1.15, 1.3),
    *_served("m2", 64, "4.95 k (host B, Python)", None, 1.05, 1.15),
    *_served("m2", 256, "6.02 k (host B, Python)", None, 1.05, 1.15),
    Row("M1 start to first token, cold", "startup", ("cold", "first_token_s"), "s", "75.2 (to ready)", 20, 12),
    Row("M1 start to first token, warm", "startup", ("warm", "first_token_s"), "s", "45.4 (to ready)", 10, 6),
)  # fmt: skip


def figure(record: Mapping[str, Any], row: Row, engine: str) -> float | None:
    """An engine's figure in this row, if it was measured."""
    found: Any = record.get(row.group, {}).get("figures", {}).get(engine)
    for name in row.path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


def measure(record: Mapping[str, Any], row: Row) -> float | None:
    """What must and aim are held against: ours, or ours by the peer's."""
    ours, theirs = figure(record, row, "trimaran"), figure(record, row, "vllm")
    if not row.is_ratio or ours is None:
        return ours
    return ours / theirs if theirs else None


def verdict(record: Mapping[str, Any], row: Row) -> str:
    """met aim, met must, missed; or why there is none."""
    if figure(record, row, "trimaran") is None:
        return "not measured"
    if not record[row.group].get("is_comparable", False):
        return "not comparable"
    value = measure(record, row)
    if value is None:
        return "no peer"
    sign = 1 if row.is_rate else -1
    if sign * value >= sign * row.aim:
        return "met aim"
    return "met must" if sign * value >= sign * row.must else "missed"
