"""The page of a record: the table of requirements, and what stands behind it. And its few lines for a terminal."""

from collections.abc import Mapping
from typing import Any

from trimaran.tools.device_bench import details, requirements
from trimaran.tools.device_bench.requirements import ROWS, Row, figure, measure, verdict
from trimaran.tools.device_bench.table import Table

_COLUMNS = ("test", "vLLM 0.26", "vLLM same run", "floor", "must", "aim", "Trimaran", "verdict")
_INTRODUCTION = f"""# Speed on one device

Made by `python tools/bench_device.py render` from the record beside it; do not edit. M1 has the shape of Qwen3-0.6B,
M2 that of Llama-3.1-8B; weights are random, bfloat16; prefix caching is off. *vLLM 0.26* is the reference that must and
aim were chosen by, {requirements.BASELINE_SOURCE} unless said; *vLLM same run* was measured beside Trimaran, on one
machine. The floor is what matrix products and memory traffic alone take. With `x`: Trimaran by vLLM of the same run.
"""


def render(record: Mapping[str, Any]) -> str:
    required = Table("## Required", _COLUMNS, [_cells(record, row) for row in ROWS])
    parts = [_INTRODUCTION, required.markdown()]
    for group, entry in sorted(record.items()):
        parts.append(f"## {group}\n\n{_provenance(entry)}\n")
        parts += [table.markdown() for table in details.tables(group, entry["figures"])]
    return "\n".join(parts)


def summary(record: Mapping[str, Any], group: str) -> str:
    """This group's requirements and figures."""
    lines = [
        [row.test, row.baseline, *_compared(record, row), *_bounds(row), verdict(record, row)]
        for row in ROWS
        if row.group == group
    ]
    columns = ("test", "vLLM 0.26", "vLLM now", "Trimaran", "must", "aim", "verdict")
    required = Table(f"{group}:", columns, lines)
    return "\n".join(table.plain() for table in [*details.tables(group, record[group]["figures"]), required])


def _cells(record: Mapping[str, Any], row: Row) -> list[str]:
    theirs, ours = _compared(record, row)
    test = row.test if row.is_rate else f"{row.test}, {row.unit}"
    return [test, row.baseline, theirs, _shown(row.floor), *_bounds(row), ours, verdict(record, row)]


def _compared(record: Mapping[str, Any], row: Row) -> list[str]:
    """The peer's figure and ours."""
    ratio = measure(record, row) if row.is_ratio else None
    beside = "" if ratio is None else f" (x {ratio:.2f})"
    return [_shown(figure(record, row, "vllm")), _shown(figure(record, row, "trimaran")) + beside]


def _bounds(row: Row) -> list[str]:
    if row.is_ratio:
        return [f"x {row.must:g}", f"x {row.aim:g}"]
    return [_shown(row.must), _shown(row.aim)]


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1e3:.3g} k" if value >= 1e3 else f"{value:.3g}"


def _provenance(entry: Mapping[str, Any]) -> str:
    host = entry["host"]
    machine = [*(host.get("gpus") or ["no GPU"]), host.get("cpu", "unknown processor"), f"{host['cores']} cores"]
    versions = [f"{name} {version}" for name, version in entry["versions"].items() if version]
    lines = [f"{entry['date']}; {', '.join(machine)}; {', '.join(versions)}.", f"`{entry['command']}`"]
    lines += [f"Note: {note}." for note in entry["notes"]]
    lines += [f"Failed: {failure}" for failure in entry["failed"]]
    return "\n\n".join(lines)
