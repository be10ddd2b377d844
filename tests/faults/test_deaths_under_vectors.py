"""A process dies while vectors are made: their requests fail with what to do, and an encoder serves again."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from ..embedding_models import save_encoder, save_pooling
from ..server import Server
from ..tiny_models import SIZES, save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    save_encoder("bert", folder, vocab_size=SIZES["vocab_size"])
    save_pooling(folder, "mean", normalizes=True)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server(folder, script="step_ms=800") as server:
        yield server


def vector(server: Server) -> np.ndarray:
    answer = server.http.post("/v1/embeddings", json={"input": "the sea"})
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["data"][0]["embedding"])


@pytest.mark.parametrize("role", ["core", "worker"])
def test_requests_in_flight_fail_and_vectors_come_again(server: Server, role: str) -> None:
    """The worker that outlives its core holds no blocks, and is taken as it is."""
    before = vector(server)
    statuses: list[int] = []

    def ask() -> None:
        statuses.append(httpx.post(f"{server.url}/v1/embeddings", json={"input": ["a"] * 20}, timeout=30).status_code)

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    time.sleep(0.3)
    server.kill(role)
    for thread in asking:
        thread.join(30)
    assert statuses == [503] * 3
    server.wait_ready()
    assert np.array_equal(vector(server), before)
