"""The device benchmark from end to end on a tiny model: no figures that mean anything, but every step of it."""

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from trimaran.tools import bench_device, tune_decodes
from trimaran.tools.device_bench.http_client import Share, drive, figures
from trimaran.tools.device_bench.model_shapes import QWEN3_600M, write_model

from ..server import free_port

if TYPE_CHECKING:
    from trimaran.device_workers.platforms.contract import Backend

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
STAND_IN = '''
"""Answers like the peer: the null platform under the peer's command line."""
import os, sys
arguments = [{{"--no-enable-prefix-caching": "--no-prefix-caching"}}.get(word, word) for word in sys.argv[1:]]
assert os.environ["VLLM_USE_RUST_FRONTEND"] == "1"
os.environ["PYTHONPATH"] = {path!r}
command = [sys.executable, "-P", "-m", "trimaran.frontend.launch.commands", *arguments, "--platform", "null"]
os.execv(sys.executable, command)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), {**QWEN3_600M, **TINY})


def peer(folder: Path, program: str) -> Path:
    """A folder of packages whose vllm runs this program."""
    package = folder / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(program)
    return folder


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, bench_device.__file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def quick(out: Path, model: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return bench("http-m1", str(out), "--quick", "--model", str(model), "--port", str(free_port()), *arguments)


@pytest.mark.long
def test_both_engines_are_measured_recorded_and_rendered(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "h200.json"
    file.write_text(json.dumps({"startup": {"figures": {}, "kept": True}}))
    stand_in = peer(tmp_path / "peer", STAND_IN.format(path=os.environ.get("PYTHONPATH", "")))
    done = quick(tmp_path / "out", model, "--platform", "cpu", "--record", str(file), "--peer", str(stand_in))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout) < 8000, "a terminal keeps its end only"

    record: dict[str, Any] = json.loads(file.read_text())
    assert record["startup"]["kept"], "other groups stay"
    entry = record["http-m1"]
    for engine in ("trimaran", "vllm"):
        loads = entry["figures"][engine]["loads"]
        assert [len(loads[clients]["runs"]) for clients in ("1", "64")] == [1, 2]
        assert loads["64"]["runs"][0]["tokens"] == 64 * 8
        assert (tmp_path / "out" / f"http-m1.{engine}.log").stat().st_size > 0
    assert entry["figures"]["ratio"]["64"]["ttft_ms_median"] > 0
    assert entry["failed"] == []
    assert not entry["is_comparable"]
    assert {"python", "trimaran", "torch", "vllm"} <= set(entry["versions"])

    del record["startup"]
    file.write_text(json.dumps(record))
    rendered = bench("render", str(file), str(tmp_path / "h200.md"))
    assert rendered.returncode == 0, rendered.stderr
    text = (tmp_path / "h200.md").read_text()
    assert "| 64 | ratio | " in text
    assert "not comparable" in text


@pytest.mark.long
def test_what_dies_fails_its_part_with_the_end_of_its_log(model: Path, tmp_path: Path) -> None:
    dies = peer(tmp_path / "peer", "raise SystemExit('no device for me')")
    done = quick(tmp_path / "out", model, "--platform", "null", "--peer", str(dies))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "vllm server: FAILED, the process ended with 1\nno device for me" in done.stdout
    entry = json.loads((tmp_path / "out" / "figures.json").read_text())["http-m1"]
    assert entry["failed"] == ["vllm server: the process ended with 1"]
    assert set(entry["figures"]["trimaran"]["loads"]) == {"1", "64"}


@pytest.mark.long
def test_what_takes_too_long_is_ended(model: Path, tmp_path: Path) -> None:
    done = quick(tmp_path / "out", model, "--platform", "null", "--limit", "0.2")
    assert done.returncode == 1
    assert "not ready after" in done.stdout


@pytest.mark.long
def test_steps_are_profiled(model: Path, tmp_path: Path) -> None:
    """Without the device's side, which only a GPU has."""
    done = bench("profile", str(tmp_path), "--quick", "--model", str(model), "--platform", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "figures.json").read_text())["profile"]["figures"]["trimaran"]
    assert found["ceilings"]["copy_gb_s"] > 0 and found["ceilings"]["matrix_tflop_s"] > 0
    assert set(found["core"]) == {"1", "64", "256"}
    for shape in ("m1", "m2"):
        decode = found[shape]["decodes"]["3 x 16"]
        assert decode["step_ms"] > 0 and decode["build_ms"] > 0
        assert found[shape]["prompts"]["8 behind 16"]["ms"] > 0
    assert found["seen"]["1"]["itl_ms"] > 0
    assert "| m1 3 x 16 |" in page_of(tmp_path)


def page_of(out: Path) -> str:
    rendered = bench("render", str(out / "figures.json"), str(out / "page.md"))
    assert rendered.returncode == 0, rendered.stderr
    return (out / "page.md").read_text()


@pytest.mark.long
def test_choices_are_timed_on_whole_steps_and_compared(model: Path, tmp_path: Path) -> None:
    def tuned(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, tune_decodes.__file__, str(model), str(tmp_path), "--platform", "cpu", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    done = tuned("--tokens", "1,3", "--length", "20", "--grid", "linear_dot_small.rows=16,32")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "tuned.json").read_text())
    variants = {"as it is", "linear_dot_small.rows=16", "linear_dot_small.rows=32"}
    assert {(each["variant"], each["tokens"]) for each in found} == {(name, n) for name in variants for n in (1, 3)}
    assert all(each["ms"] > 0 and each["is_close"] for each in found)
    wrong = tuned("--try", "linear_dot_small.row=16")
    assert wrong.returncode == 1 and wrong.stderr.startswith("capability.best.linear_dot_small has no field row")


def test_variants_of_choices() -> None:
    grid = tune_decodes.variants_of(["a.x=1+b.y=2"], ["a.x=1,2", "b.y=3"])
    assert grid == {
        "as it is": {},
        "a.x=1+b.y=2": {"a": {"x": 1}, "b": {"y": 2}},
        "a.x=1+b.y=3": {"a": {"x": 1}, "b": {"y": 3}},
        "a.x=2+b.y=3": {"a": {"x": 2}, "b": {"y": 3}},
    }
    with pytest.raises(SystemExit, match=r"write KERNEL\.FIELD=VALUE"):
        tune_decodes.variants_of(["rows=3"], [])


def test_a_recorded_step_keeps_its_tensors() -> None:
    """Else the next variant's tensors take their memory, and a replay reads block tables that are none."""

    class Recorder:
        def capture_graph(self, run: Callable[[], None]) -> "Recorder":
            run()
            return self

        def replay(self, *_: object) -> None: ...

    class Step:
        def __call__(self) -> None: ...

    step = Step()
    kept = weakref.ref(step)
    replay = tune_decodes._recorded(cast("Backend", Recorder()), step)
    del step
    replay()
    assert kept() is not None


def test_a_server_that_is_gone_is_a_bad_answer_for_each_request() -> None:
    share = Share(
        port=free_port(), model="m", clients=2, requests=5, prompt_tokens=4, output_tokens=4, ids=(0, 9), seed=1
    )
    found = figures(drive([share, share]), 4)
    assert (found["requests"], found["num_bad"]) == (0, 10)
    assert "ConnectionRefusedError" in found["first_bad"]


def test_a_folder_without_the_peer_is_refused_with_the_cure(tmp_path: Path) -> None:
    done = bench("startup", str(tmp_path), "--peer", str(tmp_path))
    assert done.returncode == 1
    assert "pip install --target" in done.stderr
