"""One run of a group: what was asked for, the time that is left, figures as they come, and what failed."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimaran.tools.device_bench import engines, model_shapes
from trimaran.tools.device_bench.children import PartFailed
from trimaran.tools.device_bench.engines import Engine


@dataclass
class Bench:
    """`keep` is called after each part, so that a run that is cut off keeps what it has."""

    group: str
    out: Path
    port: int
    models: Path
    peer: Path | None
    platform: str | None
    model: Path | None
    is_quick: bool
    limit_s: float
    keep: Callable[["Bench"], object]
    figures: dict[str, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return self.limit_s - (time.monotonic() - self.began_s)

    def part(self, name: str, do: Callable[[], None], *, needs_s: float = 0.0) -> None:
        """Do it if time is left for it. A failure is told and the other parts go on."""
        if self.left_s < needs_s:
            self.notes.append(f"{name}: left out, {self.left_s:.0f} s were left")
            print(self.notes[-1], flush=True)
            return
        began = time.monotonic()
        try:
            do()
            print(f"{name}: done in {time.monotonic() - began:.1f} s", flush=True)
        except PartFailed as error:
            self.failed.append(f"{name}: {str(error).splitlines()[0]}")
            print(f"{name}: FAILED, {error}", flush=True)
        except Exception as error:
            self.failed.append(f"{name}: {error!r}")
            print(f"{name}: FAILED, {error!r}", flush=True)
        self.keep(self)

    def folder(self, shape: str) -> Path:
        """The model to measure as this shape."""
        if self.model is not None:
            return self.model.absolute()
        return model_shapes.write_model(self.models.absolute() / shape, model_shapes.SHAPES[shape])

    def engines(self) -> list[Engine]:
        """Ours first: if time runs out, the peer's figures are missing."""
        found = [engines.trimaran(self.platform)]
        if self.peer is not None:
            folder = self.models.absolute() / "peer"
            folder.mkdir(parents=True, exist_ok=True)
            found.append(engines.vllm(self.peer, folder))
        return found

    def log(self, engine: Engine) -> Path:
        return self.out / f"{self.group}.{engine.name}.log"

    def of(self, engine: Engine) -> dict[str, Any]:
        """Where this engine's figures go."""
        found: dict[str, Any] = self.figures.setdefault(engine.name, {})
        return found
