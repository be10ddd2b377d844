"""Where a model comes from: folders, GGUF files, the demo, a hub; and never a connection for a path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trimaran.frontend.launch import model_source
from trimaran.frontend.launch.model_source import GgufFile, HubModel, LocalFolder, find_model
from trimaran.ipc.conditions import Refusal

from ..hub_server import COMMIT, hub

MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(3_000_000),
    "pytorch_model.bin": b"pickle",
    "original/consolidated.00.pth": b"pickle",
}


def folder(path: Path, *files: str) -> Path:
    path.mkdir(parents=True)
    for name in files:
        (path / name).write_text("{}")
    return path


def test_what_a_word_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = folder(tmp_path / "own" / "model", "config.json", "model-00001-of-00002.safetensors")
    assert find_model(str(model)) == LocalFolder(model, str(model))
    monkeypatch.chdir(tmp_path)
    assert find_model("own/model/") == LocalFolder(model, "own/model"), "a folder goes before a hub name"
    shape = folder(tmp_path / "shape", "config.json")
    assert find_model(str(shape), weights_needed=False) == LocalFolder(shape, str(shape))
    (tmp_path / "Tiny-1B.Q4_K_M.gguf").touch()
    (tmp_path / "Tiny-1B-Q8_0-00001-of-00002.gguf").touch()
    assert find_model("Tiny-1B.Q4_K_M.gguf") == GgufFile(tmp_path / "Tiny-1B.Q4_K_M.gguf", "Tiny-1B")
    split = "Tiny-1B-Q8_0-00001-of-00002.gguf"
    assert find_model(split) == GgufFile(tmp_path / split, "Tiny-1B")
    only = folder(tmp_path / "only", "m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf")
    assert find_model("only") == GgufFile(only / "m-F16-00001-of-00002.gguf", "m")
    assert find_model("owner/model", revision="v1") == HubModel("owner/model", "v1")
    assert find_model("gpt2") == HubModel("gpt2", None)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("/no/such", "no such file or folder"),
        ("./no/such", "no such file or folder"),
        ("~/no-such-folder", "no such file or folder"),
        ("a/b/c", "no such file or folder"),
        ("absent.gguf", "no such file or folder"),
        ("bare", "holds no config.json"),
        ("two", "several GGUF models: a.gguf, b.gguf"),
        ("pickled", r"no .safetensors weights \(.bin files are not read.*--load-format dummy"),
        ("text.txt", "only .gguf files"),
    ],
)
def test_refusals_end_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, expected: str) -> None:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "bare", "readme")
    folder(tmp_path / "two", "a.gguf", "b.gguf")
    folder(tmp_path / "pickled", "config.json", "pytorch_model.bin")
    (tmp_path / "text.txt").touch()
    with pytest.raises(Refusal, match=expected):
        find_model(word)


def test_the_demo_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = folder(tmp_path / "trimaran_demo_for_test", "tiny.gguf")
    (package / "__init__.py").write_text("raise ImportError('wants a C++ library')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(model_source, "DEMO_PACKAGE", package.name)
    assert find_model(None) == GgufFile(package / "tiny.gguf", "SmolLM2-135M-Instruct", model_source.DEMO_SAMPLING)
    monkeypatch.setattr(model_source, "DEMO_PACKAGE", "trimaran_demo_that_is_not_there")
    with pytest.raises(Refusal, match="trimaran demo install"):
        find_model(None)


def fetch(home: Path, endpoint: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trimaran.frontend.launch.hub_download", *arguments],
        env={**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_hub_model_is_fetched_once_with_progress(tmp_path: Path) -> None:
    with hub({"owner/model": MODEL}) as (endpoint, asked):
        done = fetch(tmp_path, endpoint, "owner/model")
        assert done.returncode == 0, done.stdout + done.stderr
        *told, last = done.stdout.splitlines()
        path = Path(last.removeprefix("done "))
        assert {file.name for file in path.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
        assert (path / "model.safetensors").stat().st_size == 3_000_000
        assert told and all(line.startswith("progress ") for line in told) and "3 MB" in told[-1]
        assert not [line for line in asked if "pytorch_model" in line or "original" in line]
        asked.clear()
        assert fetch(tmp_path, endpoint, "owner/model").stdout.splitlines()[-1] == last
        assert not [line for line in asked if "resolve" in line], "the second start fetches no file"
    after = fetch(tmp_path, endpoint, "owner/model")  # the hub is gone, the cache is whole
    assert after.stdout.splitlines()[-1] == last, after.stdout + after.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["owner/absent"], "The hub has no model 'owner/absent'"),
        (["gated/model"], "Accept them"),
        (["owner/model", "v9"], "has no revision 'v9'"),
        (["owner/empty"], "no .safetensors weights"),
    ],
)
def test_what_the_hub_does_not_give(tmp_path: Path, arguments: list[str], expected: str) -> None:
    with hub({"owner/model": MODEL, "owner/empty": {"config.json": b"{}"}}) as (endpoint, _):
        done = fetch(tmp_path, endpoint, *arguments)
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 2 and last.startswith("refused ") and expected in last, done.stdout + done.stderr


def test_a_shape_is_fetched_without_its_weights(tmp_path: Path) -> None:
    with hub({"owner/model": MODEL}) as (endpoint, asked):
        done = fetch(tmp_path, endpoint, "owner/model", "--without-weights")
    assert done.returncode == 0 and not [line for line in asked if "safetensors" in line], done.stdout


@pytest.mark.user_pain("D10")
def test_offline_is_said_with_the_cure(tmp_path: Path) -> None:
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        done = fetch(tmp_path, "http://127.0.0.1:9", "owner/model", **environment)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "cannot be reached" in done.stdout and "name its folder" in done.stdout, done.stdout
        assert len(done.stdout.splitlines()) == 1


@pytest.mark.user_pain("D10")
def test_a_commit_is_fetched_by_its_hash(tmp_path: Path) -> None:
    with hub({"owner/model": MODEL}) as (endpoint, _):
        done = fetch(tmp_path, endpoint, "owner/model", COMMIT)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].endswith(COMMIT)
