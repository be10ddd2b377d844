"""The engines that are compared: how each is started, on what it says that it is ready, and in which environment."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MODEL_NAME = "m"


@dataclass(frozen=True)
class Engine:
    """`serve` is followed by the model, the port and `options`. `folder` is where its processes run, None for here."""

    name: str
    python: tuple[str, ...]
    serve: tuple[str, ...]
    options: tuple[str, ...]
    environment: Mapping[str, str]
    ready_path: str
    start_limit_s: float
    folder: Path | None = None

    def command(self, model: Path, port: int) -> list[str]:
        shared = ["--load-format", "dummy", "--dtype", "bfloat16", "--served-model-name", MODEL_NAME]
        return [*self.python, *self.serve, str(model), "--port", str(port), *shared, *self.options]

    def with_caches(self, folder: Path) -> dict[str, str]:
        """The environment with every cache of compiled code below that folder."""
        places = {
            "TRIMARAN_CACHE_DIR": "trimaran",
            "XDG_CACHE_HOME": "xdg",
            "TRITON_CACHE_DIR": "triton",
            "TORCHINDUCTOR_CACHE_DIR": "inductor",
            "VLLM_CACHE_ROOT": "vllm",
            "CUDA_CACHE_PATH": "cuda",
        }
        return {**self.environment, **{name: str(folder / place) for name, place in places.items()}}


def trimaran(platform: str | None) -> Engine:
    flags = ("--no-prefix-caching", *(("--platform", platform) if platform else ()))
    return Engine(
        name="trimaran",
        python=(sys.executable, "-P"),
        serve=("-m", "trimaran.frontend.launch.commands", "serve"),
        options=flags,
        environment={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"},
        ready_path="/ready",
        start_limit_s=180.0,
    )


def vllm(packages: Path, folder: Path) -> Engine:
    """With its Rust front end. It runs in a folder of its own, since ours holds a package named `kernels`."""
    return Engine(
        name="vllm",
        python=(sys.executable, "-P"),
        serve=("-m", "vllm.entrypoints.cli.main", "serve"),
        options=("--no-enable-prefix-caching",),
        environment={
            **os.environ,
            "PYTHONPATH": str(packages),
            "PYTHONUNBUFFERED": "1",
            "VLLM_USE_RUST_FRONTEND": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        },
        ready_path="/health",
        start_limit_s=240.0,
        folder=folder,
    )


def packages_of(peer: Path) -> Path:
    """The folder that holds the package vllm: the given one, or `site` in it. Raises SystemExit with the cure."""
    for folder in (peer.absolute(), peer.absolute() / "site"):
        if (folder / "vllm").is_dir():
            return folder
    raise SystemExit(f"--peer {peer}: holds no package vllm; install it there with `pip install --target {peer} vllm`")
