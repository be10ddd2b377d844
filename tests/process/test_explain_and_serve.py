"""`explain` against `serve` on this machine: the same options lead to the same decisions, kernels and sizes."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..server import Server
from ..tiny_models import save, save_tokenizer, variants

COMMAND = [sys.executable, "-P", "-m", "trimaran.frontend.launch.commands"]
ONLY_OPENED = {"graphs"}
"""What is decided with the device in hand, and so has no explanation."""
ABOUT_NOW = {"kv_cache_bytes"}
"""Whose reason tells of the memory in use at that moment."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save(variants()["qwen3"], folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One for all, so that kernels are built once and dtypes measured once."""
    return str(tmp_path_factory.mktemp("cache"))


def explained(model: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "explain", str(model), *options, "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def served(model: Path, *options: str) -> dict[str, Any]:
    with Server(model, *options, script=None) as server:
        info: dict[str, Any] = server.http.get("/v1/server_info").json()
        answer = server.http.post("/v1/completions", json={"model": str(model), "prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200, answer.text
    return info


ODD = {
    "as it comes": (),
    "one sequence, large blocks": ("--max-num-seqs", "1", "--block-size", "128", "--max-model-len", "10"),
    "tiny cache": ("--kv-memory-bytes", "200000", "--memory-utilization", "1.0"),
    "two ranks, pinned": (
        *("--tensor-parallel", "2", "--dtype", "float32", "--kernel", "rms_norm=plain_rms_norm"),
        *("--max-batched-tokens", "33", "--max-num-seqs", "33", "--enforce-eager"),
    ),
}


IN_EVERY_RUN = "two ranks, pinned"


@pytest.mark.user_pain("M7")
@pytest.mark.parametrize(
    "case", [case if case == IN_EVERY_RUN else pytest.param(case, marks=pytest.mark.long) for case in ODD]
)
def test_what_was_explained_is_served(model: Path, cache: str, case: str) -> None:
    options = (*ODD[case], "--cache-dir", cache)
    info = served(model, *options)
    done = explained(model, *options)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    real, told = _decisions(info), _decisions(plan)
    for name in real.keys() | told.keys():
        if name in ONLY_OPENED:
            continue
        assert real[name]["value"] == told[name]["value"], name
        assert name in ABOUT_NOW or real[name] == told[name], name
    assert _kernels(info) == _kernels(plan)
    assert info["limits"] == plan["limits"]
    assert info["memory"].keys() == plan["memory"].keys() == {"weights", "activations", "kv_cache"}
    assert info["memory"]["kv_cache"] == plan["memory"]["kv_cache"]
    assert info["memory"]["activations"] == pytest.approx(plan["memory"]["activations"], rel=0.01)
    total = info["devices"][0]["memory_bytes"]
    assert sum(info["memory"].values()) <= total


def _decisions(info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {decision["name"]: decision for decision in info["decisions"]}


def _kernels(info: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    return {found["kernel"]: (found["chosen"], found["pinned"]) for found in info["kernels"]}


@pytest.mark.user_pain("M1")
def test_a_context_that_does_not_fit_is_refused_alike_and_the_named_one_is_served(model: Path, cache: str) -> None:
    options = ("--kv-memory-bytes", "40000", "--cache-dir", cache, "--dtype", "float32")
    wish = ("--max-model-len", "100")
    with Server(model, *options, *wish, script=None, wait=False) as server:
        assert server.ended(30) == 2
        last = server.lines[-1]
    refused = explained(model, *options, *wish)
    assert refused.returncode == 2
    assert refused.stderr.strip().removeprefix("trimaran explain: ") == last.removeprefix("trimaran serve: ")
    largest = re.search(r"iB.*available.*start with --max-model-len (\d+)", last)
    assert largest, last
    info = served(model, *options, "--max-model-len", largest.group(1))
    assert info["limits"]["max_model_len"] == int(largest.group(1))
    automatic = _decisions(served(model, *options))["max_model_len"]
    assert automatic["value"] == largest.group(1) and "the KV cache holds" in automatic["reason"]


@pytest.mark.user_pain("M8")
def test_phases_tell_where_the_time_went_and_the_second_start_compiles_nothing(model: Path, tmp_path: Path) -> None:
    """Of the slowest worker, with what is the supervisor's and the core's: within a twentieth of the wall time."""
    first, second = (_timed_start(model, "--cache-dir", str(tmp_path)) for _ in range(2))
    for took, phases in (first, second):
        assert sum(phases.values()) == pytest.approx(took, rel=0.05, abs=0.3), phases
    compiling = [phases["kernels"] + phases.get("dtype measurement", 0.0) for _, phases in (first, second)]
    assert compiling[1] < 0.3 * compiling[0], "whichever phase is the first to need the C++ kernels builds them"
    assert second[1].get("dtype measurement", 0.0) == 0.0


def _timed_start(model: Path, *options: str) -> tuple[float, dict[str, float]]:
    with Server(model, *options, script=None) as server:
        info = server.http.get("/v1/server_info").json()
    ready = next(found for line in server.lines if (found := re.match(r"Ready after ([\d.]+) s", line)))
    return float(ready.group(1)), {phase["name"]: phase["took_s"] or 0.0 for phase in info["phases"]}


@pytest.mark.user_pain("D8")
def test_without_a_compiler_the_model_is_served_all_the_same(model: Path, tmp_path: Path) -> None:
    """A real empty PATH and an empty cache: said once, before weights, and no traceback."""
    options = ("--cache-dir", str(tmp_path / "cache"))
    with Server(model, *options, script=None, environment={"PATH": str(tmp_path)}) as server:
        answer = server.http.post("/v1/completions", json={"model": str(model), "prompt": "a", "max_tokens": 2})
        kernels = _kernels(server.http.get("/v1/server_info").json())
    assert answer.status_code == 200 and kernels["rms_norm"][0] == "plain_rms_norm"
    assert not any("Traceback" in line for line in server.lines)
    assert any("compiler" in line for line in server.lines)
