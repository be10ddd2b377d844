"""Constrained answers of a real model: each token is the likeliest of those that its grammar allows."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer

from trimaran.device_workers.execution.contract import StepEngine
from trimaran.engine_core.constraint import GrammarWalk, num_words
from trimaran.engine_core.grammar_compiler import CompiledGrammar
from trimaran.engine_core.grammar_limits import compiled
from trimaran.engine_core.grammar_text import grammar_text
from trimaran.engine_core.token_bytes import TokenBytes
from trimaran.frontend.text.model_text import ModelText
from trimaran.ipc.frontend_messages import FinishReason
from trimaran.ipc.sampling import Sampling

from ..engine_driver import Answer, EngineDriver, greedy
from .greedy import TIE
from .prompts import demo_prompts

pytestmark = pytest.mark.model
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "population", "is_capital"],
    "additionalProperties": False,
}
VALIDATOR = jsonschema_rs.Draft202012Validator(CITY)
Compile = Callable[[str, Any], CompiledGrammar]


@pytest.fixture(scope="module")
def text(demo_folder: Path) -> ModelText:
    return ModelText.load(demo_folder)


@pytest.fixture(scope="module")
def compile(text: ModelText) -> Compile:
    tokenizer = text.tokenizer
    vocabulary = TokenBytes.of(
        tokenizer.bytes.table, control_ids=tuple(tokenizer.control_ids), end_ids=text.end_token_ids
    )
    loaded = vocabulary.tokenizer()

    def compile(kind: str, source: Any) -> CompiledGrammar:
        given = source if isinstance(source, str) else json.dumps(source)
        matcher = compiled(loaded, grammar_text(kind, given))
        assert not matcher.is_error(), matcher.get_error()
        return CompiledGrammar(matcher, vocabulary)

    return compile


def ending(text: ModelText, **sampling: Any) -> Sampling:
    return greedy(48, **{"end_token_ids": text.end_token_ids, **sampling})


def check_likeliest(model: torch.nn.Module, answer: Answer, grammar: CompiledGrammar, sampling: Sampling) -> None:
    """Of what is allowed, by the reference's logits; ties may go either way."""
    for choice in answer.choices:
        ids = torch.tensor([[*answer.prompt, *choice.tokens]])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(answer.prompt) - 1 : -1].float()
        constraint = GrammarWalk(grammar, sampling)
        words = np.zeros(num_words(grammar.num_tokens), np.uint32)
        for place, token in enumerate(choice.tokens):
            constraint.fill(words)
            allowed = torch.from_numpy(np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool))
            best = logits[place].masked_fill(~allowed[: logits.shape[1]], -torch.inf).max()
            assert allowed[token] and float(best - logits[place, token]) <= TIE, place
            if token not in sampling.end_token_ids:
                constraint.advance([token])


def check_city(tokenizer: FastTokenizer, answer: Answer) -> None:
    for choice in answer.choices:
        if choice.finish is FinishReason.END_TOKEN:
            VALIDATOR.validate(json.loads(tokenizer.decode(choice.tokens)))


def test_greedy_takes_the_likeliest_that_is_allowed(
    demo_engine: StepEngine, demo_model: torch.nn.Module, demo_folder: Path, text: ModelText, compile: Compile
) -> None:
    """Alone, in a mixed batch with chunks of prompts, three choices, after preemptions; neighbours do not notice."""
    prompts = demo_prompts(demo_folder)[:8]
    grammar, sampling = compile("json_schema", CITY), ending(text)
    driver = EngineDriver(demo_engine)
    alone = driver.submit(prompts[0], sampling, grammar=grammar)
    free_alone = driver.submit(prompts[1], greedy(20))
    driver.run()
    check_likeliest(demo_model, alone, grammar, sampling)
    assert alone.choices[0].finish is FinishReason.END_TOKEN
    small = EngineDriver(demo_engine, num_blocks=20, max_num_seqs=12, max_batched_tokens=24, first_horizon=1)
    answers = [small.submit(prompt, sampling, n=1 + place % 3, grammar=grammar) for place, prompt in enumerate(prompts)]
    free = small.submit(prompts[1], greedy(20))
    small.run()
    assert small.num_preemptions > 0, "the pool was meant to be too small"
    for answer in answers:
        check_likeliest(demo_model, answer, grammar, sampling)
        check_city(text.tokenizer.fast, answer)
    assert free.tokens == free_alone.tokens
    assert answers[0].tokens == alone.tokens


def test_with_penalties_biases_and_logprobs(demo_engine: StepEngine, text: ModelText, compile: Compile) -> None:
    """Row S8: what is kept is finite, and of the raw logits; a bias for what is not allowed changes nothing."""
    grammar = compile("json_schema", CITY)
    asks = {"repetition_penalty": 1.3, "num_logprobs": 20, "logit_bias": ((100, 100.0),), "temperature": 0.2}
    driver = EngineDriver(demo_engine)
    sampling = Sampling(max_tokens=64, end_token_ids=text.end_token_ids, seed=3, top_p=0.05, **asks)  # type: ignore[arg-type]
    answers = [driver.submit([5, 6, 7, number], sampling, n=2, grammar=grammar) for number in range(5)]
    driver.run()
    for answer in answers:
        check_city(text.tokenizer.fast, answer)
        for choice in answer.choices:
            assert len(choice.logprobs) == len(choice.tokens)
            assert all(map(math.isfinite, choice.logprobs))
            assert all(math.isfinite(value) for top in choice.tops for _, value in top)
    assert any(rank > 1 for answer in answers for choice in answer.choices for rank in choice.ranks)


@pytest.mark.user_pain("M5")
def test_m5_the_largest_batch_with_grammars_and_logprobs(
    demo_engine: StepEngine, text: ModelText, compile: Compile
) -> None:
    """Every row seated, the longest prompts, a grammar and log-probabilities each: no step runs out of memory."""
    driver = EngineDriver(demo_engine, num_blocks=400, max_num_seqs=40, max_batched_tokens=512)
    sampling = Sampling(max_tokens=6, end_token_ids=text.end_token_ids, num_logprobs=20, seed=1)
    answers = [
        driver.submit([7 + number] * 100, sampling, grammar=compile("regex", f"[a-z]{{{number + 9}}}"))
        for number in range(40)
    ]
    driver.run()
    for answer in answers:
        words = text.tokenizer.fast.decode(answer.tokens)
        assert words.isalpha() and words.islower() and len(answer.choices[0].logprobs) == len(answer.tokens)


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 33])
def test_masks_of_any_number_of_rows(demo_engine: StepEngine, text: ModelText, compile: Compile, num_rows: int) -> None:
    """They are taken apart some rows at a time."""
    driver = EngineDriver(demo_engine)
    words = [f"word{number}" for number in range(num_rows)]
    answers = [
        driver.submit([9, number], ending(text), grammar=compile("choice", [word])) for number, word in enumerate(words)
    ]
    free = driver.submit([1, 2, 3], greedy(5))
    driver.run()
    assert [text.tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers] == words
    assert len(free.tokens) == 5


def test_all_ids_beyond_the_tokenizer_are_refused(demo_engine: StepEngine, text: ModelText, compile: Compile) -> None:
    """Row Q6 for grammars: a mask is as wide as the tokenizer's vocabulary, and what lies behind it is not allowed."""
    grammar = compile("regex", r"(.|\n)*")
    constraint = GrammarWalk(grammar, ending(text), (1,))
    words = np.zeros(num_words(grammar.num_tokens), np.uint32)
    constraint.fill(words)
    allowed = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not allowed[grammar.num_tokens :].any()
    assert allowed[: grammar.num_tokens].sum() == grammar.num_tokens - len(set(grammar.end_ids))
