"""Encoders by transformers' modelling code: their vectors are those of transformers alone."""

from pathlib import Path

import numpy as np
import pytest
from transformers import Gemma3TextConfig

from trimaran.device_workers.boot import describe
from trimaran.ipc.conditions import Refusal
from trimaran.ipc.facts import PoolingKind

from ..embedding_models import reference_vector, save_headless, save_pooling
from ..module_models import ENCODERS, save_module_encoder
from ..step_driver import make_configuration, no_warning, start_engine
from ..tiny_models import SIZES
from .test_encoders import SETTLED, texts_of, vectors_of

ALIKE = 1e-5


@pytest.mark.parametrize("name", ENCODERS)
def test_vectors_equal_the_reference_alone_and_batched(tmp_path: Path, cache: Path, name: str) -> None:
    reference = save_module_encoder(name, tmp_path)
    save_pooling(tmp_path, "mean" if name != "electra" else "cls", normalizes=True)
    mode = "mean" if name != "electra" else "cls"
    engine, facts = start_engine(tmp_path, cache, settled=SETTLED, num_blocks=0, dtype="float32")
    assert facts.kv_bytes_per_block == 0 and engine.model.is_encoder
    assert engine.model.max_model_len == {"mpnet": 64, "modernbert": 64}.get(name, 66)
    assert engine.model.pooling is not None and engine.model.pooling.normalizes
    texts = texts_of([1, 7, 30, 7, 64, 12, 1, 30])
    expected = [reference_vector(reference, text, mode) for text in texts]
    batched = vectors_of(engine, texts)
    alone = [vectors_of(engine, [text], step)[0] for step, text in enumerate(texts, 2)]
    for wanted, together, single in zip(expected, batched, alone, strict=True):
        assert np.abs(wanted - together).max() < ALIKE * max(1.0, np.abs(wanted).max())
        assert np.abs(wanted - single).max() < ALIKE * max(1.0, np.abs(wanted).max())


@pytest.mark.parametrize("mode", ["mean", "last"])
def test_a_decoder_without_its_head_makes_vectors(tmp_path: Path, cache: Path, mode: str) -> None:
    """Whole texts at once, so that any pooling is possible, and windows are the module's own."""
    sizes = SIZES | {"max_position_embeddings": 64, "vocab_size": 300}
    reference = save_headless(Gemma3TextConfig(**sizes, head_dim=16, sliding_window=8), tmp_path)
    save_pooling(tmp_path, mode)
    engine, _ = start_engine(tmp_path, cache, settled=SETTLED, num_blocks=0, dtype="float32")
    assert not engine.model.generates
    texts = texts_of([33, 5, 33, 60])
    for text, vector in zip(texts, vectors_of(engine, texts), strict=True):
        wanted = reference_vector(reference, text, mode)
        assert np.abs(wanted - vector).max() < ALIKE * max(1.0, np.abs(wanted).max())


def test_an_encoder_of_ours_by_transformers_code(tmp_path: Path, cache: Path) -> None:
    from ..embedding_models import save_encoder

    reference = save_encoder("roberta", tmp_path)
    engine, facts = start_engine(
        tmp_path, cache, settled=SETTLED, num_blocks=0, dtype="float32", model_code="transformers"
    )
    assert not facts.resolutions
    assert engine.model.max_model_len == 64, "two of the 66 positions come before the first token"
    assert engine.model.pooling is not None and engine.model.pooling.kind is PoolingKind.MEAN
    text = texts_of([19])[0]
    wanted = reference_vector(reference, text, "mean")
    assert np.abs(wanted - vectors_of(engine, [text])[0]).max() < ALIKE * max(1.0, np.abs(wanted).max())


def test_a_text_longer_than_its_positions_is_refused_at_the_start(tmp_path: Path, cache: Path) -> None:
    save_module_encoder("mpnet", tmp_path)
    save_pooling(tmp_path, "mean", max_tokens=20)
    with pytest.raises(Refusal, match="take at most 20"):
        start_engine(tmp_path, cache, max_model_len=30)
    with pytest.raises(Refusal, match="--tensor-parallel"):
        describe(make_configuration(tmp_path, cache, num_ranks=2), no_warning)
