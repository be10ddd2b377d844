"""SmolLM2 in bfloat16 on the GPU: log probabilities near those of float32, and the same perplexity by every set of
kernels.

python -m pytest -m gpu tests/gpu/test_quality.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache as cached
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer

from trimaran.kernels.catalog import CATALOG
from trimaran.kernels.registry import Registry

from ..engine_driver import EngineDriver, greedy
from ..numerics.greedy import Reference
from ..numerics.prompts import demo_prompts
from ..step_driver import start_engine
from .conftest import SETTLED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.model,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]
NUM_TEXTS = 24
TEXT_TOKENS = 400
PERPLEXITY_LIMIT = 0.005  # relative
MEAN_SHARE, WORST_SHARE = 1.2, 2.0
"""Of the mean and the largest difference that transformers' own bfloat16 makes, on the same GPU and texts: of a token's
log probability to that in float32, over prompts and outputs.
"""

TRITON = tuple(found.name for found in CATALOG if found.name.startswith("triton_"))
HOPPERS = (
    *(name for name in TRITON if name.endswith("_bulk")),
    "triton_norm_linear",
    "triton_norm_gate_up",
    "triton_linear_add",
    "triton_decode_attention",
    "triton_linear",
)
PLAIN = tuple(found.name for kernel in Registry(CATALOG).kernels for found in Registry(CATALOG).chain(kernel)[:-1])
WITHOUT = {"hopper": (), "generic": HOPPERS, "reference": PLAIN}


def driver_without(folder: Path, cache: Path, without: tuple[str, ...]) -> EngineDriver:
    engine, facts = start_engine(
        folder,
        cache,
        settled=SETTLED,
        num_blocks=400,
        dtype="bfloat16",
        platform="cuda",
        kv_memory_bytes=1 << 30,
        without_kernels=without,
    )
    assert not any(resolution.demoted for resolution in facts.resolutions)
    return EngineDriver(engine, max_num_seqs=16, max_model_len=512, num_blocks=400, prefix_caching=False)


@cached
def texts(folder: Path) -> tuple[tuple[int, ...], ...]:
    """The standard library's documentation, in runs of so many tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))).ids
    return tuple(tuple(whole[place * TEXT_TOKENS : (place + 1) * TEXT_TOKENS]) for place in range(NUM_TEXTS))


@pytest.fixture(scope="module")
def perplexity(demo_folder: Path, cache: Path) -> Callable[[str], float]:
    @cached
    def of(kernels: str) -> float:
        driver = driver_without(demo_folder, cache, WITHOUT[kernels])
        answers = [driver.submit(text, greedy(1, num_prompt_logprobs=1)) for text in texts(demo_folder)]
        driver.run()
        logprobs = [value for answer in answers for value in answer.prompt_logprobs]
        assert len(logprobs) == NUM_TEXTS * (TEXT_TOKENS - 1)
        return math.exp(-sum(logprobs) / len(logprobs))

    return of


@pytest.mark.parametrize("kernels", ["hopper", "generic"])
def test_perplexity_is_that_of_the_reference(kernels: str, perplexity: Callable[[str], float]) -> None:
    expected, found = perplexity("reference"), perplexity(kernels)
    print(f"perplexity {found:.4f}, reference kernels {expected:.4f}: {found / expected - 1:+.4%}")
    assert abs(found / expected - 1) < PERPLEXITY_LIMIT


def test_log_probabilities_are_as_near_to_float32_as_those_of_transformers(
    demo_folder: Path, cache: Path, demo_reference: Reference
) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.bfloat16, local_files_only=True)
    peer = Reference(theirs.to(demo_reference.device).eval())
    driver = driver_without(demo_folder, cache, ())
    asks = greedy(32, num_logprobs=1, num_prompt_logprobs=1)
    answers = [driver.submit(prompt, asks) for prompt in demo_prompts(demo_folder)]
    driver.run()
    differences: list[list[torch.Tensor]] = [[], []]
    for answer in answers:
        choice = answer.choices[0]
        tokens = [*answer.prompt, *choice.tokens]
        expected = demo_reference.scores(tokens).logprobs
        ours = torch.tensor([*answer.prompt_logprobs, *choice.logprobs])
        for found, logprobs in zip(differences, (ours, peer.scores(tokens).logprobs), strict=True):
            found.append((logprobs - expected).abs())
    ours_all, theirs_all = (torch.cat(found) for found in differences)
    print(f"{len(ours_all)} tokens: difference {ours_all.mean():.4f}, at most {ours_all.max():.4f};", end=" ")
    print(f"transformers {theirs_all.mean():.4f}, at most {theirs_all.max():.4f}")
    assert float(ours_all.mean()) < MEAN_SHARE * float(theirs_all.mean())
    assert float(ours_all.max()) < WORST_SHARE * float(theirs_all.max())
