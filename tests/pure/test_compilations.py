"""Triton's compilations: what is told of those that come late, and how those at the start go side by side."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trimaran.kernels.compilations import Compilations, asks_anew, rehearsing

ROOT = Path(__file__).resolve().parents[2]


def test_compilations_that_come_late_are_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[Any] = []
    runtime = SimpleNamespace(jit_post_compile_hook=lambda **facts: others.append(facts["key"]))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=runtime)))
    told: list[str] = []
    compilations = Compilations(told.append)

    def compile(name: str) -> None:
        runtime.jit_post_compile_hook(key=name, repr=f"{name}[num_warps=4](x: *fp32)", fn=None, compile={})

    compile("early")
    compilations.watch()
    compilations.watch()
    compile("late")
    compilations.pause()
    compile("expected")
    compilations.watch()
    compile("later")
    assert told == ["late[num_warps=4](x: *fp32)", "later[num_warps=4](x: *fp32)"]
    assert others == ["early", "late", "expected", "later"], "another hook hears each once"


def test_without_triton_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    Compilations(pytest.fail).watch()


CODE = """
import sys, threading
sys.path.insert(0, "tools")
import compile_matrix
import torch, triton
from triton.compiler.compiler import CompiledKernel
from trimaran.kernels.catalog import CATALOG
from trimaran.kernels.compilations import Compilations, compiling, rehearsing
from trimaran.kernels.implementation import Services
from trimaran.kernels.in_triton.launching import run
from trimaran.kernels.in_triton.norms import rms_norm_kernel
from trimaran.ipc.facts import Problem

target = compile_matrix.TARGETS["sm_90"]
compile_matrix.name_target(target)
problem = Problem(dtype="bfloat16", hidden_size=64, intermediate_size=64, head_dim=64, num_heads=2, num_kv_heads=1)
names = ("triton_rms_norm", "triton_silu_and_mul")
norm, silu = (next(i for i in CATALOG if i.name == name).load(target.profile(), problem, Services()) for name in names)
loaded, compiled = [], []
CompiledKernel.run = property(lambda kernel: loaded.append((kernel.name, threading.current_thread().name)))
Compilations(compiled.append).watch()


def tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def call():
    with rehearsing():
        for num_tokens in (1, 3):
            norm(tensor(num_tokens, 64), tensor(num_tokens, 64), tensor(64), 1e-6)
        silu(tensor(1, 64), tensor(1, 128))


with compiling(2, "cpu"):
    call()
print(sorted(name for name, _ in loaded), {name.split("_")[0] for _, name in loaded}, len(compiled))
with compiling(2, "cpu"):
    call()
    with rehearsing():
        x, numbers = tensor(2, 48), (1e-6, 48, 48, 48, 48)
        constants = {"ADDS": False, "BLOCK": 3, "ONE_BLOCK": False, "PDL": False}
        run(rms_norm_kernel, (2,), x, x, x, x, *numbers, **constants)  # no power of two: nobody minds
print(len(loaded), len(compiled))
"""


def test_rehearsed_launches_are_compiled_and_loaded_by_threads_once_each(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT.parent)}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "['rms_norm_kernel', 'silu_and_mul_kernel'] {'compiler'} 2"
    assert second == "2 2", done.stderr


def test_a_rehearsal_asks_for_code_once() -> None:
    assert asks_anew("code"), "out of a rehearsal nothing is kept"
    with rehearsing():
        assert [asks_anew(code) for code in ("code", "code", "other", "code")] == [True, False, True, False]
    with rehearsing():
        assert asks_anew("code")
