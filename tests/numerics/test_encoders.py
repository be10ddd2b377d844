"""Vectors of encoders equal those of transformers in float32, alone and in any batch."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from trimaran.device_workers.boot import describe
from trimaran.device_workers.execution.contract import StepEngine
from trimaran.device_workers.models.encoder_config import read_encoder
from trimaran.ipc.conditions import Refusal
from trimaran.ipc.facts import PoolingKind
from trimaran.ipc.plan import StepPlan, WorkFlag
from trimaran.ipc.worker_messages import Settled

from ..embedding_models import MODES, reference_vector, save_encoder, save_pooling
from ..step_driver import make_configuration, no_warning, start_engine

SETTLED = Settled(block_size=16, max_num_seqs=40, max_batched_tokens=512, max_model_len=64)
ALIKE = 2e-6  # of numbers near 1, in float32


def vectors_of(engine: StepEngine, texts: Sequence[Sequence[int]], step: int = 1) -> list[np.ndarray]:
    """Of all texts in one step, whose rows come in any order."""
    rows = random.Random(step).sample(range(100), len(texts))
    counts = np.array([len(text) for text in texts], np.int32)
    plan = StepPlan(
        step=np.array([step], np.int64),
        rows=np.array(rows, np.int32),
        starts=np.zeros(len(texts), np.int32),
        counts=counts,
        flags=np.full(len(texts), WorkFlag.POOLS, np.uint8),
        token_ids=np.concatenate([np.array(text, np.int32) for text in texts]),
    )
    engine.forward(plan)
    result = engine.sample(None).result()
    assert result.pooled_rows.tolist() == rows
    assert not len(result.rows)
    return np.split(result.pooled, np.cumsum(result.pooled_dims)[:-1])


def texts_of(lengths: Sequence[int]) -> list[list[int]]:
    chance = random.Random(2)
    return [[chance.randrange(2, 200) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["bert", "roberta", "xlm_roberta"])
def test_e3_vectors_equal_the_reference_alone_and_batched(tmp_path: Path, cache: Path, name: str, mode: str) -> None:
    reference = save_encoder(name, tmp_path)
    save_pooling(tmp_path, mode)
    engine, facts = start_engine(tmp_path, cache, settled=SETTLED, num_blocks=0, dtype="float32")
    assert facts.kv_bytes_per_block == 0
    texts = texts_of([1, 7, 30, 7, 64, 12, 1, 30])
    expected = [reference_vector(reference, text, mode) for text in texts]
    batched = vectors_of(engine, texts)
    alone = [vectors_of(engine, [text], step)[0] for step, text in enumerate(texts, 2)]
    for wanted, together, single in zip(expected, batched, alone, strict=True):
        assert np.abs(wanted - together).max() < ALIKE * np.abs(wanted).max()
        assert np.abs(together - single).max() < ALIKE * np.abs(wanted).max()


def test_other_sizes_and_activations(tmp_path: Path, cache: Path) -> None:
    reference = save_encoder("bert", tmp_path, hidden_act="relu", num_attention_heads=2, type_vocab_size=3)
    save_pooling(tmp_path, "mean")
    engine, _ = start_engine(tmp_path, cache, settled=SETTLED, num_blocks=0, dtype="float32")
    text = texts_of([19])[0]
    wanted = reference_vector(reference, text, "mean")
    assert np.abs(wanted - vectors_of(engine, [text])[0]).max() < ALIKE * np.abs(wanted).max()


def test_half_precision_keeps_the_direction(tmp_path: Path, cache: Path) -> None:
    """E3: cosine at least 0.999 in sixteen bits."""
    reference = save_encoder("bert", tmp_path)
    save_pooling(tmp_path, "mean")
    engine, _ = start_engine(tmp_path, cache, settled=SETTLED, num_blocks=0, dtype="bfloat16")
    for text in texts_of([5, 40]):
        wanted, found = reference_vector(reference, text, "mean"), vectors_of(engine, [text])[0]
        assert np.dot(wanted, found) / np.linalg.norm(wanted) / np.linalg.norm(found) > 0.999


def test_what_the_files_say_is_what_counts(tmp_path: Path) -> None:
    save_encoder("roberta", tmp_path)
    bare = read_encoder(tmp_path)
    assert bare is not None and bare.pooling.kind is PoolingKind.MEAN and not bare.pooling.normalizes
    assert bare.max_tokens == 64, "two of the 66 positions come before the first token"
    save_pooling(tmp_path, "cls", normalizes=True, max_tokens=20)
    told = read_encoder(tmp_path)
    assert told is not None and told.pooling.kind is PoolingKind.CLS and told.pooling.normalizes
    assert told.max_tokens == 20
    assert "1_Pooling/config.json" in told.decisions[0].reason


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("modules.json", [{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}], "Dense"),
        ("modules.json", {"no": "list"}, "no list of modules"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "mean"),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "weightedmean"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "include_prompt": False}, "prompts"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, file: str, content: object, text: str) -> None:
    save_encoder("bert", tmp_path)
    save_pooling(tmp_path, "mean")
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(Refusal, match=text):
        read_encoder(tmp_path)


def test_an_encoder_is_not_spread_over_devices(tmp_path: Path, cache: Path) -> None:
    save_encoder("bert", tmp_path)
    with pytest.raises(Refusal, match="--tensor-parallel"):
        describe(make_configuration(tmp_path, cache, num_ranks=2), no_warning)
