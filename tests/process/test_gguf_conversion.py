"""GGUF files become Hugging Face folders: every encoding and architecture, split files, refusals, and the cache."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from trimaran.device_workers.weights.from_gguf import conversion, safetensors_file
from trimaran.device_workers.weights.from_gguf.conversion import Told, converted
from trimaran.device_workers.weights.from_gguf.rope import llama3_factors
from trimaran.device_workers.weights.from_gguf.source import Refused

from ..gguf_files import HEAD_DIM, LAYERS, TOKENS, byte_level_tokenizer, random_weights, write_gguf

QUIET = Told(lambda fraction, what: None, lambda text: None)
MODULE = "trimaran.device_workers.weights.from_gguf"


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor in float32, whatever it is stored in."""
    import torch

    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).to(torch.float32).numpy() for name in file.keys()}  # noqa: SIM118


@pytest.mark.user_pain("L1")
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_float32_weights_come_out_bit_equal(tmp_path: Path, architecture: str, tied: bool) -> None:
    weights = random_weights(architecture, tied=tied)
    folder = converted(write_gguf(tmp_path / "m.gguf", architecture, weights), tmp_path / "cache", QUIET)
    found = tensors_of(folder)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)
    config = config_of(folder)
    assert config["tie_word_embeddings"] is tied
    assert config["torch_dtype"] == config["dtype"] == "float32"
    assert config["num_hidden_layers"] == LAYERS and config["vocab_size"] == len(TOKENS)
    assert config["rms_norm_eps"] == 1e-5


@pytest.mark.parametrize(
    ("kind", "dtype", "loss"),
    [
        ("F16", "float16", 1e-3),
        ("BF16", "bfloat16", 4e-3),
        ("Q8_0", "bfloat16", 0.01),
        ("Q5_0", "bfloat16", 0.06),
        ("Q5_1", "bfloat16", 0.06),
        ("Q4_0", "bfloat16", 0.12),
        ("Q4_1", "bfloat16", 0.12),
    ],
)
def test_every_encoding_is_what_the_library_says_rounded_once(
    tmp_path: Path, kind: str, dtype: str, loss: float
) -> None:
    weights = random_weights("qwen3")
    path = write_gguf(tmp_path / "m.gguf", "qwen3", weights, kind=kind)
    folder = converted(path, tmp_path / "cache", QUIET)
    found = tensors_of(folder)
    tensor_type = gguf.GGMLQuantizationType[kind]
    for name, weight in weights.items():
        value = gguf.dequantize(gguf.quantize(weight, tensor_type), tensor_type) if weight.ndim > 1 else weight
        expected = safetensors_file.encoded(value, dtype)
        if dtype == "bfloat16":
            expected = (expected.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(found[name], expected.astype(np.float32), err_msg=name)
        assert np.abs(found[name] - weight).max() <= loss * np.abs(weight).max(), name
    assert config_of(folder)["dtype"] == dtype


def test_rounding_to_bfloat16_is_that_of_torch() -> None:
    import torch

    bits = np.random.default_rng(0).integers(0, 2**32, 1 << 18, dtype=np.uint32)
    values = np.concatenate([bits.view(np.float32), np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38])])
    ours = (safetensors_file.encoded(values, "bfloat16").astype(np.uint32) << 16).view(np.float32)
    theirs = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(ours, theirs)


def test_large_tensors_are_converted_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights("llama")
    path = write_gguf(tmp_path / "m.gguf", "llama", weights, kind="Q8_0")
    whole = tensors_of(converted(path, tmp_path / "whole", QUIET))
    monkeypatch.setattr(conversion, "SLICE_BYTES", 3 * 64 * 4)
    told: list[float] = []
    folder = converted(path, tmp_path / "sliced", Told(lambda fraction, what: told.append(fraction), lambda text: None))
    assert len(told) > 100 and told == sorted(told) and told[-1] == 1.0
    for name, value in tensors_of(folder).items():
        np.testing.assert_array_equal(value, whole[name], err_msg=name)


@pytest.mark.user_pain("L1")
@pytest.mark.parametrize("named", ["00001", "00002", "00003"])
def test_split_files_are_one_model_whichever_part_is_named(tmp_path: Path, named: str) -> None:
    weights = random_weights("qwen2")
    first = write_gguf(tmp_path / "m.gguf", "qwen2", weights, parts=3)
    path = first.with_name(first.name.replace("00001", named, 1))
    found = tensors_of(converted(path, tmp_path / "cache", QUIET))
    assert found.keys() == weights.keys()
    np.testing.assert_array_equal(found["model.norm.weight"], weights["model.norm.weight"])
    first.with_name("m-00002-of-00003.gguf").unlink()
    with pytest.raises(Refused, match="m-00002-of-00003.gguf is missing"):
        converted(first, tmp_path / "cache", QUIET)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope.freq_base": 5e5}, {"rope_type": "default", "rope_theta": 500000.0}),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
            {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rotary_scaling_from_metadata(tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any]) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen2", random_weights("qwen2"), metadata=metadata)
    config = config_of(converted(path, tmp_path / "cache", QUIET))
    assert config["rope_parameters"] == expected
    assert config["rope_theta"] == expected["rope_theta"]
    scaled = expected["rope_type"] != "default"
    assert config["rope_scaling"] == ({k: v for k, v in expected.items() if k != "rope_theta"} if scaled else None)


def test_llama3_scaling_is_recovered_from_its_factors(tmp_path: Path) -> None:
    factors = llama3_factors(500000.0, HEAD_DIM, 32.0).astype(np.float32)
    assert factors[0] == 1.0 and factors[-1] == 32.0
    arguments: dict[str, Any] = {"metadata": {"rope.freq_base": 500000.0}}
    path = write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama"), rope_factors=factors, **arguments)
    assert config_of(converted(path, tmp_path / "cache", QUIET))["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors[3] *= 1.5
    path = write_gguf(tmp_path / "other.gguf", "llama", random_weights("llama"), rope_factors=factors, **arguments)
    with pytest.raises(Refused, match="not those of llama3"):
        converted(path, tmp_path / "cache", QUIET)


@pytest.mark.user_pain("L1")
def test_refusals_name_what_is_supported(tmp_path: Path) -> None:
    weights = random_weights("llama")
    cases: list[tuple[Path, list[str]]] = [
        (write_gguf(tmp_path / "a.gguf", "mamba", weights), ["'mamba'", "llama, qwen2, qwen3"]),
        (write_gguf(tmp_path / "b.gguf", "llama", weights, metadata={"expert_count": 8}), ["with experts"]),
        (write_gguf(tmp_path / "c.gguf", "llama", weights, omit=("block_count",)), ["llama.block_count", "newer"]),
        (tmp_path / "absent.gguf", ["is not a file"]),
        (
            write_gguf(tmp_path / "d.gguf", "llama", weights, tokenizer=byte_level_tokenizer("klingon")),
            ["'klingon'", "llama-bpe", "qwen2", "--tokenizer"],
        ),
        (
            write_gguf(tmp_path / "e.gguf", "llama", weights, tokenizer={"ggml.model": "bert", "ggml.tokens": TOKENS}),
            ["tokenizer 'bert'", "gpt2, llama", "--tokenizer"],
        ),
        (
            write_gguf(tmp_path / "f.gguf", "llama", weights, metadata={"rope.scaling.type": "longrope"}),
            ["'longrope'", "linear, yarn and llama3"],
        ),
    ]
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(write_gguf(tmp_path / "g.gguf", "llama", weights).read_bytes()[:-4096])
    cases.append((cut, ["not a whole GGUF file", "Fetch it again"]))
    foreign = tmp_path / "foreign.gguf"
    foreign.write_bytes(b"PK\x03\x04" + bytes(4096))
    cases.append((foreign, ["not a whole GGUF file"]))
    for path, words in cases:
        with pytest.raises(Refused) as caught:
            converted(path, tmp_path / "cache", QUIET)
        assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_an_unsupported_encoding_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 144), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(Refused, match=r"Q4_K \(token_embd.weight\).*F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0"):
        converted(path, tmp_path / "cache", QUIET)


def test_a_given_tokenizer_makes_the_file_s_own_needless(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama"), tokenizer=byte_level_tokenizer("klingon"))
    folder = converted(path, tmp_path / "cache", QUIET, with_tokenizer=False)
    assert (folder / "model.safetensors").exists() and not (folder / "tokenizer.json").exists()


def test_special_tokens_template_and_ends(tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama")), tmp_path / "cache", QUIET)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", "<unk>")
    assert "m.content" in config["chat_template"] and config["model_max_length"] == 512
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("a the<tool>x</s>").ids
    assert [TOKENS[i] for i in ids] == ["a", "Ġthe", "<tool>", "x", "</s>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a the<tool>x"
    assert os.stat(folder / "model.safetensors").st_mode & 0o444 == 0o444


# The cache


def count_conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    made: list[Path] = []
    fill = conversion._fill

    def counted(folder: Path, *arguments: Any, **keywords: Any) -> None:
        made.append(folder)
        fill(folder, *arguments, **keywords)

    monkeypatch.setattr(conversion, "_fill", counted)
    return made


@pytest.mark.user_pain("M9")
def test_a_second_start_reuses_and_a_damaged_cache_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama"))
    made = count_conversions(monkeypatch)
    warnings: list[str] = []
    told = Told(lambda fraction, what: None, warnings.append)
    folder = converted(path, tmp_path / "cache", told)
    assert converted(path, tmp_path / "cache", told) == folder and len(made) == 1 and not warnings
    whole = (folder / "model.safetensors").read_bytes()
    for damage in (
        lambda: os.truncate(folder / "model.safetensors", 100),
        lambda: (folder / "tokenizer.json").unlink(),
        lambda: (folder / "conversion.json").write_text("{"),
    ):
        warnings.clear()
        damage()
        assert converted(path, tmp_path / "cache", told) == folder
        assert len(warnings) == 1 and "made anew" in warnings[0]
        assert (folder / "model.safetensors").read_bytes() == whole
    assert len(made) == 4


def test_a_changed_file_is_converted_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama"))
    first = converted(path, tmp_path / "cache", QUIET)
    write_gguf(path, "llama", random_weights("llama", seed=1))
    os.utime(path, ns=(0, time.time_ns() + 1_000_000))
    second = converted(path, tmp_path / "cache", QUIET)
    assert second != first
    assert (first / "model.safetensors").read_bytes() != (second / "model.safetensors").read_bytes()


@pytest.mark.user_pain("M9")
def test_simultaneous_starts_convert_once_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama"))
    made = count_conversions(monkeypatch)
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(converted(path, tmp_path / "cache", QUIET))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4 and len(set(folders)) == 1 and len(made) == 1


def start(path: Path, cache: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", MODULE, str(path), str(cache), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_the_process_tells_progress_and_the_folder(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama"), tokenizer=byte_level_tokenizer("default"))
    output, _ = start(path, tmp_path / "cache").communicate(timeout=60)
    lines = output.splitlines()
    assert {line.split()[0] for line in lines[:-1]} == {"progress", "warning"}
    folder = Path(lines[-1].removeprefix("done "))
    assert (folder / "model.safetensors").is_file() and folder.parent == tmp_path / "cache"
    process = start(tmp_path / "none.gguf", tmp_path / "cache")
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 2 and output.startswith("refused ") and len(output.splitlines()) == 1


def test_a_conversion_killed_midway_leaves_no_half_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama"))
    process = start(path, tmp_path / "cache")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    folder = tmp_path / "cache" / converted(path, tmp_path / "other", QUIET).name
    assert conversion.is_whole(folder) or not folder.exists()  # it may have been quicker than the signal
    shutil.rmtree(folder, ignore_errors=True)
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(exist_ok=True)
    (partial / "model.safetensors").write_bytes(b"half")
    assert converted(path, tmp_path / "cache", QUIET) == folder and conversion.is_whole(folder)
    assert not partial.exists()


def test_a_cache_that_takes_no_files_is_refused_with_the_cure(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama"))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Refused, match=r"cannot be written.*--cache-dir"):
        converted(path, tmp_path / "file" / "cache", QUIET)


@pytest.mark.user_pain("M9")
def test_a_cache_that_takes_no_files_is_passed_over_with_one_warning(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama"))
    (tmp_path / "file").write_text("in the way")
    process = start(path, tmp_path / "file" / "cache", "--fallback", str(tmp_path / "run"))
    *told, last = process.communicate(timeout=60)[0].splitlines()
    assert Path(last.removeprefix("done ")).parent == tmp_path / "run"
    assert len([line for line in told if line.startswith("warning ")]) == 1


def test_a_full_disk_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama"))
    limited = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000)); "
        f"sys.argv = ['', {str(path)!r}, {str(tmp_path / 'cache')!r}]; "
        f"runpy.run_module({MODULE!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "refused The converted model cannot be written" in done.stdout, done.stderr
    assert not [file for file in (tmp_path / "cache").iterdir() if not file.name.endswith(".lock")]
    monkeypatch.setattr(conversion, "FREE_MARGIN_BYTES", 1 << 60)
    with pytest.raises(Refused, match=r"MB, .* has .* MB.*--cache-dir"):
        converted(path, tmp_path / "cache", QUIET)
