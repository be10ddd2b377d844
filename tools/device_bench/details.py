"""All figures of a group in tables: what stands behind the rows that are required."""

from collections.abc import Mapping
from typing import Any

from trimaran.tools.device_bench.table import Table

ENGINES = {"trimaran": "Trimaran", "vllm": "vLLM"}
Figures = Mapping[str, Any]


def tables(group: str, figures: Figures) -> list[Table]:
    if group == "offline":
        return [_offline(figures)]
    if group.startswith("http-"):
        return [_served(figures)]
    return [_starts(figures), *_phases(figures)] if group == "startup" else []


def _offline(figures: Figures) -> Table:
    lines = []
    for shape in ("m1", "m2"):
        for engine, name in ENGINES.items():
            of = figures.get(engine, {}).get(shape, {})
            if "throughput" in of:
                runs = " / ".join(f"{rate:.0f}" for rate in of["throughput"]["runs"])
                lines.append([f"{shape} all requests", name, runs, "", "", "", ""])
            tests = [(f"batch {size}", times) for size, times in of.get("batch", {}).items()]
            tests += [(f"prompt of {length}", times) for length, times in of.get("prompt", {}).items()]
            lines += [[f"{shape} {test}", name, "", *_times(times)] for test, times in tests]
    columns = ("test", "engine", "out tok/s", "ITL median, ms", "p99", "TTFT median, ms", "max")
    return Table("Each run of all requests; batches and prompts over all repetitions.", columns, lines)


def _times(times: Figures) -> list[str]:
    return [_number(times.get(f"{name}_ms_{of}")) for name, of in _MEASURED]


_MEASURED = (("itl", "median"), ("itl", "p99"), ("ttft", "median"), ("ttft", "max"))


def _served(figures: Figures) -> Table:
    names = ("out_tok_s", "ttft_ms_median", "itl_ms_median", "tpot_ms_median", "ttft_ms_p99", "itl_ms_p99")
    lines = [
        [clients, shown, *(" / ".join(_number(run.get(name)) for run in load["runs"]) for name in names)]
        for engine, shown in ENGINES.items()
        for clients, load in figures.get(engine, {}).get("loads", {}).items()
    ]
    lines += [
        [clients, "ratio", *(_number(ratio.get(name)) for name in names)]
        for clients, ratio in figures.get("ratio", {}).items()
    ]
    lines.sort(key=lambda line: int(line[0]))
    columns = ("clients", "engine", "out tok/s", "TTFT median, ms", "ITL median", "TPOT median", "TTFT p99", "ITL p99")
    return Table("Each run; ratios are of medians, Trimaran by vLLM.", columns, lines)


def _starts(figures: Figures) -> Table:
    lines = [
        [
            name,
            kind,
            *(" / ".join(f"{start[time]:g}" for start in of["starts"]) for time in ("ready_s", "first_token_s")),
        ]
        for engine, name in ENGINES.items()
        for kind, of in figures.get(engine, {}).items()
    ]
    return Table("Each start.", ("engine", "caches", "ready, s", "first token, s"), lines)


def _phases(figures: Figures) -> list[Table]:
    """Of the first start of each kind; the engine tells them of its own start, and some run side by side."""
    found = []
    for kind, of in figures.get("trimaran", {}).items():
        phases = of["starts"][0].get("phases", [])
        lines = [[f"{phase['began_s']:g}", f"{phase['took_s']:g}", phase["phase"]] for phase in phases]
        found.append(Table(f"Phases of Trimaran's first {kind} start.", ("began, s", "took, s", "phase"), lines))
    return found


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
