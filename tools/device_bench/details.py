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
    if group == "startup":
        return [_starts(figures), *_phases(figures)]
    return _profiles(figures.get("trimaran", {})) if group == "profile" else []


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


_KINDS = ("linear", "attention", "rotary", "norm", "activation", "sampling", "copy", "other")


def _profiles(found: Figures) -> list[Table]:
    shapes = [shape for shape in ("m1", "m2") if shape in found]
    decodes = [(f"{shape} {name}", case) for shape in shapes for name, case in found[shape]["decodes"].items()]
    prompts = [(f"{shape} {name}", case) for shape in shapes for name, case in found[shape]["prompts"].items()]
    ceilings = found.get("ceilings", {})
    copy, matrix = (_number(ceilings.get(name)) for name in ("copy_gb_s", "matrix_tflop_s"))
    kinds = {kind: f"kinds.{kind}" for kind in _KINDS}
    return [
        _cells(
            "Decodes, sequences x cached positions: ms a step; parts on the host (build with the copy to the device, "
            "launch, sample), then waiting for the device.",
            {
                **{part: f"{part}_ms" for part in ("step", "build", "launch", "sample", "wait")},
                "device idle": "idle_share",
            },
            decodes,
        ),
        _cells(
            "Device us a step by kind of kernel; what starts before the kernel ahead has ended counts in full. GB/s of "
            f"weights and of keys and values, counted once; a copy was measured at {copy}.",
            kinds | {"linear GB/s": "linear_gb_s", "attention GB/s": "attention_gb_s"},
            decodes,
        ),
        _cells(
            "Parts of prompts, tokens behind cached positions: ms, then device us by kind of kernel. TFLOP/s; a large "
            f"product was measured at {matrix}.",
            {"ms": "ms"} | kinds | {"linear TFLOP/s": "linear_tflop_s", "attention TFLOP/s": "attention_tflop_s"},
            prompts,
        ),
        _cells(
            "The core: ms of its own time a step, by running sequences.",
            {name: f"{name}_ms" for name in ("plan", "pack", "commit", "output", "total")},
            list(found.get("core", {}).items()),
        ),
        _cells(
            "Streams of the small model: ms between tokens, device and core of it.",
            {
                "between tokens": "itl_ms",
                "device": "device_ms",
                "device idle": "idle_share",
                "build": "build_ms",
                "core": "core_ms",
            },
            list(found.get("seen", {}).items()),
        ),
    ]


def _cells(title: str, columns: Mapping[str, str], cases: list[tuple[str, Figures]]) -> Table:
    """A line for each case; a dot in a column's place leads to a figure within one."""
    lines = [[name, *(_number(_placed(case, place)) for place in columns.values())] for name, case in cases]
    return Table(title, ("case", *columns), lines)


def _placed(case: Figures, place: str) -> float | None:
    outer, _, inner = place.rpartition(".")
    found: float | None = (case.get(outer, {}) if outer else case).get(inner)
    return found


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
