"""Every native family and rotary variant through the engine core and the tensor engine together, against transformers.

The same ways as for the demo model, in small: alone, in a mixed batch, in chunks, from the prefix cache, preempted,
several choices; and what only a small model can check.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from trimaran.device_workers.execution.contract import StepEngine
from trimaran.ipc.sampling import Sampling

from ..engine_driver import Answer, EngineDriver, greedy
from ..step_driver import start_engine
from ..tiny_models import SIZES, save, variants
from .greedy import Reference

VARIANTS = variants()
NUM_TOKENS = 20
LENGTHS = (5, 40, 17, 33, 70, 50, 12, 24)
NUM_ALIKE, ALIKE_TOKENS = 3, 35
LOGPROB_LIMIT = 1e-4

Subject = tuple[StepEngine, Reference]


@pytest.fixture(scope="module", params=VARIANTS)
def subject(request: pytest.FixtureRequest, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """One variant: a step engine and its reference."""
    directory = tmp_path_factory.mktemp(request.param)
    reference = Reference(save(VARIANTS[request.param], directory))
    engine, facts = start_engine(directory, cache, dtype="float32")
    assert not any(resolution.demoted for resolution in facts.resolutions), "a kernel gave way to its reference"
    yield engine, reference


def prompts() -> list[list[int]]:
    chance = random.Random(11)
    made = [[chance.randrange(3, SIZES["vocab_size"]) for _ in range(length)] for length in LENGTHS]
    alike = [chance.randrange(3, SIZES["vocab_size"]) for _ in range(ALIKE_TOKENS)]
    return [*made, *(alike + made[index][:8] for index in range(NUM_ALIKE))]


def judge(reference: Reference, answers: list[Answer], report: Callable[[str, object], None]) -> None:
    outputs = [(answer.prompt, choice.tokens) for answer in answers for choice in answer.choices]
    assert all(len(tokens) == NUM_TOKENS for _, tokens in outputs)
    num_ties = sum(reference.count_ties(prompt, tokens) for prompt, tokens in outputs)
    report("accepted ties", num_ties)
    print(f"{num_ties} ties accepted of {sum(len(tokens) for _, tokens in outputs)} tokens")
    assert num_ties <= 2


def test_alone(subject: Subject, record_property: Callable[[str, object], None]) -> None:
    engine, reference = subject
    driver = EngineDriver(engine, prefix_caching=False)
    judge(reference, [driver.generate(prompt, greedy(NUM_TOKENS)) for prompt in prompts()], record_property)


@pytest.mark.parametrize("prefix_caching", [False, True], ids=["cache_off", "cache_on"])
def test_mixed_batch_in_chunks(
    subject: Subject, prefix_caching: bool, record_property: Callable[[str, object], None]
) -> None:
    """Thirty-two requests at random, prompts in chunks of at most sixteen; the cache gives what it can."""
    engine, reference = subject
    driver = EngineDriver(engine, max_num_seqs=16, max_batched_tokens=16, prefix_caching=prefix_caching)
    asks: list[tuple[list[int], Sampling]] = [(prompt, greedy(NUM_TOKENS)) for prompt in 2 * prompts()]
    asks += [(prompt, Sampling(max_tokens=30, temperature=1.0)) for prompt in prompts()[:10]]
    random.Random(5).shuffle(asks)
    answers = driver.run_arriving(asks)
    chosen = [answer for answer, (_, asked) in zip(answers, asks, strict=True) if asked.temperature == 0]
    assert (sum(answer.cached_tokens for answer in chosen) > 0) == prefix_caching
    judge(reference, chosen, record_property)


@pytest.mark.parametrize("prefix_caching", [False, True], ids=["cache_off", "cache_on"])
def test_preemption(subject: Subject, prefix_caching: bool, record_property: Callable[[str, object], None]) -> None:
    engine, reference = subject
    driver = EngineDriver(engine, num_blocks=16, max_num_seqs=8, prefix_caching=prefix_caching, first_horizon=1)
    answers = driver.run_arriving([(prompt, greedy(NUM_TOKENS)) for prompt in prompts()])
    assert driver.num_preemptions > 0, "the pool was meant to be too small"
    judge(reference, answers, record_property)


@pytest.mark.parametrize("prefix_caching", [False, True], ids=["cache_off", "cache_on"])
def test_three_choices(subject: Subject, prefix_caching: bool, record_property: Callable[[str, object], None]) -> None:
    engine, reference = subject
    driver = EngineDriver(engine, prefix_caching=prefix_caching)
    answers = [driver.submit(prompt, greedy(NUM_TOKENS), n=3) for prompt in prompts()[:5]]
    seeded = Sampling(max_tokens=NUM_TOKENS, temperature=1.0, seed=3)
    drawn = [driver.submit(prompts()[4], seeded, n=3) for _ in range(2)]
    driver.run()
    judge(reference, answers, record_property)
    sets = [{tuple(choice.tokens) for choice in answer.choices} for answer in drawn]
    assert sets[0] == sets[1]
    assert len(sets[0]) == 3


def test_logprobs(subject: Subject) -> None:
    """Of prompts and outputs, beside requests that ask for none, in chunks and with preemption."""
    engine, reference = subject
    driver = EngineDriver(engine, num_blocks=16, max_num_seqs=8, max_batched_tokens=16, first_horizon=1)
    asks = [
        (prompt, greedy(NUM_TOKENS, num_logprobs=4, num_prompt_logprobs=3) if index % 3 else greedy(NUM_TOKENS))
        for index, prompt in enumerate(prompts())
    ]
    answers = driver.run_arriving(asks)
    assert driver.num_preemptions > 0
    for answer, (prompt, asked) in zip(answers, asks, strict=True):
        if asked.num_logprobs is None:
            assert not answer.prompt_logprobs and not answer.choices[0].logprobs
            continue
        tokens = [*prompt, *answer.tokens]
        ours = torch.tensor([*answer.prompt_logprobs, *answer.choices[0].logprobs])
        torch.testing.assert_close(ours, reference.scores(tokens).logprobs, atol=LOGPROB_LIMIT, rtol=0)
        for entry, top in enumerate([*answer.prompt_tops, *answer.choices[0].tops]):
            reference.check_tops(entry, tokens, top, LOGPROB_LIMIT)


# one variant is enough for what follows


@pytest.fixture(scope="module")
def plain(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = tmp_path_factory.mktemp("plain")
    reference = Reference(save(VARIANTS["llama"], directory))
    return start_engine(directory, cache, dtype="float32")[0], reference


def test_penalties_after_a_preemption(plain: Subject) -> None:
    """Each token is the best after penalties for all that was said, also by a sequence that was resumed."""
    engine, reference = plain
    driver = EngineDriver(engine, num_blocks=16, max_num_seqs=8, first_horizon=1)
    asks = greedy(40, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3)
    answers = driver.run_arriving([(prompt, asks) for prompt in prompts()[:6]])
    assert driver.num_preemptions > 0
    for answer in answers:
        text = [*answer.prompt, *answer.tokens]
        with torch.inference_mode():
            rows = reference.model(torch.tensor([text])).logits[0]
        for place in range(len(answer.prompt), len(text)):
            logits = rows[place - 1].clone()
            seen = torch.tensor(sorted(set(text[:place])))
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.3, logits[seen] * 1.3)
            said = torch.bincount(torch.tensor(text[len(answer.prompt) : place], dtype=torch.int64), minlength=300)
            logits -= 0.4 * said + 0.7 * (said > 0)
            assert float(logits.max() - logits[text[place]]) < 1e-4


def test_a_seed_survives_a_preemption(plain: Subject) -> None:
    engine, _ = plain
    asks = [
        (prompt, Sampling(max_tokens=40, temperature=0.8, seed=index)) for index, prompt in enumerate(prompts()[:6])
    ]
    calm = EngineDriver(engine).run_arriving(asks)
    driver = EngineDriver(engine, num_blocks=16, max_num_seqs=8, first_horizon=1)
    hurried = driver.run_arriving(asks)
    assert driver.num_preemptions > 0
    assert [answer.tokens for answer in hurried] == [answer.tokens for answer in calm]


@pytest.mark.user_pain("Q1")
def test_aborts_and_retries_do_not_mix_texts(plain: Subject) -> None:
    """Requests with a common start, some cut off in mid-prompt or mid-answer and asked again: answers stay right."""
    engine, reference = plain
    driver = EngineDriver(engine, num_blocks=30, max_num_seqs=8, max_batched_tokens=24)
    chance, kept = random.Random(2), []
    start = [chance.randrange(3, 300) for _ in range(48)]
    for _ in range(40):
        prompt = start[: chance.choice((16, 31, 32, 33, 48))] + [chance.randrange(3, 300) for _ in range(6)]
        left = driver.submit(prompt, greedy(NUM_TOKENS))
        for _ in range(chance.randrange(6)):
            driver.step()
        if chance.random() < 0.6:
            driver.abort(left)
        kept.append(driver.submit(prompt, greedy(8)))
    driver.run()
    assert sum(answer.cached_tokens for answer in kept) > 0
    assert sum(reference.count_ties(answer.prompt, answer.tokens) for answer in kept) <= 2


@pytest.mark.user_pain("Q6")
def test_padding_ids_are_never_sampled(tmp_path: Path, cache: Path) -> None:
    """Ids without a token, forced as high as a request can, stay out of answers and of alternatives."""
    save(VARIANTS["llama"], tmp_path)
    vocab = {f"t{index}": index for index in range(290)}
    tokenizer = {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    driver = EngineDriver(start_engine(tmp_path, cache, dtype="float32")[0])
    forced = {"logit_bias": tuple((token, 100.0) for token in range(288, 300)), "num_logprobs": 8}
    answers = [driver.submit([5, 6, 7], greedy(8, **forced))]
    answers += [
        driver.submit([5, 6, 7], Sampling(max_tokens=8, temperature=1.5, seed=seed, **forced)) for seed in range(6)
    ]
    driver.run()
    for answer in answers:
        assert {*answer.tokens} <= {288, 289}
        assert all(token < 290 for top in answer.choices[0].tops for token, _ in top)
        driver.generate(answer.tokens, greedy(1))  # what was said may be said back
