"""SmolLM2 through the engine core and the tensor engine together, against transformers in float32.

A token may differ from greedy choice only where the reference's top two lie within 1e-4; the comparison then goes on
from our token, and every test reports how often that happened.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from trimaran.device_workers.execution.contract import StepEngine
from trimaran.ipc.frontend_messages import FinishReason
from trimaran.ipc.sampling import Sampling

from ..engine_driver import Answer, EngineDriver, greedy
from .greedy import Reference
from .prompts import NUM_ALIKE, chat_prompt, demo_prompts

NUM_TOKENS = 64
MAX_TIES = 3  # of 1,280 tokens
LOGPROB_LIMIT = 1e-4
pytestmark = pytest.mark.model

Prompts = tuple[tuple[int, ...], ...]
Judge = Callable[[Iterable[Answer]], None]


@pytest.fixture(scope="session")
def prompts(demo_folder: Path) -> Prompts:
    return demo_prompts(demo_folder)


@pytest.fixture
def judge(demo_reference: Reference, record_property: Callable[[str, object], None]) -> Judge:
    """Every sequence of the answers is the reference's; reports the number of ties."""

    def check(answers: Iterable[Answer]) -> None:
        outputs = [(answer.prompt, choice.tokens) for answer in answers for choice in answer.choices]
        num_ties = sum(demo_reference.count_ties(prompt, tokens) for prompt, tokens in outputs)
        record_property("accepted ties", num_ties)
        print(f"{num_ties} ties accepted of {sum(len(tokens) for _, tokens in outputs)} tokens")
        assert num_ties <= MAX_TIES

    return check


def assert_lengths(answers: Iterable[Answer]) -> None:
    assert all(len(choice.tokens) == NUM_TOKENS for answer in answers for choice in answer.choices)


# greedy output

WITHOUT_AND_WITH_CACHE = [
    pytest.param(False, marks=pytest.mark.long, id="cache_off"),
    pytest.param(True, id="cache_on"),
]


def test_alone(demo_engine: StepEngine, prompts: Prompts, judge: Judge) -> None:
    driver = EngineDriver(demo_engine, prefix_caching=False)
    answers = [driver.generate(prompt, greedy(NUM_TOKENS)) for prompt in prompts]
    assert_lengths(answers)
    judge(answers)


@pytest.mark.parametrize("prefix_caching", WITHOUT_AND_WITH_CACHE)
def test_mixed_batch_arriving_at_random(
    demo_engine: StepEngine, prompts: Prompts, judge: Judge, prefix_caching: bool
) -> None:
    """Twenty greedy requests among twelve that sample; with the cache, prompts that start alike are partly hits."""
    driver = EngineDriver(demo_engine, max_num_seqs=32, prefix_caching=prefix_caching)
    asks: list[tuple[tuple[int, ...], Sampling]] = [(prompt, greedy(NUM_TOKENS)) for prompt in prompts]
    for place in range(12):
        asks.insert(2 * place, (prompts[place][::-1], Sampling(max_tokens=40, temperature=0.9, top_p=0.95)))
    answers = [
        answer
        for answer, (_, sampling) in zip(driver.run_arriving(asks), asks, strict=True)
        if sampling.temperature == 0
    ]
    assert (sum(answer.cached_tokens for answer in answers) > 0) == prefix_caching
    assert_lengths(answers)
    judge(answers)


def test_prompts_in_chunks_of_sixteen(demo_engine: StepEngine, prompts: Prompts, judge: Judge) -> None:
    driver = EngineDriver(demo_engine, max_num_seqs=16, max_batched_tokens=16)
    answers = [driver.generate(prompts[-1], greedy(NUM_TOKENS))]
    assert driver.largest_chunk == 16
    answers += driver.run_arriving([(prompt, greedy(NUM_TOKENS)) for prompt in prompts[:-1]])
    assert driver.largest_chunk == 16
    assert_lengths(answers)
    judge(answers)


def test_prompts_from_the_prefix_cache(demo_engine: StepEngine, prompts: Prompts, judge: Judge) -> None:
    """The second time, all of a prompt but its last block is a hit; also where another request wrote it."""
    driver = EngineDriver(demo_engine, num_blocks=400)
    for prompt in prompts:
        driver.submit(prompt, greedy(1))
    driver.run()
    again = [driver.submit(prompt, greedy(NUM_TOKENS)) for prompt in prompts]
    driver.run()
    assert [answer.cached_tokens for answer in again] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    assert len({answer.prompt[0] for answer in again[-NUM_ALIKE:]}) == 1
    judge(again)


@pytest.mark.parametrize("prefix_caching", WITHOUT_AND_WITH_CACHE)
def test_preemption(demo_engine: StepEngine, prompts: Prompts, judge: Judge, prefix_caching: bool) -> None:
    driver = EngineDriver(demo_engine, num_blocks=40, max_num_seqs=16, prefix_caching=prefix_caching, first_horizon=1)
    answers = driver.run_arriving([(prompt, greedy(NUM_TOKENS)) for prompt in prompts])
    assert driver.num_preemptions > 0, "the pool was meant to be too small"
    print(f"{driver.num_preemptions} preemptions")
    assert_lengths(answers)
    judge(answers)


def test_three_choices_of_each(demo_engine: StepEngine, prompts: Prompts, judge: Judge) -> None:
    driver = EngineDriver(demo_engine, max_num_seqs=30)
    answers = [driver.submit(prompt, greedy(24), n=3) for prompt in prompts[4::4]]
    driver.run()
    for answer in answers:
        assert answer.choices[1].tokens == answer.choices[2].tokens
    judge(answers)


def test_the_references_own_generate(
    demo_model: torch.nn.Module, demo_engine: StepEngine, prompts: Prompts, demo_reference: Reference
) -> None:
    """Tokens that transformers generates step by step, not only its opinion of ours."""
    compare_with_generate(demo_model, demo_engine, demo_reference, [prompts[5], prompts[13]])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_references_own_generate_for_every_prompt(
    demo_model: torch.nn.Module, demo_engine: StepEngine, prompts: Prompts, demo_reference: Reference
) -> None:
    compare_with_generate(demo_model, demo_engine, demo_reference, prompts)


def compare_with_generate(
    model: Any, engine: StepEngine, reference: Reference, prompts: Iterable[tuple[int, ...]]
) -> None:
    driver = EngineDriver(engine)
    for prompt in prompts:
        with torch.inference_mode():
            said = model.generate(
                torch.tensor([prompt], device=reference.device),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=reference.device),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
            )[0, len(prompt) :].tolist()
        ours = driver.generate(prompt, greedy(NUM_TOKENS)).tokens
        if ours != said:  # only a tie explains it
            assert reference.count_ties(prompt, ours) > 0 or reference.count_ties(prompt, said) > 0


# log-probabilities


@pytest.mark.parametrize("way", ["whole", "chunks", "preempted"])
def test_logprobs_of_prompt_and_output(
    demo_engine: StepEngine, prompts: Prompts, demo_reference: Reference, way: str
) -> None:
    sizes: dict[str, Any] = {
        "whole": {},
        "chunks": {"max_batched_tokens": 16, "max_num_seqs": 16},
        "preempted": {"num_blocks": 30, "max_num_seqs": 16},
    }[way]
    driver = EngineDriver(demo_engine, **sizes, first_horizon=1)
    asks = greedy(24, num_logprobs=5, num_prompt_logprobs=3)
    answers = driver.run_arriving([(prompt, asks) for prompt in prompts[6:16]])
    assert (driver.num_preemptions > 0) == (way == "preempted")
    for answer in answers:
        check_logprobs(answer, demo_reference)


def check_logprobs(answer: Answer, reference: Reference) -> None:
    choice, length = answer.choices[0], len(answer.prompt)
    tokens = [*answer.prompt, *choice.tokens]
    logprobs = reference.scores(tokens).logprobs
    assert len(answer.prompt_logprobs) == length - 1
    ours = torch.tensor([*answer.prompt_logprobs, *choice.logprobs])
    torch.testing.assert_close(ours, logprobs, atol=LOGPROB_LIMIT, rtol=0)
    tops = [*answer.prompt_tops, *choice.tops]
    assert [len(top) for top in tops] == [3] * (length - 1) + [5] * len(choice.tokens)
    for entry, top in enumerate(tops):
        reference.check_tops(entry, tokens, top, LOGPROB_LIMIT)


def test_logprobs_are_of_the_raw_logits(demo_engine: StepEngine, prompts: Prompts, demo_reference: Reference) -> None:
    """Temperature, penalties and bias choose the token; they do not change what the model thought of it."""
    sampling = Sampling(
        max_tokens=24,
        temperature=0.7,
        top_k=40,
        seed=5,
        frequency_penalty=0.6,
        repetition_penalty=1.2,
        logit_bias=((260, 3.0),),
        num_logprobs=4,
    )
    answer = EngineDriver(demo_engine).generate(prompts[9], sampling)
    tokens = [*answer.prompt, *answer.tokens]
    expected = demo_reference.scores(tokens).logprobs[len(answer.prompt) - 1 :]
    torch.testing.assert_close(torch.tensor(answer.choices[0].logprobs), expected, atol=LOGPROB_LIMIT, rtol=0)
    assert max(answer.choices[0].ranks) > 1


@pytest.mark.user_pain("Q1")
def test_first_token_is_the_same_from_the_cache(demo_engine: StepEngine, prompts: Prompts) -> None:
    """At every length round a block border: cold, from its own blocks, and from those of a longer text."""
    text = [token for prompt in prompts[-NUM_ALIKE:] for token in prompt][:140]
    driver = EngineDriver(demo_engine, num_blocks=400)
    asks = greedy(1, num_logprobs=5)
    warm = driver.submit(text, greedy(1), salt="long")
    driver.run()
    assert warm.cached_tokens == 0
    for length in (border + near for border in range(16, 129, 16) for near in (-1, 0, 1)):
        prompt = text[:length]
        cold = driver.submit(prompt, asks, salt=f"cold {length}")
        driver.run()
        own = driver.submit(prompt, asks, salt=f"cold {length}")
        foreign = driver.submit(prompt, asks, salt="long")
        driver.run()
        assert (cold.cached_tokens, own.cached_tokens) == (0, (length - 1) // 16 * 16)
        assert foreign.cached_tokens == own.cached_tokens
        expected = cold.choices[0].tops[0]
        for cached in (own, foreign):
            found = dict(cached.choices[0].tops[0])
            assert max(abs(found[token] - value) for token, value in expected) < 1e-3


# choosing tokens


@pytest.mark.user_pain("Q4")
def test_a_seed_gives_the_same_text(demo_engine: StepEngine, prompts: Prompts) -> None:
    """Five times alone, then beside neighbours without a seed and in another place of the batch."""
    seeded = Sampling(max_tokens=16, temperature=0.8, top_p=0.9, seed=42)
    alone = [EngineDriver(demo_engine, seed=index).generate(prompts[8], seeded).tokens for index in range(5)]
    driver = EngineDriver(demo_engine, seed=9)
    neighbours = [driver.submit(prompt, Sampling(max_tokens=20, temperature=0.8)) for prompt in prompts[:4]]
    beside = driver.submit(prompts[8], seeded)
    twins = [driver.submit(prompts[8], Sampling(max_tokens=16, temperature=1.0)) for _ in range(2)]
    driver.run()
    assert all(tokens == alone[0] for tokens in [*alone, beside.tokens])
    assert twins[0].tokens != twins[1].tokens
    assert all(len(answer.tokens) == 20 for answer in neighbours)


@pytest.mark.user_pain("Q4")
@pytest.mark.parametrize("n", [3, 4])
def test_choices_of_a_seed_are_repeatable_and_differ(demo_engine: StepEngine, prompts: Prompts, n: int) -> None:
    seeded = Sampling(max_tokens=16, temperature=0.8, seed=7)
    sets = []
    for index in range(2):
        driver = EngineDriver(demo_engine, seed=index)
        if index:
            driver.submit(prompts[2], Sampling(max_tokens=30, temperature=1.0))
        answer = driver.generate(prompts[10], seeded, n=n)
        sets.append({tuple(choice.tokens) for choice in answer.choices})
    assert sets[0] == sets[1]
    assert len(sets[0]) > 1


@pytest.mark.user_pain("V2")
def test_a_tiny_temperature_is_greedy(demo_engine: StepEngine, prompts: Prompts, judge: Judge) -> None:
    driver = EngineDriver(demo_engine)
    asks = Sampling(max_tokens=24, temperature=1e-5, seed=1, top_p=0.5)
    answers = [driver.submit(prompt, asks) for prompt in prompts[3:8]]
    driver.run()
    assert all(len(answer.tokens) == 24 for answer in answers)
    judge(answers)


@pytest.mark.user_pain("S9")
def test_every_end_token_ends_and_min_tokens_holds(demo_engine: StepEngine, demo_folder: Path) -> None:
    """By the model's own end, by a second one, by a user's, and not before `min_tokens`."""
    prompt = chat_prompt(demo_folder, "What is the capital of France?")
    driver = EngineDriver(demo_engine)
    free = driver.generate(prompt, greedy(16, end_token_ids=(2,)))
    assert free.choices[0].finish is FinishReason.END_TOKEN
    assert (free.tokens[-1], len(free.tokens)) == (2, 8)
    second = driver.generate(prompt, greedy(16, end_token_ids=(2, free.tokens[5])))
    assert second.tokens == free.tokens[:6]
    assert second.choices[0].finish is FinishReason.END_TOKEN
    users = driver.generate(prompt, greedy(16, end_token_ids=(2,), stop_token_ids=(free.tokens[4],)))
    assert users.tokens == free.tokens[:5]
    assert users.choices[0].finish is FinishReason.STOP_TOKEN
    longer = driver.generate(prompt, greedy(16, min_tokens=12, end_token_ids=(2,)))
    assert longer.tokens[:7] == free.tokens[:7]
    assert len(longer.tokens) >= 12
    assert 2 not in longer.tokens[:12]
    ignoring = driver.generate(prompt, greedy(16))
    assert ignoring.tokens[:8] == free.tokens
    assert (len(ignoring.tokens), ignoring.choices[0].finish) == (16, FinishReason.LENGTH)
