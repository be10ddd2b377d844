"""Steps on nothing: the null model with a settable step time and scripted faults. Numpy only."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ...ipc.conditions import Refusal, StepFailed
from ...ipc.facts import Decision, DeviceHealth, DeviceProfile, ModelFacts, PoolingFacts
from ...ipc.plan import StepPlan, StepResult, TokenMasks
from ...ipc.worker_messages import Settled
from ..execution.contract import FinishedStep, LoadFacts, OnFraction, PendingStep, Spending
from ..execution.progress import Progress
from ..models.embedding_files import pooling_of, read_embedding_files
from ..models.encoder_config import EncoderConfig, read_encoder
from .contract import Backend
from .null_model import NullModel, NullScript, with_invalid_row

_SLICE_S = 0.05
_KV_BYTES_PER_TOKEN = 20
_KV_BUDGET_BYTES = 64 << 20
_MAX_MODEL_LEN = 8192
_VOCAB_SIZE = 32_000
_NUM_DIMENSIONS = 64


@dataclass(frozen=True, kw_only=True)
class NullFaults:
    """Steps (counted from 1 in this process) at which something goes wrong, in generations up to `until_generation`.

    hang: the step never ends. die: the process is killed. wrong: this rank's token hash differs, unless it is rank 0.
    fail: the step runs out of memory. error: the step cannot be done. nan: its first sampled row is broken.
    `leak_bytes` of host memory are never given back at each step.
    """

    hang: frozenset[int] = frozenset()
    die: frozenset[int] = frozenset()
    wrong: frozenset[int] = frozenset()
    fail: frozenset[int] = frozenset()
    error: frozenset[int] = frozenset()
    nan: frozenset[int] = frozenset()
    leak_bytes: int = 0
    until_generation: int | None = None

    def act_in(self, generation: int) -> bool:
        return self.until_generation is None or generation <= self.until_generation


@dataclass(frozen=True, kw_only=True)
class NullPace:
    """How long things take: per step, per prompt token of a step, for loading."""

    step_s: float = 0.0
    prefill_s_per_token: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class NullSettings:
    """The whole script, and the sizes the null model claims (None: from the model's config, or small ones)."""

    script: NullScript
    faults: NullFaults
    pace: NullPace
    vocab_size: int | None = None
    max_model_len: int | None = None
    kv_budget_bytes: int = _KV_BUDGET_BYTES


def parse_script(text: str) -> NullSettings:
    """From words such as "step_ms=10 mode=cycle:1,2,3 hang_at=5,9", separated by blanks or semicolons. Raises
    Refusal.
    """
    values: dict[str, str] = {}
    for word in text.replace(";", " ").split():
        name, separator, value = word.partition("=")
        if not separator or name not in _READERS:
            raise Refusal(f"null script: {word!r} is not known; write NAME=VALUE with one of {', '.join(_READERS)}")
        values[name] = value
    try:
        return _settings({name: _READERS[name](value) for name, value in values.items()})
    except ValueError as error:
        raise Refusal(f"null script: {error} in {text!r}") from None


def _steps(text: str) -> frozenset[int]:
    return frozenset(int(part) for part in text.split(","))


_READERS: dict[str, Callable[[str], object]] = {
    "step_ms": float,
    "prefill_us_per_token": float,
    "load_ms": float,
    "mode": str,
    "end_after": int,
    "end_id": int,
    "low_id": int,
    "reads": str,
    "hang_at": _steps,
    "die_at": _steps,
    "wrong_at": _steps,
    "fail_at": _steps,
    "error_at": _steps,
    "nan_at": _steps,
    "leak_kib_per_step": int,
    "until_generation": int,
    "vocab_size": int,
    "max_model_len": int,
    "kv_budget_bytes": int,
}


def _settings(read: dict[str, object]) -> NullSettings:
    mode, _, cycle = str(read.pop("mode", "hash")).partition(":")
    tokens = tuple(int(part) for part in cycle.split(",")) if cycle else ()
    said: dict[str, object] = {name: read[name] for name in ("end_after", "end_id", "low_id", "reads") if name in read}
    faults: dict[str, object] = {
        name: read[f"{name}_at"] for name in ("hang", "die", "wrong", "fail", "error", "nan") if f"{name}_at" in read
    }
    if "leak_kib_per_step" in read:
        faults["leak_bytes"] = _count(read, "leak_kib_per_step") << 10
    if "until_generation" in read:
        faults["until_generation"] = read["until_generation"]
    pace = NullPace(
        step_s=_number(read, "step_ms") / 1e3,
        prefill_s_per_token=_number(read, "prefill_us_per_token") / 1e6,
        load_s=_number(read, "load_ms") / 1e3,
    )
    sizes: dict[str, object] = {
        name: read[name] for name in ("vocab_size", "max_model_len", "kv_budget_bytes") if name in read
    }
    script: dict[str, object] = {"mode": mode, "cycle": tokens, **said}
    whole: dict[str, object] = {"script": script, "faults": faults, "pace": pace, **sizes}
    return msgspec.convert(whole, NullSettings, from_attributes=True)


def _number(read: dict[str, object], name: str) -> float:
    value = read.get(name, 0.0)
    assert isinstance(value, float)
    return value


def _count(read: dict[str, object], name: str) -> int:
    value = read[name]
    assert isinstance(value, int)
    return value


def null_model_facts(model: str, settings: NullSettings, max_model_len: int | None) -> ModelFacts:
    """Sizes of the model whose tokens are simulated: its own vocabulary and length where it has a configuration. An
    encoder's vectors are simulated too.
    """
    vocab_size, limit = _configured(model)
    encoder = read_encoder(Path(model))
    if encoder is not None:
        limit = encoder.max_tokens
    vocab_size = settings.vocab_size or vocab_size
    limit = settings.max_model_len or limit
    if max_model_len is not None and max_model_len > limit:
        raise Refusal(
            f"--max-model-len {max_model_len} is more than the model's {limit} positions; take at most {limit}"
        )
    return ModelFacts(
        architecture="null",
        num_layers=1,
        hidden_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=vocab_size,
        max_model_len=max_model_len or limit,
        dtype="float32",
        kv_dtype="float32",
        num_parameters=0,
        tensor_parallel_sizes=(1,),
        weight_bytes=0,
        kv_bytes_per_token=_KV_BYTES_PER_TOKEN if encoder is None else 0,
        pooling=_pooling(Path(model), encoder),
    )


def _pooling(directory: Path, encoder: EncoderConfig | None) -> PoolingFacts | None:
    """Of an encoder; of a decoder whose files say that it makes vectors."""
    if encoder is not None:
        return encoder.pooling
    return pooling_of(read_embedding_files(directory), _NUM_DIMENSIONS)


class _Sizes(msgspec.Struct):
    vocab_size: int = _VOCAB_SIZE
    max_position_embeddings: int = _MAX_MODEL_LEN


def _configured(model: str) -> tuple[int, int]:
    path = Path(model) / "config.json"
    try:
        sizes = msgspec.json.decode(path.read_bytes(), type=_Sizes)
    except (OSError, msgspec.MsgspecError):
        sizes = _Sizes()
    return sizes.vocab_size, sizes.max_position_embeddings


class NullEngine:
    """A StepEngine without tensors."""

    def __init__(
        self,
        backend: Backend,
        settings: NullSettings,
        model: ModelFacts,
        decisions: tuple[Decision, ...],
        *,
        rank: int,
        generation: int,
    ) -> None:
        self.profile: DeviceProfile = backend.profile
        self.model = model
        self.decisions = decisions
        self.spending: Spending | None = None
        self.progress = Progress()
        self._backend = backend
        self._settings = settings
        self._rank = rank
        self._faulty = settings.faults.act_in(generation)
        self._num_steps = 0
        self._ends_s = 0.0
        self._leaked: list[bytes] = []

    def load(self, settled: Settled, on_fraction: OnFraction) -> LoadFacts:
        self._settled = settled
        began, load_s = time.monotonic(), self._settings.pace.load_s
        while (passed := time.monotonic() - began) < load_s:
            on_fraction("weights", passed / load_s)
            time.sleep(min(_SLICE_S, load_s - passed))
        on_fraction("weights", 1.0)
        return LoadFacts(
            resolutions=(),
            decisions=self.decisions,
            memory=self._backend.memory_facts(),
            weight_bytes=0,
            activation_bytes=0,
            kv_budget_bytes=self._settings.kv_budget_bytes,
            kv_bytes_per_block=self.model.kv_bytes_per_token * settled.block_size,
        )

    def allocate(self, num_blocks: int) -> None:
        self._num_bytes = num_blocks * self._settled.block_size * _KV_BYTES_PER_TOKEN
        self._model = NullModel(
            num_blocks=num_blocks,
            block_size=self._settled.block_size,
            max_model_len=self._settled.max_model_len,
            vocab_size=self.model.vocab_size,
            script=self._settings.script,
            pooling=self.model.pooling,
        )

    def warm_up(self) -> dict[str, int]:
        return {"weights": 0, "activations": 0, "kv_cache": self._num_bytes}

    def forward(self, plan: StepPlan) -> None:
        self._began_s = time.monotonic()
        self._num_steps += 1
        self.progress.begin(int(plan.step[0]))
        pace = self._settings.pace
        self._ends_s = self._began_s + pace.step_s + pace.prefill_s_per_token * len(plan.token_ids)
        self._strike_before()
        self._model.forward(plan)

    def sample(self, masks: TokenMasks | None) -> PendingStep:
        result = self._model.sample(masks)
        self._pass_time()
        self.progress.end()
        result.seconds = np.array([0.0, time.monotonic() - self._began_s, 0.0, 0.0])
        return FinishedStep(self._strike_after(result))

    def health(self) -> DeviceHealth:
        return self._backend.health()

    def drop_rows(self) -> None:
        self._model.drop_rows()
        self.progress.end()

    def _pass_time(self) -> None:
        while (left := self._ends_s - time.monotonic()) > 0:
            time.sleep(min(left, _SLICE_S))
            self.progress.bump()

    def _strikes(self, steps: frozenset[int]) -> bool:
        return self._faulty and self._num_steps in steps

    def _strike_before(self) -> None:
        faults = self._settings.faults
        if self._faulty and faults.leak_bytes:
            self._leaked.append(b"x" * faults.leak_bytes)
        while self._strikes(faults.hang):
            time.sleep(1.0)
        if self._strikes(faults.die):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._strikes(faults.fail):
            raise MemoryError("the null script ran this step out of memory")
        if self._strikes(faults.error):
            raise StepFailed("the null script failed this step")

    def _strike_after(self, result: StepResult) -> StepResult:
        faults = self._settings.faults
        if self._strikes(faults.nan):
            result = with_invalid_row(result)
        if self._strikes(faults.wrong) and self._rank > 0:
            result.tokens_hash = result.tokens_hash ^ np.uint64(1)
        return result
