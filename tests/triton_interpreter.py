"""Triton kernels on the CPU: a child process whose Triton interprets, since that is settled when Triton is imported.

`python tests/triton_interpreter.py` answers one JSON line for each it reads: the verdict of loading one implementation
for one problem by the registry, which runs it on its trials and compares it with the reference; or that of one of the
`triton_checks`. The parent's end is `Interpreter`.

The interpreter of Triton 3.6 is wrong in three places, which `repair` mends: it multiplies bfloat16 as the integers
that hold its bits, it cuts float32 to bfloat16 instead of rounding, and it makes numbers of one-element arrays in a way
that numpy 2.4 refuses. Its element-wise arithmetic on bfloat16 is wrong too: kernels convert to float32 first, always.
"""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def repair() -> None:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        return handle.data

    def dot(self: Any, a: Any, b: Any, acc: Any, precision: Any, imprecise: Any) -> Any:
        product = np.matmul(widened(a), widened(b), dtype=acc.data.dtype)
        return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)

    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_rounding(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(self, source, target)
        bits = source.data.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = np.where(np.isnan(source.data), 0x7FC0, rounded).astype(np.uint16)
        return interpreter.TensorHandle(quiet, tl.bfloat16)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))

    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.InterpreterBuilder.cast_impl = cast_rounding
    interpreter._patch_lang_tensor = patch_tensor_and_index


def interpreting_profile() -> Any:
    """A device that can do whatever a kernel may ask for, on a platform of its own."""
    from trimaran.ipc.facts import DeviceCapability, DeviceProfile, Feature

    capability = DeviceCapability(architecture="interpreter", num_multiprocessors=8, features=frozenset(Feature))
    return DeviceProfile(platform="interpreter", vendor="triton", name="Triton's interpreter", capability=capability)


def verdict(name: str, problem: Any, best: dict[str, dict[str, int]]) -> str:
    """Empty when the implementation loads and agrees with its reference; else why not."""
    from msgspec.structs import replace

    from trimaran.kernels.catalog import CATALOG
    from trimaran.kernels.implementation import Services
    from trimaran.kernels.registry import Registry
    from trimaran.kernels.verification import VerdictCache, Verifier

    kernel = next(implementation.kernel for implementation in CATALOG if implementation.name == name)
    chain = [implementation for implementation in CATALOG if implementation.kernel == kernel]
    verifier = Verifier({kernel: chain[-1]}, VerdictCache(None, lambda text: None))
    profile = interpreting_profile()
    profile = replace(profile, capability=replace(profile.capability, best=best))
    tried = [next(candidate for candidate in chain if candidate.name == name), chain[-1]]
    _, resolution = Registry(tried, verifier).load(kernel, profile, problem, Services())
    reasons = {**resolution.rejected, **resolution.demoted}
    return "" if resolution.chosen == name else reasons[name]


def answer(request: dict[str, Any]) -> str:
    from trimaran.ipc.facts import Problem

    try:
        if "check" in request:
            from trimaran.tests import triton_checks

            check = triton_checks.CHECKS.get(request["check"], triton_checks.long_contexts)
            return check("cpu", interpreting_profile(), *request["arguments"])
        return verdict(request["name"], Problem(**request["problem"]), request["best"])
    except Exception:
        return traceback.format_exc()


def main() -> None:
    import torch

    torch.set_num_threads(1)
    repair()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


class Interpreter:
    """One child that answers one request after another."""

    def __init__(self) -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT.parent)}
        environment |= {"OMP_NUM_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", __file__], stdin=pipe, stdout=pipe, env=environment, text=True
        )

    def verdict(self, name: str, problem: dict[str, Any], best: dict[str, dict[str, int]] | None = None) -> str:
        return self._asked({"name": name, "problem": problem, "best": best or {}})

    def check(self, name: str, *arguments: object) -> str:
        return self._asked({"check": name, "arguments": arguments})

    def _asked(self, request: dict[str, Any]) -> str:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()
        return str(json.loads(self._child.stdout.readline()))

    def close(self) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        self._child.wait(timeout=30)
        self._child.stdout.close()


if __name__ == "__main__":
    main()
