"""Configurations in old and new spellings, refusals, and how models divide among ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from trimaran.device_workers.models.config import parse_config, read_config
from trimaran.device_workers.models.facts import make_facts, num_sampled_ids
from trimaran.device_workers.models.parameters import num_parameters
from trimaran.device_workers.models.sharding import make_shard, sizes_that_divide
from trimaran.ipc.conditions import Refusal

SMOL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "rope_theta": 100000.0,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 2048}


def test_old_and_new_spellings_mean_the_same() -> None:
    old = parse_config(SMOL | {"rope_scaling": {"type": "yarn", **YARN}})
    new = dict(SMOL)
    del new["torch_dtype"], new["rope_theta"]
    new |= {"dtype": "bfloat16", "rope_parameters": {"rope_type": "yarn", "rope_theta": 100000.0, **YARN}}
    assert old == parse_config(new)
    assert (old.rotary.theta, old.rotary.factor, old.dtype, old.head_dim) == (100000.0, 4.0, "bfloat16", 64)


def test_defaults_of_absent_fields() -> None:
    config = parse_config({**SMOL, "num_key_value_heads": None, "rope_scaling": None, "torch_dtype": None})
    assert config.num_kv_heads == 9
    assert config.dtype == "float32"
    assert config.rotary.rope_type == "default"


def test_windows() -> None:
    qwen = {**SMOL, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 128, "max_window_layers": 28}
    assert set(parse_config(qwen).windows) == {0}
    assert parse_config(qwen | {"use_sliding_window": True}).windows == (0,) * 28 + (128, 128)
    mistral = {**SMOL, "architectures": ["MistralForCausalLM"], "sliding_window": 128}
    assert set(parse_config(mistral).windows) == {128}
    assert set(parse_config(mistral | {"sliding_window": None}).windows) == {0}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "supported are LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": None}, "supported are LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "supported is silu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "default, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "linear"}}, "without its factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial rotary factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": -3}, "vocab_size is -3"),
        ({"num_hidden_layers": "30"}, "num_hidden_layers"),
    ],
)
def test_refusals_say_what_is_supported(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Refusal, match=says):
        parse_config(SMOL | changes)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"holds no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(Refusal, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(Refusal, match="no JSON object"):
        read_config(tmp_path)


def test_sizes_that_divide() -> None:
    config = parse_config(SMOL)
    assert sizes_that_divide(config) == (1, 3)
    shard = make_shard(config, 2, 3)
    assert (shard.num_heads, shard.num_kv_heads, shard.first_kv_head, shard.intermediate_size) == (3, 1, 2, 512)
    assert (shard.vocab_begin, shard.vocab_end) == (32768, 49152)
    with pytest.raises(Refusal, match="sizes that do: 1, 3"):
        make_shard(config, 0, 2)


def test_key_value_heads_are_shared_by_ranks_where_they_are_fewer() -> None:
    config = parse_config(
        SMOL | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 101}
    )
    assert sizes_that_divide(config) == (1, 2, 4, 8)
    shards = [make_shard(config, rank, 8) for rank in range(8)]
    assert [shard.first_kv_head for shard in shards] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {shard.num_kv_heads for shard in shards} == {1}
    covered = [token for shard in shards for token in range(shard.vocab_begin, shard.vocab_end)]
    assert covered == list(range(101))


def test_facts() -> None:
    config = parse_config(SMOL)
    facts = make_facts(config, make_shard(config, 0, 3), dtype="bfloat16", kv_dtype="auto", max_model_len=4096)
    assert facts.tensor_parallel_sizes == (1, 3)
    assert facts.num_parameters == num_parameters(config) == 134_515_008
    assert facts.kv_bytes_per_token == 2 * 30 * 1 * 64 * 2
    assert facts.max_model_len == 4096
    with pytest.raises(Refusal, match="at most 8192"):
        make_facts(config, make_shard(config, 0, 1), dtype="float32", kv_dtype="auto", max_model_len=9000)
    with pytest.raises(Refusal, match="--kv-dtype fp8"):
        make_facts(config, make_shard(config, 0, 1), dtype="float32", kv_dtype="fp8", max_model_len=None)


@pytest.mark.user_pain("Q6")
def test_ids_without_a_token_are_padding(tmp_path: Path) -> None:
    config = parse_config(SMOL | {"vocab_size": 1000})
    assert num_sampled_ids(tmp_path, config) == 1000
    tokenizer = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 900}}, "added_tokens": [{"id": 950, "content": "<x>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert num_sampled_ids(tmp_path, config) == 951
    unigram = {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    assert num_sampled_ids(tmp_path, config) == 2
    (tmp_path / "tokenizer.json").write_text("{")
    assert num_sampled_ids(tmp_path, config) == 1000
