"""Greedy output, logprobs and prompt logprobs of the native families equal those of transformers in float32."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from trimaran.ipc.plan import RowFlag

from ..step_driver import Row, StepDriver, start_engine
from ..tiny_models import save, variants, with_head_dim
from .greedy import count_ties

VARIANTS = variants()
PLAIN = ("cpp_paged_attention", "cpp_linear", "cpp_rotary_and_kv_write", "gathered_attention")


def prompts(vocab_size: int, lengths: tuple[int, ...] = (5, 40, 17, 33)) -> list[list[int]]:
    chance = random.Random(1)
    return [[chance.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_output_equals_the_reference(tmp_path: Path, cache: Path, name: str) -> None:
    reference = save(VARIANTS[name], tmp_path)
    engine, facts = start_engine(tmp_path, cache, dtype="float32")
    assert not any(resolution.demoted for resolution in facts.resolutions)
    rows = [Row(row=row, tokens=list(prompt)) for row, prompt in enumerate(prompts(300))]
    StepDriver(engine).generate(rows, 24)
    assert sum(count_ties(reference, row.tokens[:-24], row.tokens[-24:]) for row in rows) <= 2


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_prefill_in_chunks_gives_the_same_tokens(tmp_path: Path, cache: Path, chunk: int) -> None:
    reference = save(VARIANTS["llama"], tmp_path)
    engine, _ = start_engine(tmp_path, cache, dtype="float32")
    rows = [Row(row=row, tokens=list(prompt)) for row, prompt in enumerate(prompts(300))]
    StepDriver(engine).generate(rows, 16, chunk)
    assert sum(count_ties(reference, row.tokens[:-16], row.tokens[-16:]) for row in rows) <= 2


@pytest.mark.user_pain("D5")
@pytest.mark.parametrize("head_dim", [32, 40, 64, 80, 96, 112, 128, 160, 192, 256])
def test_every_head_size(tmp_path: Path, cache: Path, head_dim: int) -> None:
    reference = save(with_head_dim(head_dim), tmp_path)
    engine, _ = start_engine(tmp_path, cache, dtype="float32")
    rows = [Row(row=row, tokens=list(prompt)) for row, prompt in enumerate(prompts(300, (9, 30)))]
    StepDriver(engine).generate(rows, 8)
    assert sum(count_ties(reference, row.tokens[:-8], row.tokens[-8:]) for row in rows) <= 1


@pytest.mark.parametrize("name", ["llama_biases", "mistral_window", "qwen3"])
def test_plain_kernels_give_the_same_tokens(tmp_path: Path, cache: Path, name: str) -> None:
    reference = save(VARIANTS[name], tmp_path)
    engine, facts = start_engine(tmp_path, cache, dtype="float32", without_kernels=PLAIN)
    chosen = {resolution.kernel: resolution.chosen for resolution in facts.resolutions}
    assert chosen["paged_attention"] == "plain_paged_attention"
    assert {decision.name: decision.value for decision in engine.decisions}["graphs"] == "eager"
    rows = [Row(row=row, tokens=list(prompt)) for row, prompt in enumerate(prompts(300))]
    StepDriver(engine).generate(rows, 12)
    assert sum(count_ties(reference, row.tokens[:-12], row.tokens[-12:]) for row in rows) <= 2


def test_sharded_checkpoint_reads_the_same(tmp_path: Path, cache: Path) -> None:
    reference = save(VARIANTS["qwen2"], tmp_path, shard_bytes="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    engine, _ = start_engine(tmp_path, cache, dtype="float32")
    row = Row(row=0, tokens=prompts(300)[1])
    StepDriver(engine).generate([row], 12)
    assert count_ties(reference, row.tokens[:-12], row.tokens[-12:]) <= 1


def test_logprobs_of_sampled_tokens(tmp_path: Path, cache: Path) -> None:
    reference = save(VARIANTS["llama"], tmp_path)
    engine, _ = start_engine(tmp_path, cache, dtype="float32")
    asks = {"row_flags": RowFlag.GREEDY | RowFlag.LOGPROBS, "num_logprobs": 5}
    rows = [Row(row=0, tokens=prompts(300)[0]), Row(row=1, tokens=prompts(300)[1], parameters=asks)]
    driver = StepDriver(engine)
    for _ in range(4):
        result = driver.run([(row, len(row.tokens) - row.computed) for row in rows])
        with torch.inference_mode():
            expected = reference(torch.tensor([rows[1].tokens[:-1]])).logits[0, -1].log_softmax(-1)
        assert result.logprob_rows.tolist() == [1]
        assert result.top_counts.tolist() == [5]
        assert result.ranks.tolist() == [1]
        top = expected.topk(5)
        np.testing.assert_allclose(result.logprobs, [top.values[0]], atol=1e-4)
        np.testing.assert_allclose(result.top_logprobs, top.values, atol=1e-4)
        assert result.top_ids.tolist() == top.indices.tolist()


def test_prompt_logprobs(tmp_path: Path, cache: Path) -> None:
    reference = save(VARIANTS["llama"], tmp_path)
    engine, _ = start_engine(tmp_path, cache, dtype="float32")
    prompt = prompts(300, (100,))[0]
    row = Row(row=0, tokens=list(prompt), parameters={"num_prompt_logprobs": 3})
    driver, got = StepDriver(engine), []
    while row.computed < len(prompt):
        result = driver.run([(row, min(37, len(prompt) - row.computed))], prompt_logprobs=True)
        assert result.prompt_top_counts.tolist() == [3]
        assert len(result.prompt_top_ids) == 3 * int(result.prompt_counts[0])
        got += result.prompt_logprobs.tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    np.testing.assert_allclose(got, [float(expected[i, prompt[i + 1]]) for i in range(len(prompt) - 1)], atol=1e-4)


@pytest.mark.user_pain("V2")
def test_a_broken_row_fails_alone(tmp_path: Path, cache: Path) -> None:
    """Weights of one embedding row are not a number: only the sequence that reads it is flagged."""
    from safetensors.torch import load_file, save_file

    reference = save(VARIANTS["llama"], tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][299] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    engine, _ = start_engine(tmp_path, cache, dtype="float32")
    rows = [Row(row=0, tokens=[5, 6, 7]), Row(row=1, tokens=[5, 299, 7]), Row(row=2, tokens=[9, 10])]
    result = StepDriver(engine).run([(row, len(row.tokens)) for row in rows])
    assert result.flags.tolist() == [0, 1, 0]
    assert count_ties(reference, [5, 6, 7], [rows[0].tokens[-1]]) == 0
