"""Checkpoints that do not fit are refused by name before anything is served; caches that are broken cost a warning."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trimaran.device_workers.boot import describe, open_engine
from trimaran.device_workers.models.config import read_config
from trimaran.device_workers.models.parameters import parameters
from trimaran.device_workers.weights.dummy_source import DummySource
from trimaran.device_workers.weights.safetensors_source import SafetensorsSource
from trimaran.ipc.conditions import Refusal

from ..step_driver import SETTLED, Row, StepDriver, make_configuration, start_engine
from ..tiny_models import save, variants
from .greedy import count_ties

LLAMA = variants()["llama"]


def change(directory: Path, edit: dict[str, torch.Tensor | None]) -> None:
    weights = load_file(directory / "model.safetensors")
    for name, tensor in edit.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def check(directory: Path) -> None:
    SafetensorsSource(directory).check(parameters(read_config(directory)))


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    save(LLAMA, tmp_path)
    check(tmp_path)
    change(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    check(tmp_path)
    change(tmp_path, {"model.layers.1.mlp.down_proj.scales": torch.ones(3)})
    with pytest.raises(Refusal, match=r"down_proj\.scales"):
        check(tmp_path)
    change(tmp_path, {"model.layers.1.mlp.down_proj.scales": None, "model.norm.weight": torch.ones(65)})
    with pytest.raises(Refusal, match=r"model\.norm\.weight .* \(65,\)"):
        check(tmp_path)
    change(tmp_path, {"model.norm.weight": None})
    with pytest.raises(Refusal, match=r"lacks model\.norm\.weight"):
        check(tmp_path)


def test_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    save(LLAMA, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Refusal, match="cut off or damaged"):
        SafetensorsSource(tmp_path)
    path.unlink()
    with pytest.raises(Refusal, match="holds neither"):
        SafetensorsSource(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save(LLAMA, tmp_path, shard_bytes="60KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(Refusal, match=gone.name):
        SafetensorsSource(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(Refusal, match="cannot be read"):
        SafetensorsSource(tmp_path)


def test_slices_and_progress(tmp_path: Path) -> None:
    save(LLAMA, tmp_path)
    seen: list[tuple[int, int]] = []
    source = SafetensorsSource(tmp_path, lambda done, total: seen.append((done, total)))
    needed = parameters(read_config(tmp_path))
    whole = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(source.read(needed[name], rows=(3, 9)), whole[name][3:9])
    assert torch.equal(source.read(needed[name], columns=(10, 20)), whole[name][:, 10:20])
    assert seen == [(6 * 96 * 4, seen[0][1]), (6 * 96 * 4 + 64 * 10 * 4, seen[0][1])]


def test_dummy_weights_come_from_the_config_alone(tmp_path: Path) -> None:
    LLAMA.architectures = ["LlamaForCausalLM"]
    LLAMA.save_pretrained(tmp_path)
    engine, _ = start_engine(tmp_path, tmp_path, load_format="dummy", dtype="float32")
    row = Row(row=0, tokens=[1, 2, 3])
    StepDriver(engine).generate([row], 4)
    assert len(row.tokens) == 7
    needed = parameters(read_config(tmp_path))["model.layers.0.mlp.up_proj.weight"]
    ranks = [DummySource(3, torch.float32).read(needed, rows=rows) for rows in ((0, 48), (48, 96))]
    assert torch.equal(torch.cat(ranks), DummySource(3, torch.float32).read(needed))


def load_with(cache: Path, model: Path, warnings: list[str]) -> tuple[dict[str, str], list[int]]:
    """Kernel choices and tokens of a start, in a process whose library is not open yet."""
    import trimaran.kernels.in_cpp.library as library

    library._opened.clear()
    configuration = make_configuration(model, cache, dtype="float32")
    engine = open_engine(configuration, describe(configuration, warnings.append), warnings.append, lambda name: None)
    facts = engine.load(SETTLED, lambda name, fraction: None)
    engine.allocate(300)
    engine.warm_up()
    row = Row(row=0, tokens=[5, 6, 7])
    StepDriver(engine).generate([row], 6)
    return {resolution.kernel: resolution.chosen for resolution in facts.resolutions}, row.tokens[3:]


_LONG_HARMS = [pytest.param(harm, marks=pytest.mark.long) for harm in ("truncated library", "unusable directory")]


@pytest.mark.user_pain("M9")
@pytest.mark.parametrize("harm", ["none", "torn verdicts", *_LONG_HARMS])
def test_broken_caches_cost_a_warning_and_not_the_start(tmp_path: Path, harm: str) -> None:
    model, cache, cut_at = tmp_path / "model", tmp_path / "cache", 7
    warnings: list[str] = []
    reference = save(LLAMA, model)
    load_with(cache, model, warnings)
    assert not warnings
    cache = shutil.copytree(cache, tmp_path / "copy")  # the loader knows the first file by its path
    if harm == "truncated library":
        (built,) = (cache / "cpp").glob("kernels-*.so")
        built.write_bytes(built.read_bytes()[: cut_at * built.stat().st_size // 10])
    elif harm == "torn verdicts":
        (cache / "kernel-verdicts.json").write_text('{"a')
    elif harm == "unusable directory":
        cache = tmp_path / "file"
        cache.write_text("in the way")
    chosen, tokens = load_with(cache, model, warnings)
    assert chosen["paged_attention"] == "cpp_paged_attention"
    assert count_ties(reference, [5, 6, 7], tokens) == 0
    assert len(warnings) == {"none": 0, "unusable directory": 2}.get(harm, 1), warnings


@pytest.mark.user_pain("M9")
def test_two_starts_at_once_share_an_empty_cache(tmp_path: Path) -> None:
    """Both build; each sees a whole file, and one library is left."""
    code = (
        "from pathlib import Path\n"
        "import torch\n"
        "from trimaran.kernels.in_cpp.launches import CppSiluAndMul\n"
        "from trimaran.kernels.in_cpp.library import open_library\n"
        "def warn(text): raise SystemExit(text)\n"
        f"kernel = CppSiluAndMul(open_library(Path({str(tmp_path)!r}), 1, warn))\n"
        "out = torch.zeros(1, 4)\n"
        "kernel(out, torch.ones(1, 8))\n"
        "assert abs(float(out[0, 0]) - 0.7310586) < 1e-6\n"
    )
    starts = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [start.wait(60) for start in starts] == [0, 0]
    assert [path.suffix for path in (tmp_path / "cpp").iterdir()] == [".so"]


@pytest.mark.user_pain("M9")
def test_no_compiler_falls_back_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = save(LLAMA, tmp_path / "model")
    monkeypatch.setenv("PATH", str(tmp_path))
    engine, facts = start_engine(tmp_path / "model", tmp_path / "cache", dtype="float32")
    attention = next(resolution for resolution in facts.resolutions if resolution.kernel == "paged_attention")
    assert attention.chosen == "gathered_attention"
    assert "cpp_compiler" in attention.rejected["cpp_paged_attention"]
    row = Row(row=0, tokens=[5, 6, 7])
    StepDriver(engine).generate([row], 6)
    assert count_ties(reference, [5, 6, 7], row.tokens[3:]) == 0


def test_a_compiler_that_fails_is_demoted_with_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trimaran.kernels.in_cpp.library as library

    save(LLAMA, tmp_path / "model")
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'error: out of patience' >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin:/bin")
    library._opened.clear()
    _, facts = start_engine(tmp_path / "model", tmp_path / "cache", dtype="float32")
    library._opened.clear()
    linear = next(resolution for resolution in facts.resolutions if resolution.kernel == "linear")
    assert linear.chosen == "plain_linear"
    assert "out of patience" in linear.demoted["cpp_linear"]


def test_head_beside_a_tied_embedding_is_ignored(tmp_path: Path) -> None:
    save(variants()["llama_tied"], tmp_path)
    change(tmp_path, {"lm_head.weight": torch.ones(300, 64)})
    check(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
