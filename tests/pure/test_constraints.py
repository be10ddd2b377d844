"""Grammars in the engine core: what masks allow, and that sequences keep to them whatever the scheduler does."""

import json
import re

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.device_workers.platforms.null_model import NullScript, expected_tokens
from trimaran.engine_core.constraint import Constraint, ConstraintFailed, GrammarWalk, constraint_of
from trimaran.engine_core.grammar_compiler import CompiledGrammar
from trimaran.engine_core.grammar_text import grammar_text
from trimaran.engine_core.request import Request
from trimaran.engine_core.token_bytes import TokenBytes
from trimaran.ipc.frontend_messages import FailKind, FinishReason
from trimaran.ipc.sampling import Grammar, Sampling, ThoughtLimit
from trimaran.ipc.worker_messages import StepError, StepErrorKind
from trimaran.tests.pure.constrained import (
    CONTROL,
    END,
    OTHER_END,
    PERSON,
    TOKENIZER,
    TOKENS,
    VOCABULARY,
    Driver,
    made,
    text_of,
)

ENDS = (END, OTHER_END)
VALIDATOR = jsonschema_rs.Draft202012Validator(PERSON)


def sampling(**given: object) -> Sampling:
    return Sampling(**({"max_tokens": 50, "end_token_ids": ENDS} | given))  # type: ignore[arg-type]


def allowed(constraint: GrammarWalk | Constraint) -> set[int]:
    words = np.zeros(constraint.num_words, np.uint32)
    constraint.fill(words)
    return set(np.nonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[0].tolist())


def spelled(text: str) -> list[int]:
    return list(TOKENIZER.greedy_tokenize(text))


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    """Whether this and no less is a whole answer."""
    constraint = GrammarWalk(grammar, sampling())
    for token in spelled(text):
        if token not in allowed(constraint):
            return False
        constraint.advance([token])
    return END in allowed(constraint)


def test_a_complete_answer_may_only_end() -> None:
    constraint = GrammarWalk(made("choice", ["yes", "no"]), sampling())
    assert allowed(constraint) == {ord("y"), ord("n"), TOKENS.index(b"yes")}
    constraint.advance([TOKENS.index(b"yes")])
    assert allowed(constraint) == set(ENDS)


def test_control_tokens_are_no_text() -> None:
    constraint = GrammarWalk(made("regex", r"(.|\n)*"), sampling())
    assert CONTROL not in allowed(constraint) and set(ENDS) <= allowed(constraint)


def test_min_tokens_holds_an_end_back_that_need_not_be() -> None:
    constraint = GrammarWalk(made("regex", "a*"), sampling(min_tokens=2))
    assert allowed(constraint) == {ord("a")}
    constraint.advance(spelled("aa"))
    assert allowed(constraint) == {ord("a"), *ENDS}
    complete = GrammarWalk(made("choice", ["a"]), sampling(min_tokens=9))
    complete.advance(spelled("a"))
    assert allowed(complete) == set(ENDS), "nothing but an end is left"


def test_ignored_end_tokens_end_what_is_complete() -> None:
    ignoring = sampling(end_token_ids=())
    assert allowed(GrammarWalk(made("regex", "a*"), ignoring)) == {ord("a")}
    complete = GrammarWalk(made("choice", ["a"]), ignoring)
    complete.advance(spelled("a"))
    assert allowed(complete) == set(ENDS)


def test_stop_tokens_end_where_the_grammar_may() -> None:
    constraint = GrammarWalk(made("regex", "ab*"), sampling(stop_token_ids=(CONTROL,), end_token_ids=()))
    assert allowed(constraint) == {ord("a")}
    constraint.advance(spelled("a"))
    assert allowed(constraint) == {ord("b"), CONTROL}


def test_t5_free_until_the_mark_then_constrained() -> None:
    mark = (CONTROL, 10)
    constraint = GrammarWalk(made("choice", ["yes"]), sampling(), mark)
    free = set(range(len(TOKENS))) - set(ENDS)
    assert allowed(constraint) == free, "it may not end before the answer"
    constraint.advance([*spelled("thinking"), CONTROL])
    assert allowed(constraint) == free
    constraint.advance([CONTROL])
    assert allowed(constraint) == free
    constraint.advance([10, ord("y")])
    assert allowed(constraint) == {ord("e")}


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), min_size=1, max_size=4), st.data())
def test_t5_the_mark_is_found_however_tokens_arrive(before: list[int], mark: list[int], data: st.DataObject) -> None:
    constraint = GrammarWalk(made("regex", "[a]+"), sampling(), tuple(mark))
    tokens = [*before, *mark]
    found = next(i for i in range(len(mark), len(tokens) + 1) if tokens[i - len(mark) : i] == mark)
    tokens = tokens[:found]
    while tokens:
        count = data.draw(st.integers(1, len(tokens)))
        assert len(allowed(constraint)) > 10
        constraint.advance(tokens[:count])
        tokens = tokens[count:]
    assert allowed(constraint) == {ord("a")}


BEGIN_THOUGHT, END_THOUGHT = 10, CONTROL


@pytest.mark.parametrize("start_id", [None, BEGIN_THOUGHT])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_t4_a_thought_ends_at_its_limit(start_id: int | None, max_tokens: int) -> None:
    limit = ThoughtLimit(max_tokens=max_tokens, end_id=END_THOUGHT, start_id=start_id)
    constraint = constraint_of(sampling(thought=limit, bad_token_ids=((END_THOUGHT,),)), None, None, len(TOKENS))
    anything = set(range(len(TOKENS))) - {END_THOUGHT}
    if start_id is not None:
        assert allowed(constraint) == anything, "it has not begun"
        constraint.advance([start_id])
    for _ in range(max_tokens):
        assert allowed(constraint) == anything
        constraint.advance([65])
    assert allowed(constraint) == {END_THOUGHT}, "it ends, whatever else was asked for"
    constraint.advance([END_THOUGHT])
    for _ in range(9):
        assert allowed(constraint) == anything
        constraint.advance([65])


def test_t4_an_answer_without_a_thought_has_no_limit() -> None:
    limit = ThoughtLimit(max_tokens=1, end_id=END_THOUGHT, start_id=BEGIN_THOUGHT)
    for begun, then in (([65], [BEGIN_THOUGHT, 65, 66]), ([BEGIN_THOUGHT, END_THOUGHT], [65, BEGIN_THOUGHT, 65, 66])):
        constraint = constraint_of(sampling(thought=limit), None, None, len(TOKENS))
        constraint.advance(begun)
        constraint.advance(then)
        assert len(allowed(constraint)) == len(TOKENS)


def test_t4_t5_thoughts_with_limits_in_the_engine() -> None:
    """With preemptions, beside others, and with a grammar that holds what follows."""
    driver = Driver(num_blocks=30, num_rows=8)
    limits = (0, 1, 7, 40)
    for max_tokens in limits:
        thought = ThoughtLimit(max_tokens=max_tokens, end_id=END_THOUGHT)
        driver.submit([1, 2], made("choice", ["yes"]), starts_after=(END_THOUGHT,), n=2, thought=thought)
        driver.submit([3], None, max_tokens=60, thought=thought, end_token_ids=())
        driver.submit([4], None, max_tokens=60, end_token_ids=())
    driver.run()
    assert driver.engine.scheduler.num_preemptions
    for place, max_tokens in enumerate(limits):
        for key in ((3 * place, 0), (3 * place, 1), (3 * place + 1, 0)):
            assert driver.answers[key].index(END_THOUGHT) <= max_tokens
        for choice in (0, 1):
            answer = driver.answers[3 * place, choice]
            assert text_of(answer[answer.index(END_THOUGHT) + 1 :]) == b"yes"
        assert len(driver.answers[3 * place + 1, 0]) == 60


@settings(deadline=None)
@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4, unique=True))
def test_every_text_can_be_a_choice(choices: list[str]) -> None:
    grammar = made("choice", choices)
    for choice in choices:
        assert accepts(grammar, choice)
        if choice[:-1] not in ["", *choices]:
            assert not accepts(grammar, choice[:-1])


def test_the_empty_text_can_be_a_choice() -> None:
    grammar = made("choice", ["", "ab"])
    assert accepts(grammar, "") and accepts(grammar, "ab") and not accepts(grammar, "a")


@pytest.mark.parametrize("source", ['start: "a" /[0-9]/+', 'root ::= "a" [0-9]+'])
def test_grammars_are_lark_or_gbnf(source: str) -> None:
    grammar = made("lark", source)
    assert accepts(grammar, "a05") and not accepts(grammar, "a") and not accepts(grammar, "b1")


@pytest.mark.parametrize("pattern", [r"\d{3}", r"^\d{3}$"])
def test_a_regex_matches_the_whole_answer(pattern: str) -> None:
    grammar = made("regex", pattern)
    assert accepts(grammar, "123") and not accepts(grammar, "12") and not accepts(grammar, "1234")


def test_t8_a_schema_cannot_switch_checks_off() -> None:
    grammar = grammar_text("json_schema", '{"x-guidance": {"lenient": true, "whitespace_flexible": true}}')
    options = json.loads(grammar)["grammars"][0]["json_schema"]["x-guidance"]
    assert options["lenient"] is False and options["coerce_one_of"] is False and len(options) == 4


@pytest.mark.parametrize("source", ["false", "5", "[]", '"x"', "nul"])
def test_t8_what_is_no_schema_is_refused(source: str) -> None:
    with pytest.raises(ValueError):
        grammar_text("json_schema", source)


def test_t9_white_space_is_bounded() -> None:
    grammar = made("json_object", "")
    assert accepts(grammar, '{\n  "a": [1, 2],\n  "b": {\n    "c": null\n  }\n}')
    assert not accepts(grammar, "{" + " " * 21 + '"a":1}')
    assert not accepts(grammar, '{"a":' + "\n" * 21 + "1}")


def test_vocabularies_travel_by_memory() -> None:
    shared = TokenBytes.read(VOCABULARY.share())
    assert shared.tokens() == VOCABULARY.tokens()
    assert (shared.end_ids, shared.control_ids) == (VOCABULARY.end_ids, VOCABULARY.control_ids)


def test_a_vocabulary_that_cannot_write_the_answer() -> None:
    constraint = GrammarWalk(made("regex", "a"), sampling())
    with pytest.raises(ConstraintFailed):
        constraint.advance(spelled("b"))


# sequences in the engine


def check_person(text: bytes) -> None:
    VALIDATOR.validate(json.loads(text))


def test_answers_keep_to_their_schema_and_stop() -> None:
    driver = Driver()
    grammar = made("json_schema", PERSON)
    for number in range(12):
        driver.submit([1, 2, number + 5], grammar)
    driver.run()
    finished = [key for key, reason in driver.finishes.items() if reason is FinishReason.END_TOKEN]
    assert len(finished) >= 10
    for number, choice in finished:
        check_person(driver.text(number, choice))
        assert driver.answers[number, choice][-1] in ENDS


def test_the_limit_cuts() -> None:
    driver = Driver()
    request = driver.submit([1, 2], made("regex", "a{50}"), max_tokens=7)
    driver.run()
    assert driver.finishes[request.request_id, 0] is FinishReason.LENGTH
    assert driver.text(request.request_id) == b"a" * 7


def test_every_choice_goes_its_own_way() -> None:
    driver = Driver()
    request = driver.submit([1, 2, 3, 4, 5], made("json_schema", PERSON), n=4, seed=3)
    driver.run()
    texts = [driver.text(request.request_id, choice) for choice in range(4)]
    assert len(set(texts)) > 1
    for choice, text in enumerate(texts):
        if driver.finishes[request.request_id, choice] is FinishReason.END_TOKEN:
            check_person(text)


def test_neighbours_are_not_constrained() -> None:
    driver = Driver()
    prompt = [7, 8, 9]
    free = driver.submit(prompt, None, max_tokens=40, seed=5, end_token_ids=())
    driver.submit([1, 2, 3], made("json_schema", PERSON))
    driver.run()
    expected = expected_tokens(prompt, 40, len(TOKENS), script=NullScript(low_id=0), seed=5)
    assert driver.answers[free.request_id, 0] == expected


def test_without_grammars_no_masks_are_due() -> None:
    driver = Driver()
    driver.submit([1, 2, 3], None, max_tokens=30)
    driver.run()
    assert driver.num_masked_steps == 0


@settings(deadline=None, max_examples=25)
@given(st.integers(30, 80), st.integers(16, 40), st.integers(0, 5), st.lists(st.integers(0, 60), max_size=4))
def test_preemption_and_aborts_keep_the_state(blocks: int, budget: int, salt: int, aborts: list[int]) -> None:
    """Row C2 for grammars: whatever is taken back or given up, the others' answers are as they would be."""
    grammar = made("json_schema", PERSON)
    driver = Driver(num_blocks=blocks, num_rows=8, budget=budget)
    requests = [
        driver.submit(
            [salt, number, *range(number % 5)], grammar if number % 3 else None, n=1 + number % 2, max_tokens=90
        )
        for number in range(9)
    ]
    for step in range(61):
        if step in aborts:
            living = [request for request in requests if not request.is_over]
            if living:
                driver.engine.abort(living[step % len(living)], driver.now)
        driver.step()
    driver.run()
    assert driver.engine.pool.num_held == 0 and not driver.failures
    for (number, choice), reason in driver.finishes.items():
        if requests[number].grammar is not None and reason is FinishReason.END_TOKEN:
            check_person(driver.text(number, choice))


def test_preemption_happens_in_the_property() -> None:
    driver = Driver(num_blocks=40, num_rows=8, budget=32)
    for number in range(9):
        driver.submit([number, 1], made("json_schema", PERSON), max_tokens=90)
    driver.run()
    assert driver.engine.scheduler.num_preemptions > 0
    assert not driver.failures and len(driver.finishes) == 9
    for (number, choice), reason in driver.finishes.items():
        if reason is FinishReason.END_TOKEN:
            check_person(driver.text(number, choice))


def test_a_failed_step_takes_its_own_requests_only() -> None:
    driver = Driver(budget=32)
    first = driver.submit([1, 2], made("json_schema", PERSON), max_tokens=90)
    driver.step()
    plan = driver.engine.scheduler.in_flight[0].step
    driver._plans.popleft()
    driver._hear(
        driver.engine.commit(
            StepError(rank=0, generation=1, step=plan, kind=StepErrorKind.ERROR, text="scripted"), driver.now
        )
    )
    second = driver.submit([3, 4], made("json_schema", PERSON))
    driver.run()
    assert first.is_over and (first.request_id, 0) not in driver.finishes
    check_person(driver.text(second.request_id))


def test_allowed_tokens_are_the_only_ones_whatever_the_scheduler_does() -> None:
    """With preemptions, other sequences beside it, and a grammar too; the end comes where it is listed."""
    driver = Driver(num_blocks=30, num_rows=6)
    free = driver.submit([9, 9], None, max_tokens=40)
    some = driver.submit([1, 2], None, n=3, max_tokens=60, allowed_token_ids=(65, 66, 299))
    ends = driver.submit([1, 2, 3], None, max_tokens=60, allowed_token_ids=(65, END))
    both = driver.submit([3, 4], made("regex", "[A-F]{6}"), allowed_token_ids=(65, 67, END))
    driver.run()
    for choice in range(3):
        tokens = driver.answers[some.request_id, choice]
        assert len(tokens) == 60 and set(tokens) <= {65, 66, 299}
        assert driver.finishes[some.request_id, choice] is FinishReason.LENGTH
    assert set(driver.answers[ends.request_id, 0]) <= {65, END}
    assert driver.finishes[ends.request_id, 0] is FinishReason.END_TOKEN
    assert set(driver.text(both.request_id)) <= set(b"AC") and len(driver.text(both.request_id)) == 6
    plain = Driver(num_blocks=400)
    same = plain.submit([9, 9], None, max_tokens=40)
    plain.run()
    assert driver.answers[free.request_id, 0] == plain.answers[same.request_id, 0]


def test_bad_runs_never_come() -> None:
    """One token, and two and three in a row, also over the border of two steps; what only begins alike may come."""
    bad = ((65,), (66, 67), (66, 66, 66))
    driver = Driver()
    asked = driver.submit([1], None, n=4, max_tokens=120, allowed_token_ids=(65, 66, 67, 68), bad_token_ids=bad)
    driver.run()
    seen = set()
    for choice in range(4):
        tokens = driver.answers[asked.request_id, choice]
        assert len(tokens) == 120
        for run in bad:
            assert not any(tuple(tokens[at : at + len(run)]) == run for at in range(len(tokens))), run
        seen |= {tuple(tokens[at : at + 2]) for at in range(len(tokens) - 1)}
    assert {(66, 68), (66, 66)} & seen and (68, 67) in seen, "nothing else is lost"


def test_rules_that_leave_nothing_end_their_request_with_the_reason() -> None:
    driver = Driver()
    nothing = driver.submit([1], None, allowed_token_ids=(65,), bad_token_ids=((65,),))
    against = driver.submit([2], made("choice", ["yes"]), allowed_token_ids=(65,))
    fine = driver.submit([3], None, max_tokens=5, allowed_token_ids=(65,))
    driver.run()
    assert set(driver.failures) == {nothing.request_id, against.request_id}
    assert "leave no token" in driver.failures[nothing.request_id]
    assert driver.answers[fine.request_id, 0] == [65] * 5


def test_a_constraint_that_fails_ends_its_request_alone() -> None:
    driver = Driver()
    bad = driver.submit([1, 2], made("regex", "a+"), n=2)
    good = driver.submit([3, 4], made("json_schema", PERSON))
    driver.step()
    bad.sequences[0]._constraint._walk._matcher.consume_token(ord("z"))
    driver.run()
    assert list(driver.failures) == [bad.request_id]
    assert driver.finishes.get((good.request_id, 0)) is not None


def test_a_request_stands_in_line_once_its_grammar_is_compiled() -> None:
    """At the place of its arrival, ahead of those that came while it was compiled."""
    driver = Driver(num_rows=1)
    late = Request(
        request_id=50,
        owner=1,
        order=-1,
        prompt=np.array([1, 2], np.int32),
        sampling=sampling(seed=1),
        grammar=Grammar(kind="choice", source='["yes"]'),
    )
    driver.engine.submit(late)
    driver.submit([3, 4], None, max_tokens=5)
    assert [sequence.request.request_id for sequence in driver.engine.waiting] == [0]
    assert driver.engine.num_waiting == 2
    late.compiled = made("choice", ["yes"])
    driver.engine.queue(late)
    assert [sequence.request.request_id for sequence in driver.engine.waiting] == [50, 0]
    driver.run()
    assert driver.text(50) == b"yes" and not driver.engine.compiling


def test_rejected_and_aborted_while_compiling_leave_nothing() -> None:
    driver = Driver()
    for way in ("reject", "abort", "fail"):
        held = Request(
            request_id=100,
            owner=1,
            order=5,
            prompt=np.array([1], np.int32),
            sampling=sampling(seed=1),
            num_sequences=3,
            grammar=Grammar(kind="regex", source="a"),
        )
        driver.engine.submit(held)
        assert driver.engine.compiling == {100} and driver.engine.num_waiting == 3
        assert driver.engine.plan(0.0) is None, "it is not in line yet"
        if way == "reject":
            driver.engine.reject(held)
        elif way == "abort":
            columns = driver.engine.abort(held, 0.0)
            assert columns.done.tolist() == [0, 0, 1]
        else:
            [failure] = driver.engine.fail_all(FailKind.WORKER_LOST, "gone")
            assert failure.request is held
        assert held.is_over and not driver.engine.requests and not driver.engine.compiling
        assert driver.engine.num_waiting == 0


@pytest.mark.user_pain("T5")
def test_t5_a_free_part_then_an_answer_that_fits() -> None:
    """The model says the mark twice; the first one counts. Preemption in the free part keeps the place."""
    thought = [*b"let me think <", CONTROL, *b" no", CONTROL]
    driver = Driver(num_blocks=40, num_rows=8, budget=32, script=NullScript(mode="cycle", cycle=tuple(thought)))
    grammar = made("json_schema", PERSON)
    requests = [driver.submit([number, 1], grammar, starts_after=(ord("<"), CONTROL)) for number in range(9)]
    driver.run()
    assert driver.engine.scheduler.num_preemptions > 0
    for request in requests:
        tokens = driver.answers[request.request_id, 0]
        begin = thought.index(CONTROL) + 1
        assert tokens[:begin] == thought[:begin]
        if driver.finishes[request.request_id, 0] is FinishReason.END_TOKEN:
            check_person(text_of(tokens[begin:]))
    assert FinishReason.END_TOKEN in driver.finishes.values()


def test_stopping_by_the_users_token() -> None:
    driver = Driver()
    request = driver.submit([1, 2], made("regex", "ab*c{0,9}"), stop_token_ids=(ord("c"),), max_tokens=60)
    driver.run()
    assert re.fullmatch(rb"ab*c{0,9}", text_of(driver.answers[request.request_id, 0]))
