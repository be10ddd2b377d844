"""An accelerator of another package, served as it stands: found, named, right, and without a copy too many."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ..server import Server
from .example_steps import NUM_STEPS
from .site import ROOT, Site, make_site

PROMPTS = ("The capital of France is", "def add(a, b):\n    return", "Once upon a time, in a small village,")
VENDOR_KERNELS = {"rms_norm": "example_rms_norm", "paged_attention": "example_paged_attention"}
MOVES = {
    "copy to device": 3,  # inputs (packed); places of the rows that ask for logprobs, for logits and for tokens
    "copy to host": 5,  # tokens; log-probabilities and ranks, alternatives and theirs
}
"""Of a decode step, however many layers there are: nothing else crosses, and the host waits for no number."""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_site(tmp_path_factory.mktemp("site"), with_example=True)


def test_a_decode_step_moves_what_it_must(site: Site, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "trimaran.tests.contract_suite.example_steps", str(tmp_path)]
    done = subprocess.run(command, env=site.environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["accelerator"] == "example"
    assert len(told["steps"]) == NUM_STEPS
    for step in told["steps"]:
        moved = {name: count for name, count in step.items() if name in ("copy to device", "copy to host", "host read")}
        assert moved == MOVES
    assert len(set(told["held"])) == 1, "a decode step leaves memory behind"


def texts(server: Server) -> list[str]:
    return [
        server.complete(prompt, max_tokens=16, temperature=0, ignore_eos=True)["choices"][0]["text"]
        for prompt in PROMPTS
    ]


@pytest.mark.model
@pytest.mark.timeout(240)
def test_served_by_name(site: Site, demo_file: Path) -> None:
    """The demo model: the same text as on the processor, and the vendor's kernels are named where users look."""
    sizes = ["--dtype", "float32", "--kv-memory-bytes", str(48 << 20), "--max-model-len", "512"]
    options = {"script": None, "environment": site.environment}
    with Server(None, "--platform", "example", *sizes, **options) as server:  # type: ignore[arg-type]
        info = server.http.get("/v1/server_info").json()
        ours = texts(server)
        output = server.output
    with Server(None, "--platform", "cpu", *sizes, **options) as server:  # type: ignore[arg-type]
        expected = texts(server)
    assert ours == expected
    named = {entry["kernel"]: entry["chosen"] for entry in info["kernels"]}
    assert {kernel: named[kernel] for kernel in VENDOR_KERNELS} == VENDOR_KERNELS
    assert not any(entry["demoted"] for entry in info["kernels"])
    for kernel, implementation in VENDOR_KERNELS.items():
        assert f"\nkernel {kernel} = {implementation}\n" in output
    assert "platform example: used: Example One" in output
    assert "\ngraphs = eager: graph_capture: the device has no recordings\n" in output


def test_detected_before_the_processor(site: Site) -> None:
    """Nobody asked for it by name: it is there, so it is used."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trimaran.frontend.launch.commands", "probe", "--json"],
        env=site.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    told = {entry["platform"]: entry for entry in json.loads(done.stdout)}
    assert [name for name, entry in told.items() if entry["chosen"]] == ["example"]
    assert told["cpu"]["refused"] is None


def test_a_vendor_that_does_not_import_is_told(tmp_path: Path) -> None:
    """Its metadata is there and its code is not: the reason stands among the others', and the processor serves."""
    site = make_site(tmp_path / "site")
    site.declare("trimaran-example", {"trimaran.platforms": {"example": "trimaran_example.platform:ExamplePlatform"}})
    done = site.run_suite("example")
    assert done.returncode == 1
    assert (
        "detection.usable: it was refused, so nothing can be judged here: the package trimaran-example" in done.stdout
    )
    assert "No module named 'trimaran_example'" in done.stdout


def test_it_is_not_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert "trimaran.device_workers.contract_suite" in listed
    assert not [name for name in listed if "example" in name]
