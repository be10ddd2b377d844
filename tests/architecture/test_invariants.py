"""The invariants of the design, read off the code: who imports whom, what never appears, what is read where."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("frontend", "engine_core", "device_workers", "kernels", "ipc")
ARROWS = {
    "frontend": {"ipc"},
    "engine_core": {"ipc"},
    "device_workers": {"kernels", "ipc"},
    "kernels": {"ipc"},
    "ipc": set(),
}
HEAVY = {"torch", "triton", "transformers"}
VENDOR_MODULES = ("cuda", "xpu", "mps", "npu", "hip", "accelerator")
VENDOR_LIBRARIES = {"pynvml", "amdsmi", "torch_npu", "intel_extension_for_pytorch"}
PICKLING = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal"}
PICKLING_CALLS = {"recv_pyobj", "send_pyobj", "all_gather_object", "broadcast_object_list", "gather_object"}


def sources(*folders: str) -> list[Path]:
    return [file for folder in folders or FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]


def trees(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for file in sources(*folders):
        yield file.relative_to(ROOT).as_posix(), ast.parse(file.read_text(), str(file))


def imports(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of each import, ours as trimaran.…; typing-only ones count too."""
    package = ["trimaran", *Path(name).with_suffix("").parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
                module = ".".join([*base, node.module] if node.module else base)
            else:
                module = node.module or ""
            yield node.lineno, module
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain, or an empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("folder", FOLDERS)
def test_arrows(folder: str) -> None:
    """frontend, engine_core and device_workers never import each other; kernels imports ipc; ipc nothing of ours."""
    wrong = []
    for name, tree in trees(folder):
        for line, module in imports(name, tree):
            parts = module.split(".")
            is_ours = parts[0] == "trimaran" and len(parts) > 1 and parts[1] in FOLDERS
            if is_ours and parts[1] not in ARROWS[folder] | {folder}:
                wrong.append(f"{name}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_our_folders_import_each_other_relatively() -> None:
    wrong = [
        f"{name}:{node.lineno}"
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "trimaran"
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("folder", ["frontend", "engine_core", "ipc"])
def test_no_tensor_library_in_the_torch_free_hulls(folder: str) -> None:
    wrong = [
        f"{name}:{line} imports {module}"
        for name, tree in trees(folder)
        for line, module in imports(name, tree)
        if module.split(".")[0] in HEAVY
    ]
    assert not wrong, "\n".join(wrong)


def test_no_pickle_no_eval_on_any_boundary() -> None:
    wrong = []
    for name, tree in trees():
        wrong += [f"{name}:{line} {module}" for line, module in imports(name, tree) if module.split(".")[0] in PICKLING]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = dotted(node.func)
                last = called.rsplit(".", 1)[-1]
                if called in ("eval", "exec", "builtins.eval", "torch.load") or last in PICKLING_CALLS:
                    wrong.append(f"{name}:{node.lineno} calls {called}")
    assert not wrong, "\n".join(wrong)


def test_no_multiprocessing() -> None:
    """Its queues and connections pickle; our children are exec'd and talk by the control link."""
    wrong = [
        f"{name}:{line}"
        for name, tree in trees()
        for line, module in imports(name, tree)
        if module.split(".")[0] == "multiprocessing"
    ]
    assert not wrong, wrong


def test_vendor_apis_only_under_platforms() -> None:
    wrong = []
    for name, tree in trees():
        if name.startswith("device_workers/platforms/"):
            continue
        for line, module in imports(name, tree):
            parts = module.split(".")
            is_vendor = parts[0] == "torch" and len(parts) > 1 and parts[1] in VENDOR_MODULES
            if is_vendor or parts[0] in VENDOR_LIBRARIES:
                wrong.append(f"{name}:{line} imports {module}")
        for node in ast.walk(tree):
            chain = dotted(node) if isinstance(node, ast.Attribute) else ""
            if chain.startswith(tuple(f"torch.{vendor}" for vendor in VENDOR_MODULES)):
                wrong.append(f"{name}:{node.lineno} uses {chain}")  # type: ignore[attr-defined]
    assert not wrong, "\n".join(wrong)


def test_environment_is_read_in_one_file_and_written_in_one() -> None:
    """Options are read in options.py; a child's environment is composed where it is spawned, from that file's copy."""
    readers = []
    for name, tree in trees():
        for node in ast.walk(tree):
            chain = dotted(node) if isinstance(node, ast.Attribute) else ""
            if chain in ("os.environ", "os.getenv", "os.putenv", "os.environb", "os.unsetenv"):
                readers.append(name)
        readers += [name for line, module in imports(name, tree) if module in ("os.environ", "os.getenv")]
    assert set(readers) <= {"frontend/launch/options.py"}, sorted(set(readers))


def test_nothing_is_named_like_a_module_we_import() -> None:
    taken = {"torch", "triton", "platform", "types", "queue", "logging", "http", "transformers", "zmq"}
    wrong = [
        folder.relative_to(ROOT).as_posix()
        for name in FOLDERS
        for folder in (ROOT / name).rglob("*")
        if folder.is_dir() and folder.name in taken and folder.parent == ROOT
    ]
    assert not wrong


def test_only_boot_and_detection_name_platforms() -> None:
    names = {"cpu", "null", "cuda", "rocm", "xpu", "ascend", "metal"}
    wrong = []
    for name, tree in trees("device_workers"):
        if name == "device_workers/boot.py" or name.startswith("device_workers/platforms/"):
            continue
        for line, module in imports(name, tree):
            parts = module.split(".")
            if "platforms" in parts and parts[-1] in names:
                wrong.append(f"{name}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_only_the_catalog_names_implementations() -> None:
    homes = ("reference", "in_torch", "in_cpp", "in_triton", "vendor")
    tools = ("trimaran.kernels.in_cpp.build", "trimaran.kernels.in_cpp.library")  # a tool chain, no implementations
    wrong = []
    for name, tree in trees("kernels", "device_workers"):
        inside = Path(name).parts[1] in homes if name.startswith("kernels/") else False
        if name == "kernels/catalog.py" or inside:
            continue
        for line, module in imports(name, tree):
            parts = module.split(".")
            is_home = parts[:2] == ["trimaran", "kernels"] and len(parts) > 3 and parts[2] in homes
            if is_home and not module.startswith(tools):
                wrong.append(f"{name}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_no_bare_tasks() -> None:
    """A task belongs to an actor or a task group: nothing dies in silence."""
    wrong = []
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = dotted(node.func)
                if called in ("asyncio.create_task", "asyncio.ensure_future") or called.endswith("loop.create_task"):
                    wrong.append(f"{name}:{node.lineno} {called}")
    assert not wrong, "\n".join(wrong)


def test_no_drawers() -> None:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc", "base", "manager"}
    wrong = [file.relative_to(ROOT).as_posix() for file in sources() if file.stem in drawers]
    assert not wrong


def test_no_runtime_import_of_core_by_name() -> None:
    """No class or module is chosen by a name that could come over the wire."""
    wrong: list[str] = []
    for name, tree in trees("ipc", "engine_core", "frontend/http", "frontend/client"):
        wrong += [
            f"{name}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and dotted(node.func) in ("importlib.import_module", "__import__", "globals")
        ]
    assert not wrong, wrong
