"""Real servers and workers on machines without the platform asked for, and with platforms of other packages."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from trimaran.device_workers.platforms.plugins import plugin_kernels, plugin_platforms
from trimaran.ipc.conditions import Refusal
from trimaran.ipc.control import Refused
from trimaran.ipc.worker_messages import Settled, WorkerHello

from ..server import Server
from ..tiny_models import save, save_tokenizer, variants
from ..worker_host import WorkerHost

PLATFORMS = ("cuda", "rocm", "xpu", "ascend", "metal", "cpu", "null")
SETTLED = Settled(block_size=16, max_num_seqs=16, max_batched_tokens=256, max_model_len=256)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save(variants()["qwen3"], folder)
    save_tokenizer(folder)
    return folder


def refused_start(model: Path, *arguments: str, environment: dict[str, str] | None = None) -> tuple[int, list[str]]:
    """Exit code and the last ten lines of a server that does not start."""
    with Server(model, *arguments, script=None, wait=False, environment=environment) as server:
        began_s = time.monotonic()
        code = server.ended(20)
        assert time.monotonic() - began_s < 20
        return code, [line for line in server.lines if line.strip()][-10:]


def assert_every_platform_is_told(lines: list[str]) -> None:
    for name in PLATFORMS:
        assert any(re.search(rf"\b{name}: (refused|absent|not tried|present)[^:]*: \S", line) for line in lines), name
    assert "--platform NAME" in lines[-1]


@pytest.mark.user_pain("D1")
def test_a_platform_that_is_not_there_ends_the_start_with_every_reason(model: Path) -> None:
    code, lines = refused_start(model, "--platform", "ascend")
    assert code == 2
    assert_every_platform_is_told(lines)
    assert any("ascend: refused: no Ascend device" in line for line in lines)


@pytest.mark.user_pain("D1")
def test_no_platform_at_all_ends_the_start_with_every_reason(model: Path, tmp_path: Path) -> None:
    """By an injected fact: this machine has a processor and torch, so the packages' list denies torch."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as metadata\n"
        "real = metadata.version\n"
        "def version(name):\n"
        "    if name == 'torch':\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "metadata.version = version\n"
    )
    code, lines = refused_start(model, environment=_with_path(tmp_path))
    assert code == 2
    assert_every_platform_is_told(lines)
    assert any("cpu: refused: PyTorch is not installed: pip install torch" in line for line in lines)


def _with_path(folder: Path) -> dict[str, str]:
    import os

    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


@pytest.mark.user_pain("D2")
def test_more_workers_than_visible_devices_end_the_start(model: Path) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "GPU-11111111-2222-3333-4444-555555555555"}
    code, lines = refused_start(model, "--tensor-parallel", "2", environment=environment)
    assert code == 2
    assert "--tensor-parallel 2 needs device 1" in lines[-1] and "CUDA_VISIBLE_DEVICES=GPU-1111" in lines[-1]


@pytest.mark.user_pain("D3")
def test_the_platform_is_shown_in_the_log_and_by_the_server(model: Path) -> None:
    """Also with variables that hold no numbers."""
    slices = {"CUDA_VISIBLE_DEVICES": "MIG-0a1b2c3d-0000-1111-2222-333344445555", "ZE_AFFINITY_MASK": "0.0,0.1"}
    with Server(model, script=None, environment=slices) as server:
        info = server.http.get("/v1/server_info").json()
        assert '"cpu"' in str(info).replace("'", '"')
        for name in PLATFORMS:
            assert server.printed(rf"worker 0 .*platform {name}: ")
        assert server.printed(r"worker 0 .*platform cpu is used: .*--platform NAME")
        assert server.printed(r"worker 0 .*uses device 0: ")


# -- platforms of other packages

PLUGIN = """
from trimaran.device_workers.platforms.contract import Found, FoundDevice, Look, Refused
from trimaran.device_workers.platforms.cpu import CpuPlatform

class Present(CpuPlatform):
    name = "alpha"
    def look(self):
        return Look(hardware="an alpha")
    def profile(self, index):
        from msgspec.structs import replace
        return replace(super().profile(index), platform="alpha")

class Absent(CpuPlatform):
    name = "beta"
    def look(self):
        return Look(hardware=None, obstacle="no beta is there")
    def detect(self):
        return Refused(reason="no beta is there")
"""


def install(folder: Path, entries: dict[str, dict[str, str]], **modules: str) -> None:
    """A package in a folder of the path, with entry points."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    info = folder / "strangers-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers\nVersion: 1.0\n")
    lines = [
        line
        for group, named in entries.items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in named.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


BOTH = {"trimaran.platforms": {"alpha": "strangers:Present", "beta": "strangers:Absent", "gamma": "nothing:Here"}}


@pytest.fixture
def strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two plug-ins that import and one that does not, seen by this process and its children."""
    folder = tmp_path / "site"
    folder.mkdir()
    install(folder, BOTH, strangers=PLUGIN)
    monkeypatch.setenv("PYTHONPATH", _with_path(folder)["PYTHONPATH"])
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.mark.user_pain("D9")
async def test_every_process_takes_the_same_plug_in(strangers: Path, model: Path, tmp_path: Path) -> None:
    async with WorkerHost(tmp_path, 2, model=str(model), dtype="float32") as host:
        await host.start(SETTLED)
        hellos = [hello for _, hello, _ in await host.expect(WorkerHello)]
    assert [hello.profile.platform for hello in hellos] == ["alpha", "alpha"]
    story = next(decision for decision in hellos[0].decisions if decision.name == "platform")
    assert story.value == "alpha" and "cuda: no NVIDIA device" in story.reason


@pytest.mark.user_pain("D9")
@pytest.mark.parametrize(("name", "reason"), [("beta", "no beta is there"), ("gamma", "cannot be imported")])
async def test_forcing_an_absent_plug_in_is_refused_by_name(
    name: str, reason: str, strangers: Path, model: Path, tmp_path: Path
) -> None:
    async with WorkerHost(tmp_path, 1, model=str(model), platform=name) as host:
        text = (await host.expect_control(Refused)).text
    assert (
        text.startswith(f"--platform {name} cannot be used here:") and f"{name}: refused: " in text and reason in text
    )
    assert "alpha: present, not tried" in text


@pytest.mark.user_pain("D9")
def test_order_names_and_broken_plug_ins(strangers: Path) -> None:
    from trimaran.device_workers.platforms.detection import detect, platforms

    names = [platform.name for platform in platforms()]
    assert names == ["cuda", "rocm", "xpu", "ascend", "metal", "alpha", "beta", "gamma", "cpu", "null"]
    detection = detect()
    assert detection.platform.name == "alpha"
    with pytest.raises(Refusal, match="there is no platform delta; --platform takes .*alpha, beta, gamma"):
        detect("delta")
    taken = plugin_platforms(["alpha"])
    assert taken[0].name == "alpha of strangers" and "taken" in str(taken[0].look().obstacle)


KERNELS = """
from trimaran.kernels.implementation import DeclaredImplementation, FunctionKernel

def load(profile, problem, services):
    from trimaran.kernels.reference.activation import silu_and_mul
    return FunctionKernel(silu_and_mul)

KERNELS = (
    DeclaredImplementation(name="stranger_silu", kernel="silu_and_mul", loader=load),
    DeclaredImplementation(name="stranger_dream", kernel="dream", loader=load),
    DeclaredImplementation(name="plain_silu_and_mul", kernel="silu_and_mul", loader=load),
    DeclaredImplementation(name="stranger_silu", kernel="rms_norm", loader=load),
)
"""


def test_kernels_of_other_packages_go_first(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trimaran.device_workers.boot import describe
    from trimaran.ipc.facts import Problem

    from ..step_driver import make_configuration

    install(
        tmp_path, {"trimaran.kernels": {"a": "stranger_kernels:KERNELS", "b": "nothing:X"}}, stranger_kernels=KERNELS
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    warnings: list[str] = []
    described = describe(make_configuration(model, tmp_path, platform="cpu"), warnings.append)
    problem = Problem(dtype="float32", head_dim=32)
    assert described.registry.resolve("silu_and_mul", described.profile, problem).chosen == "stranger_silu"
    assert described.registry.chain("silu_and_mul")[-1].name == "plain_silu_and_mul", "the reference stays last"
    assert any("stranger_dream is for dream, and there is no such kernel" in text for text in warnings)
    for name in ("plain_silu_and_mul", "stranger_silu"):  # a name is what verdicts, pins and references go by
        assert any(f"the name {name} is taken by another one" in text for text in warnings)
    assert [found.name for found in described.registry.chain("silu_and_mul")].count("plain_silu_and_mul") == 1
    assert any("strangers (nothing:X) are not used: ModuleNotFoundError" in text for text in warnings)
    assert plugin_kernels([], lambda text: None) == ()


def test_no_plug_ins_no_change(tmp_path: Path) -> None:
    found: tuple[Any, ...] = plugin_platforms([])
    assert found == ()
