"""A tiny model in the form of Qwen3-Embedding, served on this machine's processor: end token, prompts, cuts."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import Qwen3Config

from ..embedding_models import reference_vector, save_headless, save_pooling, unit
from ..server import Server
from ..tiny_models import SIZES, save_tokenizer

END = 290
PROMPTS = {"prompts": {"query": "Instruct: find it\nQuery:", "document": ""}, "default_prompt_name": None}


class Reference:
    """The model by transformers, and its tokenizer by its own library."""

    def __init__(self, folder: Path) -> None:
        self.model: torch.nn.Module = save_headless(Qwen3Config(**SIZES, head_dim=32), folder)
        save_pooling(folder, "last", normalizes=True, prompts=PROMPTS)
        save_tokenizer(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        end = self.tokenizer.id_to_token(END)
        self.tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, END)])
        self.tokenizer.save(str(folder / "tokenizer.json"))

    def token_ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        assert ids[-1] == END
        return ids

    def vector(self, text: str) -> np.ndarray:
        return unit(reference_vector(self.model, self.token_ids(text), "last"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen3-embedding")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def served(folder: Path, reference: Reference) -> Iterator[Server]:
    with Server(folder, "--platform", "cpu", "--dtype", "float32", "--matryoshka", script=None) as server:
        yield server


def embeddings(server: Server, text: object, **fields: object) -> np.ndarray:
    answer = server.http.post("/v1/embeddings", json={"input": text, **fields})
    assert answer.status_code == 200, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]])


@pytest.mark.user_pain("E4")
def test_e4_the_end_token_is_appended_and_prompts_go_before(served: Server, reference: Reference) -> None:
    texts = ["the sea", "a hull of three", "x" * 90]
    wanted = np.array([reference.vector(text) for text in texts])
    assert np.abs(embeddings(served, texts) - wanted).max() < 1e-5
    asked = embeddings(served, texts, prompt_name="query")
    prompted = np.array([reference.vector("Instruct: find it\nQuery:" + text) for text in texts])
    assert np.abs(asked - prompted).max() < 1e-5
    own = embeddings(served, texts, prompt="Instruct: find it\nQuery:")
    assert np.abs(own - prompted).max() < 1e-5
    assert np.abs(embeddings(served, texts, prompt_name="document") - wanted).max() < 1e-5


@pytest.mark.user_pain("E1")
def test_e1_an_operator_may_allow_cuts(served: Server, reference: Reference) -> None:
    whole = reference.vector("the sea")
    for size in (1, 17, 64):
        assert np.abs(embeddings(served, "the sea", dimensions=size)[0] - unit(whole[:size])).max() < 1e-5
    assert served.http.post("/v1/embeddings", json={"input": "x", "dimensions": 65}).status_code == 400


@pytest.mark.user_pain("E5")
def test_e5_the_context_is_the_limit(served: Server, reference: Reference) -> None:
    longest = "y" * 255  # and the end token
    assert np.abs(embeddings(served, longest)[0] - reference.vector(longest)).max() < 1e-5
    assert served.http.post("/v1/embeddings", json={"input": longest + "y"}).status_code == 400
    cut = embeddings(served, longest + "y" * 40, truncate_prompt_tokens=-1)[0]
    assert np.abs(cut - reference.vector(longest)).max() < 1e-5


def test_it_makes_no_tokens(served: Server) -> None:
    assert served.http.get("/v1/models").json()["data"][0]["capabilities"] == ["embed", "score"]
    answer = served.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "wrong_kind_of_model"


def test_server_info_says_how_it_pools(served: Server) -> None:
    limits = served.http.get("/v1/server_info").json()["limits"]
    assert limits["pooling"] == {
        "kind": "last",
        "num_dimensions": 64,
        "normalizes": True,
        "is_encoder": False,
        "generates": False,
    }
    assert limits["num_blocks"] > 0
