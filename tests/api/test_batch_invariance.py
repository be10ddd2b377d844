"""Row Q3: with `--batch-invariant`, one prompt gives the same tokens, and the same log-probabilities to the last bit,
alone and inside any batch.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from trimaran.tests.server import Server

pytestmark = pytest.mark.user_pain("Q3")
PROMPT = "The harbour lay quiet under the first light of the morning, and the three hulls of the vessel"
WORDS = [
    "sea",
    "wind",
    "sail",
    "hull",
    "rope",
    "tide",
    "star",
    "chart",
    "north",
    "storm",
    "calm",
    "reef",
    "keel",
    "mast",
    "oar",
]
NUM_TRIALS = 20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    arguments = ("--kv-memory-bytes", str(256 << 20), "--served-model-name", "smol", "--batch-invariant")
    with Server(None, *arguments, script=None) as server:
        yield server


def answered(server: Server, prompt: str, **fields: Any) -> tuple[list[int], list[float]]:
    body = {"model": "smol", "prompt": prompt, "max_tokens": 8, "return_token_ids": True, "logprobs": 0, **fields}
    answer = server.http.post("/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"temperature": 0}, id="greedy"),
        pytest.param({"temperature": 0.9, "seed": 7}, id="seeded", marks=pytest.mark.long),
    ],
)
def test_q3_alone_and_inside_batches(server: Server, fields: dict[str, Any]) -> None:
    """Batches of 2 to 64, of prompts and answers of any length; the prompt also from the prefix cache."""
    generator = random.Random(3)
    expected = answered(server, PROMPT, **fields, cache_salt="alone")
    sizes = [2, 3, 64, *(generator.randint(2, 64) for _ in range(NUM_TRIALS - 3))]
    with ThreadPoolExecutor(64) as pool:
        for trial, size in enumerate(sizes):
            others = [
                pool.submit(
                    answered,
                    server,
                    " ".join(generator.choices(WORDS, k=generator.randint(1, 16))),
                    temperature=generator.choice([0, 0.8]),
                    max_tokens=generator.randint(1, 4),
                )
                for _ in range(size - 1)
            ]
            asked = pool.submit(answered, server, PROMPT, **fields, cache_salt=str(trial % 4))
            assert asked.result() == expected, f"trial {trial}, in a batch of {size}"
            for other in others:
                other.result()


def test_it_is_told(server: Server) -> None:
    decisions = {found["name"]: found for found in server.http.get("/v1/server_info").json()["decisions"]}
    assert decisions["batch_invariant"]["value"] == "yes"
