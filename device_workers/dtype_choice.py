"""Which dtype the model runs in. Torch-free but for `measure`.

`auto` keeps the checkpoint's unless the device cannot do it or a measurement shows another at least a fifth faster. A
model that makes vectors gets no coarser one for speed: vectors are compared with those that another machine made.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ..ipc.conditions import Refusal
from ..ipc.facts import Decision, DeviceProfile, Feature
from ..kernels.implementation import LinearKernel
from ..kernels.verification import code_hash, write_atomically

DTYPES = ("float32", "bfloat16", "float16")
_NEEDED_GAIN = 1.2
_FEATURE = {"bfloat16": Feature.BF16, "float16": Feature.FP16}
_SIZE = 3072
_BATCHES = (1, 8)
_REPEATS = 3


def check_dtype(asked: str, profile: DeviceProfile) -> None:
    """Raises Refusal when an explicit dtype does not exist or the device lacks it."""
    if asked == "auto":
        return
    if asked not in DTYPES:
        raise Refusal(f"--dtype {asked} is not known; take auto or one of {', '.join(DTYPES)}")
    if not _has(asked, profile):
        others = ", ".join(dtype for dtype in DTYPES if _has(dtype, profile))
        raise Refusal(f"--dtype {asked}: {profile.name} does not have it; take auto or one of {others}")


def _has(dtype: str, profile: DeviceProfile) -> bool:
    return dtype not in _FEATURE or _FEATURE[dtype] in profile.capability.features


def lacks(dtype: str, profile: DeviceProfile) -> bool:
    """Whether the device cannot compute in a dtype that we know."""
    return dtype in DTYPES and not _has(dtype, profile)


def choose_dtype(
    asked: str, checkpoint: str, profile: DeviceProfile, seconds: Mapping[str, float], *, makes_vectors: bool = False
) -> tuple[str, Decision]:
    """`seconds` by dtype for the same work, as far as measured. Raises Refusal as `check_dtype`."""
    check_dtype(asked, profile)
    if asked != "auto":
        return asked, Decision(name="dtype", value=asked, reason="asked for by --dtype", overridden=True)
    kept = checkpoint if checkpoint in DTYPES else "float32"
    if not _has(kept, profile):
        fallback = "float16" if _has("float16", profile) else "float32"
        reason = f"the checkpoint's {kept} is not available on {profile.name}"
        return fallback, Decision(name="dtype", value=fallback, reason=reason)
    others = candidates(checkpoint, makes_vectors=makes_vectors)[1:]
    if not others:
        reason = "the checkpoint's: with a coarser one vectors would differ from those of other machines"
        return kept, Decision(name="dtype", value=kept, reason=reason)
    if kept not in seconds:
        return kept, Decision(name="dtype", value=kept, reason="the checkpoint's; not measured")
    return _fastest(kept, {dtype: seconds[dtype] for dtype in (kept, *others) if dtype in seconds})


def _fastest(kept: str, seconds: Mapping[str, float]) -> tuple[str, Decision]:
    best = min(seconds, key=lambda dtype: seconds[dtype])
    gain = seconds[kept] / seconds[best]
    if best != kept and gain >= _NEEDED_GAIN:
        reason = f"measured {gain:.2f} times as fast as the checkpoint's {kept}"
        return best, Decision(name="dtype", value=best, reason=reason)
    others = ", ".join(f"{dtype} {seconds[kept] / value:.2f}" for dtype, value in seconds.items() if dtype != kept)
    return kept, Decision(name="dtype", value=kept, reason=f"the checkpoint's; speed of others against it: {others}")


def candidates(checkpoint: str, *, makes_vectors: bool) -> tuple[str, ...]:
    """float16 is tried only where the checkpoint has it: its range is too small for values of other dtypes."""
    kept = checkpoint if checkpoint in DTYPES else "float32"
    others = ("float32",) if makes_vectors else ("float32", "bfloat16")
    return tuple(dict.fromkeys((kept, *others)))


class DtypeMeasurements:
    """Measured seconds by dtype, kept in the cache per device and code. An unusable cache costs one warning."""

    def __init__(
        self, cache_dir: Path | None, profile: DeviceProfile, num_threads: int, warn: Callable[[str], None]
    ) -> None:
        key = repr((profile.platform, profile.name, profile.driver, profile.runtime, num_threads, code_hash()))
        name = f"dtype-speed-{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"
        self._path = None if cache_dir is None else cache_dir / name
        self._warn = warn

    def read(self) -> dict[str, float]:
        if self._path is None:
            return {}
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, float])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            self._warn(f"dtype measurements in {self._path} cannot be read ({error}): measured again")
            return {}

    def write(self, seconds: Mapping[str, float]) -> None:
        if self._path is None:
            return
        try:
            write_atomically(self._path, json.dumps(dict(seconds)).encode())
        except OSError as error:
            self._warn(f"dtype measurements cannot be kept in {self._path} ({error}): measured at each start")


def measure(dtype: str, kernel: LinearKernel) -> float:
    """Seconds for one product at each of a few batch sizes, best of some tries: what decoding mostly does."""
    import torch

    from ..kernels.trials import DTYPES as TORCH_DTYPES

    weight = torch.full((_SIZE, _SIZE), 0.01, dtype=TORCH_DTYPES[dtype])
    packed = kernel.pack(weight, None)
    total = 0.0
    for batch in _BATCHES:
        x = torch.full((batch, _SIZE), 0.5, dtype=weight.dtype)
        out = torch.empty(batch, _SIZE, dtype=weight.dtype)
        times = []
        for _ in range(_REPEATS + 1):
            began = time.perf_counter()
            kernel(out, x, packed)
            times.append(time.perf_counter() - began)
        total += min(times[1:])
    return total
