"""Decoders by transformers' modelling code with our paged attention: the texts are those of transformers alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from trimaran.device_workers.boot import Described, describe
from trimaran.device_workers.execution.contract import StepEngine
from trimaran.device_workers.models.module_config import module_facts, module_problem
from trimaran.device_workers.models.module_trace import UnknownAttention, traced_mask
from trimaran.ipc.conditions import Refusal
from trimaran.ipc.worker_messages import Settled

from ..engine_driver import Answer, EngineDriver, greedy
from ..module_models import DECODERS, WINDOW, deepseek, save_decoder
from ..step_driver import Row, StepDriver, make_configuration, no_warning, start_engine
from ..tiny_models import SIZES
from .greedy import Reference, count_ties
from .test_models import prompts

OFTEN = ("gpt2", "opt", "phi3_window", "gemma2", "gemma3", "gpt_oss", "qwen3_moe")
NUM_TOKENS = 16
LONG = prompts(300, (70, 9, 40, 40, 33, 5, 50))


def each(names: tuple[str, ...] = OFTEN) -> list[Any]:
    """All families; those that are not in `names` only among long tests."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.long) for name in DECODERS]


def start(name: str, folder: Path, cache: Path) -> tuple[Any, StepEngine]:
    reference = save_decoder(DECODERS[name](), folder)
    engine, facts = start_engine(folder, cache, dtype="float32", max_model_len=96 if name == "phi3_longrope" else None)
    assert not any(resolution.demoted for resolution in facts.resolutions)
    return reference, engine


@pytest.mark.parametrize("name", each())
def test_greedy_output_equals_the_references_generate(tmp_path: Path, cache: Path, name: str) -> None:
    """Side by side and in chunks, with prompts much longer than the windows."""
    reference, engine = start(name, tmp_path, cache)
    rows = [Row(row=row, tokens=list(prompt)) for row, prompt in enumerate(prompts(300))]
    assert max(len(row.tokens) for row in rows) > 2 * WINDOW
    StepDriver(engine).generate(rows, NUM_TOKENS, chunk=11)
    assert sum(count_ties(reference, row.tokens[:-NUM_TOKENS], row.tokens[-NUM_TOKENS:]) for row in rows) <= 2
    prompt = torch.tensor([rows[1].tokens[:-NUM_TOKENS]])
    with torch.inference_mode():
        said = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )[0].tolist()
    assert said == rows[1].tokens or count_ties(reference, rows[1].tokens[:-NUM_TOKENS], said[-NUM_TOKENS:])


@pytest.mark.parametrize("name", each(("gemma2", "gpt_oss")))
def test_every_way_through_the_engine(tmp_path: Path, cache: Path, name: str) -> None:
    """Alone, from the prefix cache, in small chunks, preempted, several choices: with log-probabilities."""
    model, engine = start(name, tmp_path, cache)
    reference = Reference(model)
    limit = engine.model.max_model_len
    asks = greedy(NUM_TOKENS, num_logprobs=3, num_prompt_logprobs=2)
    driver = EngineDriver(engine, max_model_len=limit)
    _judge(reference, [driver.generate(LONG[0], asks)])
    again = driver.submit([*LONG[0], 7, 8], greedy(NUM_TOKENS))
    several = driver.submit(LONG[2], asks, n=2)
    driver.run()
    assert again.cached_tokens >= 64, "the prefix was meant to come from the cache"
    _judge(reference, [again, several])
    small = EngineDriver(engine, num_blocks=14, max_batched_tokens=40, max_model_len=limit, first_horizon=1)
    answers = small.run_arriving([(prompt, asks) for prompt in LONG])
    assert small.num_preemptions > 0
    _judge(reference, answers)


def _judge(reference: Reference, answers: list[Answer]) -> None:
    for answer in answers:
        for choice in answer.choices:
            assert len(choice.tokens) == NUM_TOKENS
            assert reference.count_ties(answer.prompt, choice.tokens) <= 1
        if answer.choices[0].logprobs:
            tokens = [*answer.prompt, *answer.tokens]
            ours = torch.tensor([*answer.prompt_logprobs, *answer.choices[0].logprobs])
            torch.testing.assert_close(ours, reference.scores(tokens).logprobs, atol=1e-4, rtol=0)


def test_without_fast_kernels_and_beside_another_engine(tmp_path: Path, cache: Path) -> None:
    """The plain reference serves caps and windows too; steps of two engines in turn touch nothing of each other."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    reference = save_decoder(DECODERS["gemma2"](), tmp_path / "one")
    other = save_decoder(DECODERS["phi3_window"](), tmp_path / "two")
    engine, facts = start_engine(
        tmp_path / "one", cache, dtype="float32", without_kernels=("gathered_attention", "cpp_paged_attention")
    )
    [attention] = [found for found in facts.resolutions if found.kernel == "paged_attention"]
    assert attention.chosen == "plain_paged_attention"
    beside, _ = start_engine(tmp_path / "two", cache, dtype="float32")
    pairs = [(StepDriver(engine), reference), (StepDriver(beside), other)]
    rows = [Row(row=0, tokens=list(LONG[2])), Row(row=0, tokens=list(LONG[0]))]
    for _ in range(6):
        for (driver, _), row in zip(pairs, rows, strict=True):
            driver.run([(row, len(row.tokens) - row.computed)])
    for (_, model), row in zip(pairs, rows, strict=True):
        assert count_ties(model, row.tokens[:-6], row.tokens[-6:]) <= 1


def test_soft_caps_and_sinks_are_for_kernels_that_have_them(tmp_path: Path, cache: Path) -> None:
    save_decoder(DECODERS["gemma2"](), tmp_path)
    _, facts = start_engine(tmp_path, cache, dtype="float32")
    [attention] = [found for found in facts.resolutions if found.kernel == "paged_attention"]
    assert attention.chosen == "gathered_attention"
    assert "soft cap" in attention.rejected["cpp_paged_attention"]
    [sampling] = [found for found in facts.resolutions if found.kernel == "sample"]
    assert sampling.chosen == "cpp_sample", "it knows nothing of scores"


def test_memory_and_decisions_are_told(tmp_path: Path, cache: Path) -> None:
    model = save_decoder(DECODERS["gemma2"](), tmp_path)
    engine, facts = start_engine(tmp_path, cache, dtype="float32")
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert engine.model.weight_bytes == num_bytes <= facts.weight_bytes < 1.05 * num_bytes
    assert engine.model.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4 == facts.kv_bytes_per_block // 16
    settled = {"max_tokens": 512, "max_rows": 40, "max_blocks": 16}
    assert facts.activation_bytes == pytest.approx(engine.model.step_bytes(**settled), rel=0.01)
    told = {decision.name: decision for decision in engine.decisions}
    assert told["model_code"].value.startswith("transformers ") and "Gemma2ForCausalLM" in told["model_code"].reason
    assert told["graphs"].value == "eager" and "not recorded" in told["graphs"].reason


def test_half_precision_and_dummy_weights_run(tmp_path: Path, cache: Path) -> None:
    """The same tokens from one seed, without any file of weights."""
    DECODERS["gpt_oss"]().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"architectures": ["GptOssForCausalLM"]}))
    texts = []
    for _ in range(2):
        engine, _ = start_engine(tmp_path, cache, dtype="bfloat16", load_format="dummy", seed=5)
        row = Row(row=0, tokens=list(LONG[1]))
        StepDriver(engine).generate([row], 6)
        texts.append(row.tokens)
    assert texts[0] == texts[1] and len(set(texts[0][-6:])) > 1


def test_a_model_of_ours_by_transformers_code(tmp_path: Path, cache: Path) -> None:
    reference = save_decoder(Qwen3Config(**SIZES, head_dim=16), tmp_path)
    assert described(tmp_path, cache).module is None
    engine, facts = start_engine(tmp_path, cache, dtype="float32", model_code="transformers")
    assert "linear" not in {resolution.kernel for resolution in facts.resolutions}
    row = Row(row=0, tokens=list(LONG[2]))
    StepDriver(engine).generate([row], NUM_TOKENS)
    assert count_ties(reference, row.tokens[:-NUM_TOKENS], row.tokens[-NUM_TOKENS:]) <= 1


# what is refused, before weights are read


def described(folder: Path, cache: Path, **options: Any) -> Described:
    return describe(make_configuration(folder, cache, **options), no_warning)


def _only_config(config: PreTrainedConfig, folder: Path, architecture: str, **changes: Any) -> None:
    values = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [architecture], **changes}
    (folder / "config.json").write_text(json.dumps(values))


_LLAMA4 = SIZES | {"num_hidden_layers": 4, "max_position_embeddings": 4096}
REFUSED: dict[str, tuple[PreTrainedConfig, str, str]] = {
    "chunks": (
        Llama4TextConfig(
            **_LLAMA4, head_dim=16, num_local_experts=2, intermediate_size_mlp=64, attention_chunk_size=32
        ),
        "Llama4ForCausalLM",
        "layer_types chunked_attention|attention_chunk_size",
    ),
    "linear attention": (Qwen3NextConfig(**SIZES), "Qwen3NextForCausalLM", "layer_types linear_attention"),
    "states": (
        MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=300),
        "MambaForCausalLM",
        "layer_types linear_attention",
    ),
    "no interface": (
        BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=300),
        "BloomForCausalLM",
        "no attention",
    ),
    "values of another size": (deepseek(v_head_dim=8), "DeepseekV3ForCausalLM", "v_head_dim"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_paged_cache_cannot_hold_is_refused(tmp_path: Path, cache: Path, what: str) -> None:
    config, architecture, says = REFUSED[what]
    _only_config(config, tmp_path, architecture)
    with pytest.raises(Refusal, match=says) as refusal:
        described(tmp_path, cache)
    assert "choose another model" in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantised by mxfp4"),
        ({"vision_config": {"hidden_size": 3}}, "vision_config.*text only"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"architectures": ["PhiForSequenceClassification"]}, "no causal language model"),
        ({"model_type": "nobody_knows"}, "never run"),
        ({"use_bidirectional_attention": True, "is_causal": False}, "causal"),
    ],
)
def test_refusals_name_what_config_json_says(tmp_path: Path, cache: Path, changes: dict[str, Any], says: str) -> None:
    _only_config(DECODERS["gemma3"](), tmp_path, "Gemma3ForCausalLM", **changes)
    with pytest.raises(Refusal, match=says):
        described(tmp_path, cache)


def test_masks_are_read_for_what_they_show() -> None:
    """Every kind that transformers makes: all positions before, windows, chunks, and both directions."""
    from transformers import masking_utils

    assert traced_mask(mask_function=masking_utils.causal_mask_function).window == 0
    for window in (1, 2, 12, 100):
        sliding = masking_utils.sliding_window_causal_mask_function(window)
        assert traced_mask(mask_function=sliding, local_size=window).window == window
    for size in (5, 32, 67, 68):
        chunks = masking_utils.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))
        with pytest.raises(UnknownAttention, match="attention_chunk_size"):
            traced_mask(mask_function=chunks, local_size=size)
    with pytest.raises(UnknownAttention, match="neither causal"):
        traced_mask(mask_function=masking_utils.bidirectional_mask_function)


def test_options_that_do_not_go_with_it(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _only_config(DECODERS["gemma2"](), tmp_path, "Gemma2ForCausalLM")
    with pytest.raises(Refusal, match="--tensor-parallel"):
        described(tmp_path, cache, num_ranks=2)
    with pytest.raises(Refusal, match="supported are Llama"):
        described(tmp_path, cache, model_code="own")
    with pytest.raises(Refusal, match="--model-code theirs"):
        described(tmp_path, cache, model_code="theirs")
    module = described(tmp_path, cache).module
    assert module is not None
    facts = module_facts(module, dtype="float32", kv_dtype="auto", max_model_len=None)
    settled = Settled(block_size=16, max_num_seqs=1, max_batched_tokens=16, max_model_len=16, batch_invariant=True)
    with pytest.raises(Refusal, match="--batch-invariant.*leave it out"):
        module_problem(module, facts, settled)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(Refusal, match=r"pip install 'trimaran\[models\]'"):
        described(tmp_path, cache)


def test_positions_that_change_with_the_batch_bound_the_length(tmp_path: Path, cache: Path) -> None:
    save_decoder(DECODERS["phi3_longrope"](), tmp_path)
    warnings: list[str] = []
    module = describe(make_configuration(tmp_path, cache), warnings.append).module
    assert module is not None and module.max_tokens == 96
    assert "at most 96 tokens" in warnings[0] and "original_max_position_embeddings" in warnings[0]
    with pytest.raises(Refusal, match="take at most 96"):
        start_engine(tmp_path, cache, max_model_len=200)


def test_weights_that_are_missing_are_not_invented(tmp_path: Path, cache: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_decoder(Phi3Config(**SIZES), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Refusal, match=r"model\.layers\.1\.mlp\.down_proj"):
        start_engine(tmp_path, cache, dtype="float32")


def test_positions_by_place_in_the_batch_are_found_out(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that counts positions itself is right alone, and wrong beside others."""
    from transformers.models.phi3 import modeling_phi3

    rotary = modeling_phi3.Phi3RotaryEmbedding.forward

    def by_place(module: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return rotary(module, x, torch.arange(x.shape[1], device=x.device)[None])

    save_decoder(Phi3Config(**SIZES), tmp_path)
    monkeypatch.setattr(modeling_phi3.Phi3RotaryEmbedding, "forward", by_place)
    with pytest.raises(Refusal, match="texts side by side come to other hidden states"):
        start_engine(tmp_path, cache, dtype="float32")


def test_llama_stays_ours(tmp_path: Path, cache: Path) -> None:
    save_decoder(LlamaConfig(**SIZES), tmp_path)
    found = described(tmp_path, cache)
    assert found.module is None and found.config is not None
