#!/usr/bin/env python3
"""Compiles every Triton kernel in every configuration we ship for GPUs that are not here.

Each implementation is loaded and called as the engine does, on tensors without memory, with a launch that only
compiles and a driver that only names a target. What it took is kept in docs/portability.json by a fingerprint of the
kernel's code, its arguments and Triton's version, so that only what changed is compiled again; docs/portability.md is
made from it. Compilers can end their process: a child compiles, and one that dies costs one red cell.

    python tools/compile_matrix.py                compile what is missing, write the record and the page
    python tools/compile_matrix.py --check        compile nothing; exit 1 unless the record is current and complete
    python tools/compile_matrix.py --only rms_norm --on sm_90 gfx942 --fresh

A cell is red when compiling fails, when the compiler prints `error:`, when registers spill, or when a block takes more
shared memory than the device has. It is empty of numbers only where the implementation's own metadata says no.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from trimaran.device_workers.profiles.declared import architecture_profile
from trimaran.device_workers.profiles.packaged import file_of_architecture
from trimaran.ipc.facts import DeviceProfile, Problem
from trimaran.kernels.catalog import CATALOG
from trimaran.kernels.implementation import Implementation, Services

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "portability.json"
PAGE = ROOT / "docs" / "portability.md"
NUM_CHILDREN = 2


class Target(NamedTuple):
    """An architecture and the compiler's backend for it. What its blocks may take is in its capability file."""

    backend: str
    architecture: str

    def profile(self) -> DeviceProfile:
        return _declared(self.architecture)


@functools.cache
def _declared(architecture: str) -> DeviceProfile:
    file = file_of_architecture(architecture)
    assert file is not None, f"{architecture} has no capability file"
    return architecture_profile(file)


TARGETS = {
    architecture: Target(backend, architecture)
    for backend, architectures in (
        ("cuda", ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")),
        ("hip", ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")),
    )
    for architecture in architectures
}

_LLAMA = Problem(
    dtype="bfloat16",
    kv_dtype="bfloat16",
    head_dim=128,
    num_heads=32,
    num_kv_heads=8,
    block_size=64,
    hidden_size=4096,
    intermediate_size=14336,
    vocab_size=128256,
    max_tokens=8192,
    max_rows=256,
    rotary_dim=128,
)


def _problem(dtype: str, **changes: Any) -> Problem:
    return replace(_LLAMA, dtype=dtype, kv_dtype=dtype, **changes)


_ATTENTION = {
    "bfloat16, head 64": _problem("bfloat16", head_dim=64),
    "bfloat16, head 80, window": _problem("bfloat16", head_dim=80),
    "bfloat16, head 128": _LLAMA,
    "bfloat16, head 128, block 16": _problem("bfloat16", block_size=16),
    "bfloat16, head 256": _problem("bfloat16", head_dim=256, num_heads=16),
    "float16, head 128": _problem("float16"),
    "float32, head 64": _problem("float32", head_dim=64),
    "float32, head 128": _problem("float32"),
    "float32, head 256": _problem("float32", head_dim=256, num_heads=16),
}
_DTYPES = {dtype: _problem(dtype) for dtype in ("bfloat16", "float16", "float32")}
_ROTARY = _DTYPES | {
    "bfloat16, head 256": _problem("bfloat16", head_dim=256, rotary_dim=256),
    "bfloat16, partial": _problem("bfloat16", head_dim=80, rotary_dim=20),
}
_WIDE = _DTYPES | {"bfloat16, 20480 channels": _problem("bfloat16", hidden_size=20480)}
_LINEAR = {dtype: _DTYPES[dtype] for dtype in ("bfloat16", "float32")} | {
    "bfloat16, small model": _problem(
        "bfloat16", num_heads=16, hidden_size=1024, intermediate_size=3072, vocab_size=151936
    )
}
_LOGITS = {"float32 logits": _LLAMA}
_SMALL = _problem("bfloat16", hidden_size=1024, intermediate_size=3072, num_heads=16, block_size=16, vocab_size=151936)
_FUSED = _DTYPES | {"bfloat16, small model": _SMALL, "bfloat16, 5120 channels": _problem("bfloat16", hidden_size=5120)}
_DECODE = _ATTENTION | {
    "bfloat16, 16 heads": _SMALL,
    "bfloat16, partial": _problem("bfloat16", head_dim=96, rotary_dim=32),
}
SETTINGS: dict[str, dict[str, Problem]] = {
    "embed": _DTYPES,
    "rms_norm": _WIDE,
    "fused_add_rms_norm": _WIDE,
    "rotary_and_kv_write": _ROTARY,
    "silu_and_mul": _DTYPES,
    "paged_attention": _ATTENTION,
    "linear": _LINEAR,
    "greedy_sample": _LOGITS,
    "sample": _LOGITS,
    "apply_penalties": _LOGITS,
    "token_logprobs": _LOGITS,
    "quantize_fp8": _WIDE,
    "norm_linear": _FUSED,
    "norm_gate_up": _FUSED,
    "linear_add": _FUSED,
    "decode_attention": _DECODE,
}
"""Kernel -> the problems it is compiled for: dtypes, head sizes that change tiles, paths that a size switches."""


def implementations() -> list[Implementation]:
    return [implementation for implementation in CATALOG if implementation.name.startswith("triton_")]


def named(name: str) -> Implementation:
    return next(implementation for implementation in CATALOG if implementation.name == name)


# -- what is launched, without launching


class Launched(NamedTuple):
    """One launch as the engine's code makes it."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def fingerprint(self, target: Target) -> str:
        """Changes with whatever may change the binary: code, arguments, constants, target, compiler."""
        kinds = zip(self.kernel.params, self.arguments, strict=False)
        arguments = [_described(argument, parameter.do_not_specialize) for parameter, argument in kinds]
        parts = (code_of(self.kernel.fn.__module__), self.kernel.__name__, arguments, sorted(self.constants.items()))
        text = repr((importlib.metadata.version("triton"), target.backend, target.architecture, parts))
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def title(self) -> str:
        """The kernel, and of a decode which: places are tokens or sequences; one program has all keys or a share."""
        name = str(self.kernel.__name__.removesuffix("_kernel"))
        if name != "decode":
            return name
        places = "by token" if self.constants["BY_TOKEN"] else "by sequence"
        return f"{name} {places}, {'whole' if self.constants['IS_WHOLE'] else 'in parts'}"


def _described(argument: Any, is_general: bool) -> object:
    """What of an argument the compiler looks at: dtypes, and of integers whether they are 1 or divisible by 16."""
    if hasattr(argument, "block_shape"):
        return ("descriptor", str(argument.base.dtype), list(argument.block_shape))
    if isinstance(argument, int) and not isinstance(argument, bool):
        return "int" if is_general else ("int", argument == 1, argument % 16 == 0)
    return str(argument.dtype) if hasattr(argument, "dtype") else type(argument).__name__


@functools.cache
def code_of(module: str) -> str:
    """The module's compiled functions and constants, without comments and docstrings, and those of ours it imports."""
    path = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
    parts: list[str] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names = (f"{module.rsplit('.', 1)[0]}.{node.module}",)
            parts += [code_of(name) for name in names]
        elif isinstance(node, ast.Assign) or (isinstance(node, ast.FunctionDef) and _is_compiled(node)):
            parts.append(ast.dump(_without_docstring(node)))
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _is_compiled(node: ast.FunctionDef) -> bool:
    return any("jit" in ast.dump(decorator) for decorator in node.decorator_list)


def _without_docstring(node: ast.stmt) -> ast.stmt:
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
        node.body = node.body[1:]
    return node


def launches(name: str, target: Target, setting: str) -> list[Launched]:
    """What calling the implementation on its trials launches, each different launch once."""
    from trimaran.kernels.verification import run_trial

    implementation = named(name)
    problem = SETTINGS[implementation.kernel][setting]
    loaded: Any = implementation.load(target.profile(), problem, Services(device="meta"))
    made: dict[str, Launched] = {}

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        launched = Launched(kernel, grid, arguments, constants)
        made.setdefault(launched.fingerprint(target), launched)

    loaded.launch = note
    for arguments in _calls(implementation.kernel, problem):
        run_trial(implementation.kernel, loaded, arguments)
    return list(made.values())


def _calls(kernel: str, problem: Problem) -> list[tuple[Any, ...]]:
    """Arguments of its trials; of `linear`, whose blocks depend on the weight, those of the model's weights."""
    import torch

    from trimaran.kernels.trials import DTYPES, make_trials

    if kernel != "linear":
        return [trial.arguments for trial in make_trials(kernel, problem, "meta")]
    dtype = DTYPES[problem.dtype]
    weights = [torch.empty(shape, dtype=dtype, device="meta") for shape in _weights(problem)]
    return [
        (
            torch.empty(num_tokens, weight.shape[0], dtype=out_dtype, device="meta"),
            torch.empty(num_tokens, weight.shape[1], dtype=dtype, device="meta"),
            weight,
            None,
        )
        for weight, out_dtype in zip(weights, (*4 * (dtype,), torch.float32), strict=True)
        for num_tokens in (1, 2, 4)
    ]


def _weights(problem: Problem) -> tuple[tuple[int, int], ...]:
    """N x K of a layer's four and of the head."""
    heads, kv_heads = problem.num_heads * problem.head_dim, problem.num_kv_heads * problem.head_dim
    hidden, intermediate = problem.hidden_size, problem.intermediate_size
    return (
        (heads + 2 * kv_heads, hidden),
        (hidden, heads),
        (2 * intermediate, hidden),
        (hidden, intermediate),
        (problem.vocab_size, hidden),
    )


# -- compiling, in a child


def name_target(target: Target) -> None:
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime.driver import driver

    class NamesATarget(DriverBase):  # type: ignore[misc]
        """Compiles for a device that is not here; cannot launch."""

        def __init__(self, gpu: GPUTarget) -> None:
            self.gpu = gpu

        @classmethod
        def is_active(cls) -> bool:
            return False

        def get_current_target(self) -> GPUTarget:
            return self.gpu

        def get_current_device(self) -> int:
            return list(TARGETS).index(target.architecture)  # binaries are kept per device

        def get_current_stream(self, device: object = None) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("meta")

        def map_python_to_cpp_type(self, type_name: str) -> str:
            return type_name

        def get_benchmarker(self) -> Callable[..., list[float]]:
            return lambda *arguments, **options: [1.0]

    architecture: int | str = target.architecture
    if target.backend == "cuda":
        architecture = int(target.architecture.removeprefix("sm_"))
    driver.set_active(NamesATarget(GPUTarget(target.backend, architecture, target.profile().capability.warp_width)))


def compiled(launched: Launched) -> dict[str, Any]:
    """Registers, spilled bytes (NVIDIA) or registers (AMD), shared memory in bytes, seconds, bulk copies if any."""
    began = time.perf_counter()
    result = launched.kernel.warmup(*launched.arguments, grid=launched.grid, **launched.constants)
    took = time.perf_counter() - began
    registers, spilled = _nvidia_usage(result.asm["cubin"]) if "cubin" in result.asm else _amd_usage(result.asm)
    num_bulk_copies = result.asm.get("ptx", "").count("cp.async.bulk.tensor")
    return {
        "registers": registers,
        "spilled": spilled,
        "shared": result.metadata.shared,
        "warps": result.metadata.num_warps,
        "stages": result.metadata.num_stages,
        "seconds": round(took, 1),
        **({"bulk_copies": num_bulk_copies} if num_bulk_copies else {}),
    }


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    assert found is not None, done.stdout
    return int(found[1]), int(found[2])


def _amd_usage(assembly: dict[str, str]) -> tuple[int, int]:
    def count(what: str) -> int:
        found = re.search(rf"\.{what}:\s+(\d+)", assembly["amdgcn"])
        assert found is not None, what
        return int(found[1])

    return count("vgpr_count"), count("vgpr_spill_count") + count("sgpr_spill_count")


def answer(request: dict[str, str]) -> dict[str, Any]:
    target = TARGETS[request["architecture"]]
    name_target(target)
    wanted = request["fingerprint"]
    for launched in launches(request["name"], target, request["setting"]):
        if launched.fingerprint(target) == wanted:
            return compiled(launched)
    raise LookupError(f"no launch {wanted}")


def serve() -> None:
    """Answer requests, one JSON line each. Standard error is the compiler's."""
    for line in sys.stdin:
        try:
            result = answer(json.loads(line))
        except Exception as error:
            told = " ".join(str(error.__cause__ or error).split())
            result = {"error": f"{type(error).__name__}: {told[-300:]}"}
        sys.stderr.flush()
        print(json.dumps(result), flush=True)


class Child:
    """A process that compiles, started again after it dies."""

    def __init__(self, folder: Path, command: list[str] | None = None) -> None:
        self._folder = folder
        self._command = command or [sys.executable, __file__, "--child"]
        self._process: subprocess.Popen[str] | None = None

    def compile(self, request: dict[str, str]) -> dict[str, Any]:
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        before = self._printed.stat().st_size
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        printed = self._printed.read_bytes()[before:].decode(errors="replace")
        if not line:
            status = process.wait()
            self.close()
            return {"error": f"the compiler ended its process with status {status}: {printed[-300:].strip()}"}
        result: dict[str, Any] = json.loads(line)
        complaints = [text for text in printed.splitlines() if "error:" in text]
        if complaints and "error" not in result:
            result["error"] = complaints[0][:300]
        return result

    def _start(self) -> None:
        self._printed = Path(tempfile.mkstemp(dir=self._folder)[1])
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": str(self._folder / "cache"), "TRITON_DEFAULT_FP_FUSION": "1"}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with self._printed.open("w") as printed:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                env=environment,
                text=True,
            )

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait(timeout=60)
            self._process.stdout.close()
            self._process = None


# -- the record

Cells = dict[str, dict[str, dict[str, Any]]]
"""Implementation -> architecture -> {"refused": why} or {"launches": {"setting / kernel": numbers and fingerprint}}."""


def expected_cells(names: Iterable[str], architectures: Iterable[str]) -> Cells:
    """What a complete record holds, without the numbers."""
    cells: Cells = {}
    wanted = list(architectures)
    for name in names:
        cells[name] = {architecture: _expected_cell(named(name), TARGETS[architecture]) for architecture in wanted}
    return cells


def _expected_cell(implementation: Implementation, target: Target) -> dict[str, Any]:
    settings = SETTINGS[implementation.kernel]
    refusals = [implementation.misfit(target.profile(), problem) for problem in settings.values()]
    if all(refusals):
        return {"refused": refusals[0]}
    expected: dict[str, dict[str, Any]] = {}
    known: set[str] = set()
    for setting, refusal in zip(settings, refusals, strict=True):
        if refusal is not None:
            expected[setting] = {"refused": refusal}
            continue
        for launched in launches(implementation.name, target, setting):
            fingerprint = launched.fingerprint(target)
            if fingerprint not in known:
                known.add(fingerprint)
                title = _untaken(f"{setting} / {launched.title()}", expected)
                expected[title] = {"fingerprint": fingerprint, "setting": setting}
    return {"launches": expected}


def _untaken(title: str, taken: dict[str, Any]) -> str:
    number = 2
    unique = title
    while unique in taken:
        unique, number = f"{title} {number}", number + 1
    return unique


def read_record() -> dict[str, Any]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {"triton": "", "cells": {}}


def _one_line_each(text: str) -> str:
    """Innermost objects on lines of their own, so that a change reads as the launches that changed."""
    return re.sub(r"\{\n([^{}]*?)\n\s*\}", lambda found: "{" + " ".join(found[1].split()) + "}", text)


def known_numbers(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By fingerprint."""
    return {
        entry["fingerprint"]: entry
        for by_architecture in record["cells"].values()
        for cell in by_architecture.values()
        for entry in cell.get("launches", {}).values()
        if "fingerprint" in entry
    }


def entries(cells: Cells) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """`(implementation, architecture, title, entry)` of everything compiled or to compile."""
    for name, by_architecture in cells.items():
        for architecture, cell in by_architecture.items():
            for title, entry in cell.get("launches", {}).items():
                if "fingerprint" in entry:
                    yield name, architecture, title, entry


def fill(cells: Cells, known: dict[str, dict[str, Any]], report: Callable[[str], None]) -> None:
    """Give every entry its numbers: those known, and by compiling the others."""
    missing = []
    for name, architecture, title, entry in entries(cells):
        if entry["fingerprint"] in known:
            entry.update({**known[entry["fingerprint"]], "setting": entry["setting"]})
        else:
            missing.append((name, architecture, title, entry))
    if not missing:
        return
    with tempfile.TemporaryDirectory(prefix="trimaran-matrix-") as folder:
        _compile_all(missing, Path(folder), report)


def _compile_all(
    missing: list[tuple[str, str, str, dict[str, Any]]], folder: Path, report: Callable[[str], None]
) -> None:
    children: list[Child] = []
    own = threading.local()
    num_done = 0

    def take(work: tuple[str, str, str, dict[str, Any]]) -> None:
        nonlocal num_done
        name, architecture, title, entry = work
        if not hasattr(own, "child"):
            own.child = Child(folder)
            children.append(own.child)
        wanted = {key: entry[key] for key in ("fingerprint", "setting")}
        entry.update(own.child.compile({"name": name, "architecture": architecture, **wanted}))
        num_done += 1
        trouble = fault(architecture, entry)
        summary = trouble or f"{entry['registers']} registers, {entry['shared']} bytes shared, {entry['seconds']} s"
        report(f"{num_done}/{len(missing)} {architecture:8} {name}: {title}: {summary}")

    with ThreadPoolExecutor(NUM_CHILDREN) as pool:
        list(pool.map(take, missing))
    for child in children:
        child.close()


def fault(architecture: str, entry: dict[str, Any]) -> str | None:
    """Why an entry is red; None when it is green."""
    if "error" in entry:
        return str(entry["error"])
    if "registers" not in entry:
        return "not compiled"
    if entry["spilled"]:
        return f"spills {entry['spilled']}"
    limit = TARGETS[architecture].profile().capability.shared_memory_per_block_bytes
    assert limit is not None
    if entry["shared"] > limit:
        return f"takes {entry['shared']} bytes of shared memory, a block has {limit}"
    return None


def faults(cells: Cells) -> list[str]:
    found = []
    for name, architecture, title, entry in entries(cells):
        reason = fault(architecture, entry)
        if reason is not None:
            found.append(f"{name} on {architecture}: {title}: {reason}")
    return found


# -- the page


def page(record: dict[str, Any]) -> str:
    cells = record["cells"]
    architectures = list(TARGETS)
    lines = [
        "# Portability",
        "",
        "Made by `python tools/compile_matrix.py` from `portability.json`; do not edit. Every Triton kernel, in every",
        f"configuration that ships, compiled by Triton {record['triton']} without the hardware, through the code that",
        "launches it. **Compiled is not run**: what has run on hardware is in `test_results.md`.",
        "",
        "A cell: most registers a thread uses, most shared memory a block takes (KiB), compile time of all its",
        "launches (s). No launch spills registers or takes more shared memory than the architecture's block has.",
        "*n*: not offered, with the reason below.",
        "",
        "| implementation | " + " | ".join(architectures) + " |",
        "|---|" + "---|" * len(architectures),
    ]
    reasons: dict[str, int] = {}
    for name in cells:
        row = [_cell_text(cells[name][architecture], architecture, reasons) for architecture in architectures]
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    lines += ["", "Not offered, because it:", ""]
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    lines += ["", *_details(cells)]
    return "\n".join(lines) + "\n"


def _cell_text(cell: dict[str, Any], architecture: str, reasons: dict[str, int]) -> str:
    if "refused" in cell:
        reason = cell["refused"].replace(TARGETS[architecture].profile().name, "it").replace(architecture, "it")
        number = reasons.setdefault(reason, len(reasons) + 1)
        return f"*n* {number}"
    compiled_ones = [entry for entry in cell["launches"].values() if "fingerprint" in entry]
    if any(fault(architecture, entry) for entry in compiled_ones):
        return "**red**"
    registers, shared = (max(entry[what] for entry in compiled_ones) for what in ("registers", "shared"))
    seconds = sum(entry["seconds"] for entry in compiled_ones)
    return f"{registers} · {shared / 1024:.0f} · {seconds:.0f}"


def _details(cells: Cells) -> list[str]:
    """Attention, whose tiles differ most, launch by launch."""
    legend = "Registers · shared memory (KiB) · warps. *=*: the binary of another line."
    lines = ["## Attention, launch by launch", "", legend, ""]
    for name in (name for name in cells if "attention" in name):
        offered = [architecture for architecture in TARGETS if "launches" in cells[name][architecture]]
        titles = list(dict.fromkeys(title for key in offered for title in cells[name][key]["launches"]))
        lines += [f"### {name}", "", "| launch | " + " | ".join(offered) + " |", "|---|" + "---|" * len(offered)]
        for title in titles:
            row = [_detail(cells[name][key]["launches"].get(title)) for key in offered]
            lines.append(f"| {title} | " + " | ".join(row) + " |")
        lines.append("")
    return lines[:-1]


def _detail(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "*=*"
    if "refused" in entry:
        return str(entry["refused"])
    if "registers" not in entry:
        return "**red**"
    return f"{entry['registers']} · {entry['shared'] / 1024:.0f} · {entry['warps']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="kernels or implementations")
    parser.add_argument("--on", nargs="*", default=list(TARGETS), help="architectures")
    parser.add_argument("--fresh", action="store_true", help="compile what is known too")
    parser.add_argument("--check", action="store_true", help="compile nothing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve()
        return 0
    names = [each.name for each in implementations() if not options.only or {each.name, each.kernel} & {*options.only}]
    cells = expected_cells(names, options.on)
    record = read_record()
    if options.check:
        return _check(cells, record)
    known = {} if options.fresh else known_numbers(record)
    known = {key: entry for key, entry in known.items() if "registers" in entry}
    fill(cells, known, functools.partial(print, flush=True))
    for name, by_architecture in cells.items():
        record["cells"].setdefault(name, {}).update(by_architecture)
    complete = len(names) == len(implementations()) and set(options.on) == set(TARGETS)
    if complete:
        record["cells"] = cells
    record["triton"] = importlib.metadata.version("triton")
    RECORD.write_text(_one_line_each(json.dumps(record, indent=1)) + "\n")
    if complete:
        PAGE.write_text(page(record))
    red = faults(cells)
    print("\n".join(red) or "no cell is red")
    return 1 if red else 0


def _check(cells: Cells, record: dict[str, Any]) -> int:
    fill_from = known_numbers(record)
    stale = [
        f"{name} on {architecture}: {title} is not in the record"
        for name, architecture, title, entry in entries(cells)
        if entry["fingerprint"] not in fill_from
    ]
    red = faults(record["cells"])
    print("\n".join(stale + red) or "the record is current, complete and green")
    return 1 if stale or red else 0


if __name__ == "__main__":
    raise SystemExit(main())
