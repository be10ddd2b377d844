"""Several ranks, each a process, through the whole offline engine: the same tokens as transformers on one."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from trimaran import LLM, SamplingParams
from trimaran.frontend.client.outputs import RequestOutput

from ..tiny_models import save, save_tokenizer, variants
from .greedy import Reference
from .prompts import demo_prompts
from .test_engine_variants import prompts

EVEN_HEADS = ("llama_llama3", "llama_biases", "mistral_window", "qwen2_yarn", "qwen3")
LOGPROB_LIMIT = 1e-4


def answers(folder: Path, texts: Sequence[Sequence[int]], num_tokens: int, cache: Path, **options: Any) -> list[Any]:
    """Greedy answers with log-probabilities, all at once; the last entry is the first text again, three times."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=3, prompt_logprobs=0)
    choices = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, n=3)
    shared = {"dtype": "float32", "max_model_len": 256, "kv_memory_bytes": 64 << 20, "worker_threads": 1}
    with LLM(str(folder), cache_dir=str(cache), **shared, **options) as llm:
        asked = [list(text) for text in (*texts, texts[0])]
        return llm.generate(asked, [params] * len(texts) + [choices], show_progress=False)


def judge(
    reference: Reference, outputs: list[RequestOutput], limit: int, report: Callable[[str, object], None]
) -> None:
    num_ties = 0
    for output in outputs:
        for choice in output.outputs:
            num_ties += reference.count_ties(output.prompt_token_ids, choice.token_ids)
    report("accepted ties", num_ties)
    print(f"{num_ties} ties accepted")
    assert num_ties <= limit
    assert len(outputs[-1].outputs) == 3
    for output in outputs[:-1]:
        entries = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        ours = torch.tensor([entry.logprob for entry in entries if entry is not None])
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        torch.testing.assert_close(ours, reference.scores(tokens).logprobs, atol=LOGPROB_LIMIT, rtol=0)


@pytest.mark.parametrize("name", EVEN_HEADS)
def test_two_ranks(tmp_path: Path, cache: Path, name: str, record_property: Callable[[str, object], None]) -> None:
    reference = Reference(save(variants()[name], tmp_path))
    save_tokenizer(tmp_path)
    judge(reference, answers(tmp_path, prompts(), 20, cache, tensor_parallel=2), 2, record_property)


@pytest.mark.long
@pytest.mark.model
def test_demo_model_on_three_ranks(
    demo_folder: Path,
    demo_reference: Reference,
    cache: Path,
    record_property: Callable[[str, object], None],
) -> None:
    outputs = answers(demo_folder, demo_prompts(demo_folder), 64, cache, tensor_parallel=3)
    assert all(len(output.outputs[0].token_ids) == 64 for output in outputs[:-1])
    judge(demo_reference, outputs, 3, record_property)
