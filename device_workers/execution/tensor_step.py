"""A step that the device works on: what it will have sampled, and how long each part took.

S sampled rows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...ipc.conditions import DeviceFault, TrimaranError
from ...ipc.plan import ResultFlag, StepResult, hash_tokens
from ..memory.staging import Readback
from .batch import Batch
from .progress import Progress
from .sampler import PendingLogprobs, Sampled

Array = np.ndarray[Any, np.dtype[Any]]

_INVALID = np.uint8(ResultFlag.INVALID)


@dataclass(frozen=True)
class PromptLogprobs:
    """Of the targets of some rows, `counts[i]` each, in parts."""

    rows: Array
    counts: Array
    num_top: Array
    parts: tuple[PendingLogprobs, ...]

    def columns(self) -> dict[str, Array]:
        read = [part.read() for part in self.parts]
        return {
            "prompt_rows": self.rows,
            "prompt_counts": self.counts,
            "prompt_top_counts": self.num_top,
            "prompt_logprobs": np.concatenate([part.values for part in read]),
            "prompt_ranks": np.concatenate([part.ranks for part in read]),
            "prompt_top_ids": np.concatenate([part.top_ids for part in read]),
            "prompt_top_logprobs": np.concatenate([part.top_values for part in read]),
        }


@dataclass(frozen=True)
class Pooled:
    """Vectors of some rows; `vectors_SD` is the host's side of them."""

    rows: Array
    vectors_SD: torch.Tensor

    def columns(self) -> dict[str, Array]:
        return {
            "pooled_rows": self.rows.astype(np.int32),
            "pooled_dims": np.full(len(self.rows), self.vectors_SD.shape[1], np.int32),
            "pooled": self.vectors_SD.numpy().reshape(-1),
        }


class StepClock:
    """Seconds of each part of the steps: building the batch, launching the forward pass, launching the sampling, and
    waiting for the device, which begins when the step before is over.
    """

    def __init__(self) -> None:
        self._over_s = 0.0

    def begin(self) -> None:
        self._began_s = self._noted_s = time.perf_counter()
        self._parts: dict[str, float] = {}

    def note(self, part: str) -> None:
        now = time.perf_counter()
        self._parts[part] = now - self._noted_s
        self._noted_s = now

    def end(self) -> StepTimes:
        """All was launched."""
        self.note("sample")
        return StepTimes(self, self._parts["build"], self._parts["launch"], self._parts["sample"], self._noted_s)

    def over(self, launched_s: float) -> float:
        """A step's results are here. Returns how long the device alone kept it, as far as the host can tell."""
        now = time.perf_counter()
        waited_s = now - max(launched_s, self._over_s)
        self._over_s = now
        return waited_s


@dataclass(frozen=True)
class StepTimes:
    """Of one step, in seconds."""

    clock: StepClock
    build_s: float
    launch_s: float
    sample_s: float
    launched_s: float

    def column(self) -> Array:
        return np.array([self.build_s, self.launch_s, self.sample_s, self.clock.over(self.launched_s)])


@dataclass(frozen=True)
class TensorStep:
    """A PendingStep. `tokens` is the host's side of what was sampled."""

    step: int
    batch: Batch
    tokens: torch.Tensor | None
    sampled: Sampled | None
    prompt: PromptLogprobs | None
    pooled: Pooled | None
    readback: Readback
    times: StepTimes
    progress: Progress

    def is_done(self) -> bool:
        return self.readback.is_done()

    def result(self) -> StepResult:
        try:
            self.readback.wait()
        except TrimaranError:
            raise
        except RuntimeError as error:  # the device broke on something of this step, or of one launched before it
            raise DeviceFault(f"{self}: {error}") from error
        self.progress.end(self.step)
        prompt = {} if self.prompt is None else self.prompt.columns()
        pooled = {} if self.pooled is None else self.pooled.columns()
        step = np.array([self.step], np.int64)
        return StepResult(step=step, seconds=self.times.column(), **self._tokens(), **prompt, **pooled)

    def __str__(self) -> str:
        return f"step {self.step} ({self.batch.num_sequences} sequences, {self.batch.num_tokens} tokens)"

    def _tokens(self) -> dict[str, Array]:
        batch = self.batch
        rows = batch.rows[batch.sampled]
        if self.tokens is None or self.sampled is None:
            return {"tokens_hash": hash_tokens(rows, rows)}
        tokens = self.tokens.numpy()
        broken = tokens < 0
        ids = np.where(broken, 0, tokens).astype(np.int32)
        columns = {
            "rows": rows,
            "token_ids": ids,
            "flags": broken.view(np.uint8) * _INVALID,
            "tokens_hash": hash_tokens(rows, ids),
            "logprob_rows": self.sampled.logprob_rows.astype(np.int32),
        }
        if self.sampled.logprobs is not None:
            logprobs = self.sampled.logprobs.read()
            columns |= {
                "logprobs": logprobs.values,
                "ranks": logprobs.ranks,
                "top_counts": logprobs.counts,
                "top_ids": logprobs.top_ids,
                "top_logprobs": logprobs.top_values,
            }
        return columns
