"""Embeddings, scores and rankings of the packaged model over HTTP and offline, and on the null platform."""

import asyncio
import base64
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI

from trimaran import LLM
from trimaran.device_workers.platforms.null_model import expected_vector
from trimaran.frontend.client.refusals import RequestRefused

from ..embedding_models import PAIRS, MiniReference, fifty_texts, save_encoder, save_pooling, unit
from ..server import Server
from ..tiny_models import SIZES, save_tokenizer

EXACT = 1e-5
LIMIT = 256


@pytest.fixture(scope="module")
def reference(embedding_folder: Path) -> MiniReference:
    return MiniReference(embedding_folder)


@pytest.fixture(scope="module")
def demo(embedding_folder: Path) -> Iterator[Server]:
    """As a user starts it: the packaged model on this machine's own device."""
    with Server(None, "--demo-embedding", "--platform", "cpu", script=None) as server:
        yield server


@pytest.fixture(scope="module")
def null(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny encoder that says how it may be cut, on the null platform."""
    folder = tmp_path_factory.mktemp("encoder")
    save_encoder("bert", folder, vocab_size=SIZES["vocab_size"], matryoshka_dimensions=[8, 16])
    save_pooling(folder, "mean", normalizes=True, max_tokens=40, prompts={"prompts": {"query": "Find: ", "none": ""}})
    save_tokenizer(folder)
    with Server(folder, "--max-prompts", "64", script="step_ms=1") as server:
        yield server


@pytest.fixture(scope="module")
def chat(demo_folder: Path) -> Iterator[Server]:
    with Server(demo_folder) as server:
        yield server


def embeddings(server: Server, text: Any, **fields: Any) -> np.ndarray:
    answer = server.http.post("/v1/embeddings", json={"input": text, **fields})
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return np.array([one["embedding"] for one in data])


def refused(server: Server, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    answer = server.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


# against the reference


@pytest.mark.user_pain("E3")
def test_e3_fifty_texts_equal_the_reference_alone_and_batched(demo: Server, reference: MiniReference) -> None:
    texts = fifty_texts()
    wanted = np.array([reference.vector(text) for text in texts])
    batched = embeddings(demo, texts)
    assert np.abs(batched - wanted).max() < EXACT
    alone = np.array([embeddings(demo, text)[0] for text in texts])
    assert np.abs(alone - wanted).max() < EXACT
    assert np.abs(np.linalg.norm(batched, axis=1) - 1).max() < 1e-6


@pytest.mark.user_pain("E3")
def test_e3_usage_is_the_sum_and_order_is_kept(demo: Server, reference: MiniReference) -> None:
    texts = fifty_texts()[:8]
    answer = demo.http.post("/v1/embeddings", json={"input": texts}).json()
    num_tokens = sum(len(reference.token_ids(text)) for text in texts)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    again = embeddings(demo, texts[::-1])[::-1]
    assert np.abs(again - np.array([one["embedding"] for one in answer["data"]])).max() < 1e-6


@pytest.mark.user_pain("E3")
def test_e3_known_scores_of_related_and_unrelated_texts(demo: Server) -> None:
    for first, second in PAIRS:
        answer = demo.http.post("/v1/score", json={"text_1": first, "text_2": [second, PAIRS[0][0], PAIRS[1][0]]})
        scores = [one["score"] for one in answer.json()["data"]]
        vectors = embeddings(demo, [first, second])
        assert abs(scores[0] - vectors[0] @ vectors[1]) < 1e-6
        assert scores[0] > 0.4, f"{first} {second}"
    unrelated = demo.http.post("/v1/score", json={"text_1": [PAIRS[0][0]], "text_2": [PAIRS[1][0]]}).json()
    assert -0.15 < unrelated["data"][0]["score"] < 0.1


@pytest.mark.user_pain("E4")
def test_e4_token_ids_sent_are_the_tokenizers_own(demo: Server, reference: MiniReference) -> None:
    texts = fifty_texts()[:10]
    by_ids = embeddings(demo, [reference.token_ids(text) for text in texts])
    assert np.abs(by_ids - embeddings(demo, texts)).max() < 1e-6
    one = embeddings(demo, reference.token_ids(texts[0]))
    assert one.shape == (1, 384)
    bare = embeddings(demo, reference.token_ids(texts[0])[1:-1])
    assert np.abs(bare - one).max() > 1e-3, "the ends of a text count"


@pytest.mark.user_pain("E4")
def test_e4_a_prompt_is_as_if_it_were_in_the_text(null: Server) -> None:
    prepended = embeddings(null, "Find: rivers")
    assert np.array_equal(embeddings(null, "rivers", prompt_name="query"), prepended)
    assert np.array_equal(embeddings(null, "rivers", prompt="Find: "), prepended)
    assert not np.array_equal(embeddings(null, "rivers"), prepended)
    assert np.array_equal(embeddings(null, "rivers", prompt_name="none"), embeddings(null, "rivers"))
    error = refused(null, "/v1/embeddings", {"input": "x", "prompt_name": "passage"})
    assert error["param"] == "prompt_name" and "query" in error["message"]
    assert refused(null, "/v1/embeddings", {"input": "x", "prompt_name": "query", "prompt": "y"})["param"] == "prompt"


# forms


@pytest.mark.user_pain("E2")
def test_e2_base64_holds_the_same_numbers(demo: Server) -> None:
    texts = fifty_texts()[:6]
    numbers = embeddings(demo, texts, encoding_format="float")
    answer = demo.http.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"}).json()
    for row, one in zip(numbers, answer["data"], strict=True):
        packed = base64.b64decode(one["embedding"], validate=True)
        assert len(packed) == 4 * 384
        assert np.array_equal(np.frombuffer(packed, "<f4"), row.astype(np.float32))
    assert "encoding_format" in refused(demo, "/v1/embeddings", {"input": "x", "encoding_format": "hex"})["message"]


@pytest.mark.user_pain("E1")
def test_e1_dimensions_of_a_model_that_allows_no_cut(demo: Server) -> None:
    assert np.array_equal(embeddings(demo, "x", dimensions=384), embeddings(demo, "x"))
    for wrong in (383, 1, 0, -1, 385):
        error = refused(demo, "/v1/embeddings", {"input": "x", "dimensions": wrong})
        assert error["param"] == "dimensions"


@pytest.mark.user_pain("E1")
def test_e1_dimensions_of_a_model_that_may_be_cut(null: Server) -> None:
    whole = embeddings(null, ["one", "two"])
    assert whole.shape == (2, 48)
    for size in (8, 16):
        cut = embeddings(null, ["one", "two"], dimensions=size)
        assert np.abs(cut - unit(whole[:, :size])).max() < 1e-6
    assert refused(null, "/v1/embeddings", {"input": "x", "dimensions": 9})["param"] == "dimensions"


def test_vectors_as_the_model_leaves_them(null: Server) -> None:
    ids = [5, 6, 7]
    raw = null.http.post("/pooling", json={"input": [ids]}).json()["data"][0]
    assert raw["object"] == "pooling"
    assert np.array_equal(np.array(raw["data"], np.float32), expected_vector(ids, 48))
    assert np.array_equal(embeddings(null, ids, normalize=False)[0], np.array(raw["data"]))
    length_one = null.http.post("/pooling", json={"input": [ids], "normalize": True}).json()["data"][0]["data"]
    assert np.array_equal(np.array(length_one), embeddings(null, ids)[0])


# limits


@pytest.mark.user_pain("E5")
def test_e5_long_texts_are_taken_to_the_limit_and_then_refused(demo: Server, reference: MiniReference) -> None:
    def text_of(num_tokens: int) -> str:
        return " ".join(["river"] * (num_tokens - 2))

    assert len(reference.token_ids(text_of(LIMIT))) == LIMIT
    others: list[str] = fifty_texts()[:5]
    before = embeddings(demo, others)
    assert embeddings(demo, text_of(LIMIT)).shape == (1, 384)
    for count in (LIMIT + 1, 4 * LIMIT):
        error = refused(demo, "/v1/embeddings", {"input": ["fine", text_of(count)]})
        assert error["code"] == "context_length_exceeded" and "input[1]" in error["message"]
        assert "truncate_prompt_tokens" in error["message"]
    assert np.abs(embeddings(demo, others) - before).max() < 1e-6


@pytest.mark.user_pain("E5")
def test_e5_truncation_is_that_of_the_reference(demo: Server, reference: MiniReference) -> None:
    text = " ".join(f"number {index} of many" for index in range(400))
    for asked, length in ((-1, LIMIT), (LIMIT, LIMIT), (17, 17)):
        found = embeddings(demo, text, truncate_prompt_tokens=asked)[0]
        assert np.abs(found - reference.vector(text, length)).max() < EXACT
    for wrong in (0, -2, LIMIT + 1):
        error = refused(demo, "/v1/embeddings", {"input": text, "truncate_prompt_tokens": wrong})
        assert error["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    "wrong",
    [[], "", [""], [[]], ["a", [1]], [1, "a"], [10**6], [-1], None, {"a": 1}, 7, [None]],
)
def test_inputs_that_are_none(null: Server, wrong: Any) -> None:
    assert "input" in refused(null, "/v1/embeddings", {"input": wrong})["message"]


def test_too_many_texts_and_fields_that_are_not_supported(null: Server) -> None:
    assert refused(null, "/v1/embeddings", {"input": ["x"] * 65})["param"] == "input"
    assert refused(null, "/v1/embeddings", {"input": "x", "messages": [{"role": "user"}]})["param"] == "messages"
    for field, value in {
        "instruction": "find",
        "input_type": "query",
        "task": "x",
        "add_special_tokens": False,
    }.items():
        assert refused(null, "/v1/embeddings", {"input": "x", field: value})["param"] == field
    assert embeddings(null, ["x"] * 64).shape == (64, 48)
    assert refused(null, "/v1/embeddings", {"input": "x", "model": "another"}, 404)["code"] == "model_not_found"


# kinds of models


def test_a_model_says_what_it_makes_and_refuses_the_rest(null: Server, chat: Server) -> None:
    assert null.http.get("/v1/models").json()["data"][0]["capabilities"] == ["embed", "score"]
    assert chat.http.get("/v1/models").json()["data"][0]["capabilities"] == ["generate"]
    messages = [{"role": "user", "content": "hi"}]
    for path, body in (("/v1/chat/completions", {"messages": messages}), ("/v1/completions", {"prompt": "x"})):
        error = refused(null, path, body)
        assert error["code"] == "wrong_kind_of_model" and "/v1/embeddings" in error["message"]
    asks: list[tuple[str, dict[str, Any]]] = [
        ("/v1/embeddings", {"input": "x"}),
        ("/pooling", {"input": "x"}),
        ("/v1/score", {"text_1": "x", "text_2": "y"}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
    ]
    for path, body in asks:
        assert "--demo-embedding" in refused(chat, path, body)["message"]
    assert chat.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_an_encoder_has_no_blocks_and_its_steps_are_counted(null: Server) -> None:
    info = null.http.get("/v1/server_info").json()
    assert info["limits"]["num_blocks"] == 0
    assert info["limits"]["pooling"]["kind"] == "mean"
    embeddings(null, ["a", "b", "c"])
    metrics = null.http.get("/metrics").text
    assert 'request_success_total{finished_reason="pooled"}' in metrics


# scores and rankings


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_pair_texts(demo: Server, path: str) -> None:
    firsts, seconds = [pair[0] for pair in PAIRS], [pair[1] for pair in PAIRS]
    answer = demo.http.post(path, json={"text_1": firsts, "text_2": seconds}).json()
    vectors = embeddings(demo, firsts + seconds)
    wanted = (vectors[:3] * vectors[3:]).sum(axis=1)
    assert np.abs(np.array([one["score"] for one in answer["data"]]) - wanted).max() < 1e-6
    assert answer["usage"]["prompt_tokens"] > 0
    assert refused(demo, path, {"text_1": firsts, "text_2": seconds[:2]})["param"] == "text_1"
    assert refused(demo, path, {"text_1": "x", "text_2": []})["param"] == "text_2"


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_rankings_put_the_best_first(demo: Server, path: str) -> None:
    documents = [PAIRS[1][0], {"text": PAIRS[0][1]}, "Bread is baked in an oven."]
    body = {"query": PAIRS[0][0], "documents": documents}
    answer = demo.http.post(path, json=body).json()
    scores = [one["relevance_score"] for one in answer["results"]]
    assert answer["results"][0]["index"] == 1 and answer["results"][0]["document"] == {"text": PAIRS[0][1]}
    assert scores == sorted(scores, reverse=True)
    top = demo.http.post(path, json={**body, "top_n": 1, "return_documents": False}).json()["results"]
    assert [(one["index"], one["document"]) for one in top] == [(1, None)]
    assert refused(demo, path, {**body, "documents": []})["param"] == "documents"
    assert refused(demo, path, {**body, "top_n": 0})["param"] == "top_n"


# clients


def test_the_official_client_reads_vectors(demo: Server) -> None:
    """It asks for base64 by itself."""
    texts = fifty_texts()[:4]
    answer = demo.openai.embeddings.create(model="all-MiniLM-L6-v2", input=texts)
    plain = embeddings(demo, texts)
    assert np.array_equal(np.array([one.embedding for one in answer.data]), plain)
    assert answer.usage.total_tokens > 0
    as_float = demo.openai.embeddings.create(model="all-MiniLM-L6-v2", input=texts[0], encoding_format="float")
    assert np.abs(np.array(as_float.data[0].embedding) - plain[0]).max() < 1e-6


async def test_the_official_client_reads_vectors_side_by_side(demo: Server) -> None:
    texts = fifty_texts()[:12]
    async with AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answers = await asyncio.gather(
            *(client.embeddings.create(model="all-MiniLM-L6-v2", input=text) for text in texts)
        )
    found = np.array([answer.data[0].embedding for answer in answers])
    assert np.abs(found - embeddings(demo, texts)).max() < 1e-6


def test_one_clients_crowd_and_a_client_that_leaves_harm_nobody(null: Server) -> None:
    wanted = embeddings(null, "alone")

    def leave(_: int) -> None:
        with contextlib.suppress(httpx.TimeoutException):  # nearly always: its vectors take longer
            httpx.post(f"{null.url}/v1/embeddings", json={"input": ["gone"] * 64}, timeout=0.005)

    def ask(_: int) -> np.ndarray:
        return embeddings(null, ["alone"] * 8)

    with ThreadPoolExecutor(8) as pool:
        left = pool.map(leave, range(6))
        found = list(pool.map(ask, range(12)))
        list(left)
    assert all(np.array_equal(vectors, np.repeat(wanted, 8, axis=0)) for vectors in found)


# offline


def test_offline_vectors_and_scores(null: Server) -> None:
    folder = null.arguments[0]
    served = embeddings(null, ["one", "two"])
    with LLM(folder, platform="null", null_script="step_ms=0") as llm:
        outputs = llm.embed(["one", "two"])
        assert np.array_equal(np.array([output.embedding for output in outputs]).astype(np.float64), served)
        assert outputs[0].prompt == "one" and outputs[0].embedding.dtype == np.float32
        assert np.array_equal(llm.embed([outputs[0].prompt_token_ids])[0].embedding, outputs[0].embedding)
        assert llm.embed("one", dimensions=8)[0].embedding.shape == (8,)
        assert llm.embed(["x"] * 700)[699].embedding.shape == (48,)
        scores = llm.score("one", ["one", "two"])
        assert abs(scores[0] - 1) < 1e-6 and abs(scores[1] - served[0] @ served[1]) < 1e-6
        with pytest.raises(RequestRefused, match="makes vectors"):
            llm.generate("x", show_progress=False)
        with pytest.raises(RequestRefused, match=r"prompts\[1\]"):
            llm.embed(["fine", "x" * 300])
