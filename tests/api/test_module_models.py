"""Models of families without code of ours, served as users serve them: over HTTP, on this machine's processor."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from ..embedding_models import reference_vector, save_pooling, unit
from ..module_models import DECODERS, WINDOW, save_decoder, save_module_encoder
from ..server import Server
from ..tiny_models import save_tokenizer

PROMPT = "The hulls of a trimaran are three, and the middle one is the longest of them."
NUM_TOKENS = 12


def _generated(model: Any, ids: list[int]) -> list[int]:
    prompt = torch.tensor([ids])
    with torch.inference_mode():
        every = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
    return [int(token) for token in every[0, len(ids) :]]


def test_a_decoder_is_served_and_explained(tmp_path: Path) -> None:
    """Its tokens, a grammar's, log-probabilities; what is told of it at the start, and what `explain` says ahead."""
    reference = save_decoder(DECODERS["gemma2"](), tmp_path)
    save_tokenizer(tmp_path)
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(PROMPT).ids
    assert len(ids) > 2 * WINDOW
    options = ("--dtype", "float32", "--platform", "cpu")
    with Server(tmp_path, *options, script=None) as server:
        ask = {"model": str(tmp_path), "prompt": ids, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        for _ in range(2):  # the second time from the prefix cache
            answer = server.http.post("/v1/completions", json={**ask, "return_token_ids": True, "logprobs": 2})
            assert answer.status_code == 200, answer.text
            [choice] = answer.json()["choices"]
            assert choice["token_ids"] == _generated(reference, ids)
        held = server.http.post(
            "/v1/completions", json={**ask, "ignore_eos": False, "structured_outputs": {"choice": ["left", "right"]}}
        )
        assert held.json()["choices"][0]["text"] in ("left", "right"), held.text
        info = server.http.get("/v1/server_info").json()
        told = {decision["name"]: decision for decision in info["decisions"]}
        assert told["model_code"]["value"].startswith("transformers ")
        assert told["graphs"]["value"] == "eager" and "not recorded" in told["graphs"]["reason"]
        assert any("model_code" in line and "transformers" in line for line in server.lines)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    command = [sys.executable, "-P", "-m", "trimaran.frontend.launch.commands", "explain", str(tmp_path), *options]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert {found["name"]: found["value"] for found in plan["decisions"]}["model_code"] == told["model_code"]["value"]
    kernels = {found["kernel"]: found["chosen"] for found in plan["kernels"]}
    assert kernels == {found["kernel"]: found["chosen"] for found in info["kernels"]}
    assert plan["memory"].keys() == info["memory"].keys()
    for what, size in plan["memory"].items():
        assert info["memory"][what] == pytest.approx(size, rel=0.02), what


def test_an_encoder_is_served(tmp_path: Path) -> None:
    reference = save_module_encoder("distilbert", tmp_path)
    save_pooling(tmp_path, "mean", normalizes=True)
    save_tokenizer(tmp_path)
    texts = [[5, 9, 77], [4, 8, 15, 16, 23, 42], [5, 9, 77]]
    with Server(tmp_path, "--dtype", "float32", "--platform", "cpu", script=None) as server:
        answer = server.http.post("/v1/embeddings", json={"model": str(tmp_path), "input": texts})
        assert answer.status_code == 200, answer.text
        for text, one in zip(texts, answer.json()["data"], strict=True):
            assert np.abs(one["embedding"] - unit(reference_vector(reference, text, "mean"))).max() < 1e-5
