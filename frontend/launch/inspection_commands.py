"""`trimaran probe | doctor | kernels | diagnose`: what the worker process saw, as tables or as JSON."""

import asyncio
from collections.abc import Sequence

import msgspec

from ...ipc.conditions import Refusal, TrimaranError, part_cure
from ...ipc.configuration import Task
from ...ipc.control import FromChild
from ...ipc.facts import DeviceProfile
from ...ipc.inspection import ImplementationSeen, Inspected, Level, PlatformSeen, Verdict
from .ending import EXIT_REFUSED, guarded, say
from .explain import ask_how_it_is_served
from .inspections import Inspection, inspection_options, split_json
from .options import Options, inherited_environment, read_options
from .tables import Table, print_json, print_tables

_GIB = 1 << 30
EXIT_OF = {Level.PASS: 0, Level.WARN: 1, Level.FAIL: 2}

PROBE_HELP = """usage: trimaran probe [--json] [OPTIONS OF serve, without a model]

Lists every platform in the order of detection with its reason, and each device's profile: what is declared, detected
or measured of it.
"""
DOCTOR_HELP = """usage: trimaran doctor [MODEL] [--json] [OPTIONS OF serve]

Judges this machine before serving: Python, libraries, compiler, drivers, device nodes, shared memory, limits, each
kernel compiled, run and compared, and whether MODEL fits. Every finding ends with its cure.
Exit status: 0 all is well, 1 warnings, 2 it cannot serve as asked.
"""
KERNELS_HELP = """usage: trimaran kernels list | matrix | check [NAME ...] [--json] [OPTIONS OF serve, without a model]

list      every implementation in order of preference, and why those that do not fit this machine's device do not;
          with names, only those kernels and implementations
matrix    what would serve each kernel on each device that has a packaged capability file
check     each implementation that fits, or of the kernels and implementations named, compiled, run and compared
          with the reference; exit status 1 if one fails
"""


def _told(options: Options, task: Task, tests: tuple[str, ...] = ()) -> list[FromChild]:
    messages: list[FromChild] = []
    asyncio.run(Inspection(options, task, messages.append, tests=tests, on_line=say).run())
    return [message for message in messages if not isinstance(message, Inspected)]


# probe


def probe(arguments: Sequence[str]) -> int:
    """0 when a platform can be used, 1 when none can."""
    if "--help" in arguments or "-h" in arguments:
        print(PROBE_HELP)
        return 0

    def body() -> int:
        as_json, words = split_json(arguments)
        seen = [found for found in _told(inspection_options(words), Task.PROBE) if isinstance(found, PlatformSeen)]
        if as_json:
            print_json([_platform_json(found) for found in seen])
        else:
            print_tables(probe_tables(seen))
        return 0 if any(found.is_chosen for found in seen) else 1

    return guarded("probe", body)


def _platform_json(seen: PlatformSeen) -> dict[str, object]:
    return {
        "platform": seen.name,
        "chosen": seen.is_chosen,
        "refused": seen.refused,
        "devices": seen.devices,
        "notes": seen.notes,
    }


def probe_tables(seen: Sequence[PlatformSeen]) -> list[Table]:
    platforms = Table("Platforms, in order of detection", ("platform", "state", "why"))
    for found in seen:
        state = "chosen" if found.is_chosen else "refused" if found.refused is not None else "usable"
        notes = [found.refused] if found.refused is not None else list(found.notes)
        platforms.row(found.name, state, "\n".join(notes))
    return [platforms, *(_profile_table(found.name, device) for found in seen for device in found.devices)]


def _profile_table(platform: str, profile: DeviceProfile) -> Table:
    table = Table(f"{platform} device {profile.index}: {profile.name}", ("fact", "value", "known by"))
    for path, value in _flat(profile):
        table.row(path, value, str(profile.provenance.get(path, "")))
    return table


def _flat(profile: DeviceProfile) -> list[tuple[str, str]]:
    """Every known value by its path; features are one line, and sizes get a unit."""
    rows: list[tuple[str, str]] = []
    values = msgspec.to_builtins(profile)
    capability = values.pop("capability")
    values.pop("provenance")
    for prefix, group in (("", values), ("capability.", capability)):
        for name, value in group.items():
            if value in (None, {}, [], ()):
                continue
            if name == "features":
                rows.append((f"{prefix}{name}", ", ".join(sorted(value))))
            elif isinstance(value, dict):
                rows += [(f"{prefix}{name}.{key}", str(each)) for key, each in value.items()]
            else:
                rows.append((f"{prefix}{name}", _with_unit(name, value)))
    return rows


def _with_unit(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        for size, unit in ((_GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
            if value >= size:
                return f"{value / size:.4g} {unit}"
    return str(value)


# doctor


def doctor(arguments: Sequence[str]) -> int:
    """0 all passed, 1 warnings, 2 failures."""
    if "--help" in arguments or "-h" in arguments:
        print(DOCTOR_HELP)
        return 0

    def body() -> int:
        as_json, words = split_json(arguments)
        verdicts = asyncio.run(_examine(read_options(words, inherited_environment()).options))
        worst = max((EXIT_OF[verdict.level] for verdict in verdicts), default=0)
        if as_json:
            print_json({"status": list(EXIT_OF)[worst], "verdicts": [_verdict_json(found) for found in verdicts]})
        else:
            print_tables([doctor_table(verdicts)])
            print(_summary(verdicts))
        return worst

    return guarded("doctor", body)


async def _examine(options: Options) -> list[Verdict]:
    """The worker's verdicts, and beside them the model's: how it would be served, or why not."""
    told: list[FromChild] = []
    wants_model = options.model is not None
    inspection = Inspection(options, Task.DOCTOR, told.append, on_line=say)
    examined, fit = await asyncio.gather(
        inspection.run(), _model_verdict(options) if wants_model else _nothing(), return_exceptions=True
    )
    verdicts = [message for message in told if isinstance(message, Verdict)]
    if isinstance(examined, TrimaranError):
        cure = "see the lines above; `trimaran probe` shows what was found"
        verdicts.append(Verdict(check="worker", level=Level.FAIL, text=str(examined), cure=cure))
    elif isinstance(examined, BaseException):
        raise examined
    if isinstance(fit, BaseException):
        raise fit
    return verdicts if fit is None else [*verdicts, fit]


async def _nothing() -> None:
    return None


async def _model_verdict(options: Options) -> Verdict:
    try:
        info = await ask_how_it_is_served(options)
    except TrimaranError as refusal:
        text, cure = part_cure(str(refusal), "see `trimaran explain` for the same model, or name another")
        return Verdict(check="model", level=Level.FAIL, text=text, cure=cure)
    assert info.model is not None and info.limits is not None
    text = (
        f"{info.model.architecture}, {info.model.weight_bytes / _GIB:.2f} GiB of weights as {info.model.dtype}; "
        f"a KV cache of {info.memory.get('kv_cache', 0) / _GIB:.2f} GiB allows {info.limits.max_model_len} tokens"
    )
    return Verdict(check="model", level=Level.PASS, text=text)


def _verdict_json(verdict: Verdict) -> dict[str, str]:
    return {"check": verdict.check, "level": verdict.level, "text": verdict.text, "cure": verdict.cure}


def doctor_table(verdicts: Sequence[Verdict]) -> Table:
    table = Table("Doctor", ("check", "verdict", "found", "cure"))
    for verdict in verdicts:
        table.row(verdict.check, verdict.level, verdict.text, verdict.cure)
    return table


def _summary(verdicts: Sequence[Verdict]) -> str:
    counts = {level: sum(verdict.level is level for verdict in verdicts) for level in Level}
    end = {0: "this machine can serve.", 1: "it can serve; see the warnings.", 2: "cure the failures first."}
    worst = max((EXIT_OF[verdict.level] for verdict in verdicts), default=0)
    warnings = f"{counts[Level.WARN]} warning{'' if counts[Level.WARN] == 1 else 's'}"
    return f"{counts[Level.PASS]} passed, {warnings}, {counts[Level.FAIL]} failed: {end[worst]}"


# kernels


_KERNEL_TASKS = {"list": Task.KERNELS_LIST, "matrix": Task.KERNELS_MATRIX, "check": Task.KERNELS_CHECK}


def kernels(arguments: Sequence[str]) -> int:
    """0, or 1 when `check` found one that fails."""
    words = list(arguments)
    if not words or "--help" in words or "-h" in words or words[0] not in _KERNEL_TASKS:
        if "--help" in words or "-h" in words:
            print(KERNELS_HELP)
            return 0
        wrong = f"there is no task {words[0]}" if words else "a task is missing"
        say(f"trimaran kernels: {wrong}; name list, matrix or check")
        return EXIT_REFUSED
    task = _KERNEL_TASKS[words[0]]
    as_json, words = split_json(words[1:])
    names: list[str] = []
    while words and not words[0].startswith("-"):
        names.append(words.pop(0))

    def body() -> int:
        options = inspection_options(words, "names of kernels go before the options")
        told = _told(options, task, tuple(names) if task is Task.KERNELS_CHECK else ())
        seen = [found for found in told if isinstance(found, ImplementationSeen)]
        _check_names(names, seen)
        if names:
            seen = [found for found in seen if {found.kernel, found.implementation} & set(names)]
        if as_json:
            print_json([msgspec.structs.asdict(found) for found in seen])
        elif task is Task.KERNELS_MATRIX:
            print_tables([_matrix_table(seen)])
        else:
            print_tables([_kernels_table(seen)])
        return 1 if any(found.state in ("fails", "demoted") for found in seen) else 0

    return guarded("kernels", body)


def _check_names(names: Sequence[str], seen: Sequence[ImplementationSeen]) -> None:
    known = {name for found in seen for name in (found.kernel, found.implementation)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise Refusal(f"there is no kernel or implementation {', '.join(unknown)}; see `trimaran kernels list`")


def _kernels_table(seen: Sequence[ImplementationSeen]) -> Table:
    table = Table(f"Kernels on {seen[0].device}", ("kernel", "implementation", "state", "why", "needs"))
    previous = ""
    for found in seen:
        kernel = found.kernel if found.kernel != previous else ""
        previous = found.kernel
        table.row(kernel, found.implementation, found.state, found.reason, found.needs)
    return table


def _matrix_table(seen: Sequence[ImplementationSeen]) -> Table:
    """Devices by what serves them: a column for each kernel or device would fit no terminal."""
    table = Table("What serves each kernel", ("kernel", "implementation", "devices"))
    devices: dict[tuple[str, str], list[str]] = {}
    for found in seen:
        devices.setdefault((found.kernel, found.implementation), []).append(found.device)
    kernels = list(dict.fromkeys(found.kernel for found in seen))
    for kernel in kernels:
        rows = [(name, served) for (of, name), served in devices.items() if of == kernel]
        for number, (name, served) in enumerate(rows):
            table.row("" if number else kernel, name, ", ".join(served))
    return table
