"""The simulated surfaces against the vendors' own sources: every name, parameter and default that a fake offers.

Sources are read, never imported: torch's from where it is installed, torch-npu's from its wheel.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ..surfaces import machines, modules

TORCH = Path(next(iter(find_spec("torch").submodule_search_locations or ())))  # type: ignore[union-attr]
Parameters = tuple[tuple[str, bool], ...]
"""Names in order, each with whether it has a default."""


def parameters_of_source(node: ast.FunctionDef) -> Parameters:
    arguments = [*node.args.posonlyargs, *node.args.args]
    num_required = len(arguments) - len(node.args.defaults)
    named = [(argument.arg, index >= num_required) for index, argument in enumerate(arguments)]
    named += [
        (argument.arg, default is not None)
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    ]
    if node.args.kwarg is not None:
        named.append((node.args.kwarg.arg, True))
    return tuple(entry for entry in named if entry[0] not in ("self", "cls"))


def parameters_of_fake(function: Any) -> Parameters:
    found = [
        (name, parameter.default is not inspect.Parameter.empty or parameter.kind is inspect.Parameter.VAR_KEYWORD)
        for name, parameter in inspect.signature(function).parameters.items()
    ]
    return tuple(entry for entry in found if entry[0] not in ("self", "cls"))


class Sources:
    """Functions and classes of some Python files, by name."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.functions: dict[str, ast.FunctionDef] = {}
        self.classes: dict[str, dict[str, ast.FunctionDef]] = {}
        self.exported: set[str] = set()
        for text in texts:
            self._read(ast.parse(text))

    def _read(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = {child.name: child for child in node.body if isinstance(child, ast.FunctionDef)}
                self.classes.setdefault(node.name, {}).update(methods)
            elif isinstance(node, ast.ImportFrom):
                self.exported |= {alias.asname or alias.name for alias in node.names}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                self.functions.setdefault(node.name, node)


def installed(*folders: str) -> Sources:
    files = [file for folder in folders for file in sorted((TORCH / folder).glob("*.py"))]
    return Sources(file.read_text(encoding="utf-8") for file in files)


def public(surface: type[Any]) -> Iterator[tuple[str, Any]]:
    for name, member in inspect.getmembers(surface, inspect.isfunction):
        if not name.startswith("_"):
            yield name, member


def check_functions(surface: type[Any], real: Sources) -> list[str]:
    wrong = []
    for name, member in public(surface):
        if name not in real.functions:
            if name not in real.exported:
                wrong.append(f"{name} does not exist")
            continue
        theirs, ours = parameters_of_source(real.functions[name]), parameters_of_fake(member)
        if theirs != ours:
            wrong.append(f"{name}: the vendor's parameters are {theirs}, the fake's {ours}")
    return wrong


def check_class(surface: type[Any], real: Sources, name: str, stub: set[str]) -> list[str]:
    wrong = [] if name in real.classes else [f"there is no class {name}"]
    methods = real.classes.get(name, {})
    for method, member in inspect.getmembers(surface, inspect.isfunction):
        if method.startswith("_") and method != "__init__":
            continue
        named = "__init__" if method == "__init__" and "__init__" in methods and "__new__" not in methods else method
        node = methods.get("__new__" if named == "__init__" and "__new__" in methods else named)
        if node is None:
            if method not in stub:
                wrong.append(f"{name}.{method} does not exist")
            continue
        theirs, ours = parameters_of_source(node), parameters_of_fake(member)
        if theirs != ours:
            wrong.append(f"{name}.{method}: the vendor's parameters are {theirs}, the fake's {ours}")
    return wrong


def stub_methods(*names: str) -> set[str]:
    """Methods that torch's type stubs of its compiled part give to these classes."""
    tree = ast.parse((TORCH / "_C" / "__init__.pyi").read_text(encoding="utf-8"))
    return {
        child.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in names
        for child in node.body
        if isinstance(child, ast.FunctionDef)
    }


def test_cuda() -> None:
    real = installed("cuda")
    wrong = check_functions(modules.CudaModule, real)
    wrong += check_class(modules._CudaStream, real, "Stream", stub_methods("_CudaStreamBase"))
    wrong += check_class(modules.BlockingEvent, real, "Event", stub_methods("_CudaEventBase"))
    graph = check_class(modules.CudaGraphSurface, real, "CUDAGraph", stub_methods("_CUDAGraph"))
    assert not wrong + [text for text in graph if "check_input_liveness" not in text], wrong + graph


def test_xpu() -> None:
    real = installed("xpu")
    wrong = check_functions(modules.XpuModule, real)
    wrong += check_class(modules._XpuStream, real, "Stream", stub_methods("_XpuStreamBase"))
    wrong += check_class(modules.EventSurface, real, "Event", stub_methods("_XpuEventBase"))
    wrong += check_class(modules.XpuGraphSurface, real, "XPUGraph", stub_methods("_XPUGraph"))
    assert not wrong, wrong


def test_metal() -> None:
    real = installed("mps")
    wrong = check_functions(modules.MpsModule, real)
    wrong += check_class(modules.MetalEvent, real, "Event", set())
    wrong += check_functions(modules.MpsBackend, installed("backends/mps"))
    assert not wrong, wrong


def test_a_wrong_fake_would_be_noticed() -> None:
    class Wrong:
        def mem_get_info(self, index: int) -> None: ...

        def free_memory(self) -> None: ...

    wrong = check_functions(Wrong, installed("cuda"))
    assert any(text.startswith("mem_get_info: the vendor's") for text in wrong)
    assert "free_memory does not exist" in wrong


def attributes_used_by_torch() -> set[str]:
    """Names that torch's own Python asks of device properties: its stubs leave some of CUDA's out."""
    files = (
        "numa/binding.py",
        "cuda/_utils.py",
        "_inductor/runtime/hints.py",
        "_inductor/runtime/triton_heuristics.py",
    )
    names = set()
    for file in files:
        for node in ast.walk(ast.parse((TORCH / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


def stub_fields(name: str) -> set[str]:
    tree = ast.parse((TORCH / "_C" / "__init__.pyi").read_text(encoding="utf-8"))
    (node,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return {child.target.id for child in node.body if isinstance(child, ast.AnnAssign)}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("made", "stub"),
    [
        (machines.cuda_properties("n", 9, 0, "GPU-0"), "_CudaDeviceProperties"),
        (machines.rocm_properties("n", "gfx942"), "_CudaDeviceProperties"),
        (machines.xpu_properties("n", 1), "_XpuDeviceProperties"),
    ],
)
def test_device_properties(made: Any, stub: str) -> None:
    known = stub_fields(stub) | (attributes_used_by_torch() if stub.startswith("_Cuda") else set())
    assert not set(vars(made)) - known


@pytest.fixture(scope="module")
def npu_sources(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The Python files of torch-npu's wheel, by name."""
    folder = tmp_path_factory.mktemp("torch-npu")
    release = ".".join(machines.torch.__version__.split("+")[0].split(".")[:2])
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]
    done = subprocess.run(
        [*command, str(folder), f"torch-npu=={release}.*"], capture_output=True, text=True, timeout=300, check=False
    )
    wheels = list(folder.glob("torch_npu-*.whl"))
    if not wheels:
        pytest.skip(f"torch-npu {release} cannot be had here: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.startswith("torch_npu/npu/") and name.endswith(".py")]
        return {name: wheel.read(name).decode() for name in names}


@pytest.mark.long
@pytest.mark.timeout(330)
def test_ascend(npu_sources: Mapping[str, str]) -> None:
    real = Sources(npu_sources.values())
    inherited = stub_methods("_CudaStreamBase", "_CUDAGraph")  # its compiled classes mirror these
    wrong = check_functions(modules.NpuModule, real)
    wrong += check_class(modules.StreamSurface, real, "Stream", inherited)
    wrong += check_class(modules.AscendEvent, real, "Event", inherited)
    wrong += check_class(modules.NpuGraphSurface, real, "NPUGraph", inherited)
    assert not wrong, wrong
