"""Texts of an encoder in the engine core: whole, without blocks, each ending with its vector. And a vector's form."""

import time
from collections import deque
from typing import Any

import numpy as np
import pytest

from trimaran.device_workers.platforms.null_model import NullModel, expected_vector
from trimaran.engine_core.admission import Door, admit
from trimaran.engine_core.engine import Engine
from trimaran.engine_core.request import Request
from trimaran.engine_core.statistics import Statistics
from trimaran.frontend.client.refusals import RequestRefused
from trimaran.frontend.client.vectors import VectorForm, settle_form
from trimaran.frontend.text.embedding_text import EmbeddingText, cut_inside
from trimaran.ipc.facts import PoolingFacts, PoolingKind
from trimaran.ipc.frontend_messages import FailKind, FinishReason, Rejected, RejectKind, Submit
from trimaran.ipc.plan import StepPlan, StepResult
from trimaran.ipc.sampling import Sampling
from trimaran.ipc.server_info import EngineLimits

ENCODER = PoolingFacts(kind=PoolingKind.MEAN, num_dimensions=24, normalizes=True, is_encoder=True)
DECODER = PoolingFacts(kind=PoolingKind.LAST, num_dimensions=24, normalizes=True, is_encoder=False, generates=True)
LENGTH, BUDGET, ROWS = 40, 64, 6


class Driven:
    """The engine over the null model, step by step, with every plan kept."""

    def __init__(self, pooling: PoolingFacts, *, num_blocks: int = 0) -> None:
        self.limits = EngineLimits(
            max_model_len=LENGTH,
            vocab_size=500,
            max_num_seqs=ROWS,
            num_blocks=num_blocks,
            block_size=8,
            dtype="float32",
            pooling=pooling,
        )
        self.engine = Engine(
            self.limits,
            max_batched_tokens=BUDGET,
            prefix_caching=not pooling.is_encoder,
            encodes=pooling.is_encoder,
            statistics=Statistics(),
        )
        self.model = NullModel(
            num_blocks=num_blocks, block_size=8, max_model_len=LENGTH, vocab_size=500, pooling=pooling
        )
        self.plans: list[StepPlan] = []
        self.vectors: dict[int, np.ndarray] = {}
        self.tokens: dict[int, list[int]] = {}
        self.failed: dict[int, FailKind] = {}
        self._in_flight: deque[StepPlan] = deque()

    def submit(self, id: int, prompt: list[int], *, pools: bool = True, priority: int = 0) -> Request | Rejected:
        door = Door(
            max_model_len=LENGTH,
            vocab_size=500,
            pooling=self.limits.pooling,
            max_queued_requests=None,
            max_queued_tokens=None,
        )
        admitted = admit(
            Submit(id, 1, Sampling(max_tokens=3, temperature=0.0), pools=pools, priority=priority),
            np.array(prompt, np.int32).tobytes(),
            door,
            owner=1,
            order=id,
            num_queued=0,
            num_queued_tokens=0,
            root=lambda salt, adapter: b"",
            retry_after_s=1.0,
            default_seed=0,
        )
        if isinstance(admitted, Request):
            self.engine.submit(admitted)
        return admitted

    def run(self, change: Any = lambda result: result) -> None:
        """Until nothing is left; two steps in flight."""
        while True:
            while self.engine.can_plan() and (plan := self.engine.plan(time.monotonic())) is not None:
                self.plans.append(plan)
                self._in_flight.append(plan)
            if not self._in_flight:
                break
            self.take(change(self.model.run(self._in_flight.popleft())))
        assert not self.engine.requests
        assert self.engine.pool.num_held == 0

    def take(self, result: StepResult) -> None:
        news = self.engine.commit(result, time.monotonic())
        self.failed |= {failure.request.request_id: failure.kind for failure in news.failures}
        for _, columns in news.outputs:
            ends, token = np.cumsum(columns.pooled_dims), 0
            for place, id in enumerate(columns.request_ids.tolist()):
                count = int(columns.token_counts[place])
                self.tokens.setdefault(id, []).extend(columns.token_ids[token : token + count].tolist())
                token += count
                if len(ends) and columns.finish[place] == FinishReason.POOLED:
                    assert columns.done[place]
                    assert id not in self.vectors, "one terminal message each"
                    self.vectors[id] = columns.pooled[ends[place] - columns.pooled_dims[place] : ends[place]]


def prompts(lengths: list[int]) -> list[list[int]]:
    chance = np.random.default_rng(4)
    return [chance.integers(0, 500, length).tolist() for length in lengths]


def test_texts_go_whole_into_a_step_without_blocks_and_in_line() -> None:
    driven, texts = Driven(ENCODER), prompts([40, 1, 23, 40, 7, 30, 30, 2, 2, 2, 2, 2, 2, 2, 2])
    for id, text in enumerate(texts):
        driven.submit(id, text)
    driven.run()
    for id, text in enumerate(texts):
        assert np.array_equal(driven.vectors[id], expected_vector(text, 24))
    assert len(driven.vectors) == len(texts)
    for plan in driven.plans:
        assert plan.counts.sum() <= BUDGET
        assert not plan.starts.any()
        assert not len(plan.block_ids)
    assert [count for plan in driven.plans for count in plan.counts.tolist()] == [len(text) for text in texts]
    assert max(len(plan.rows) for plan in driven.plans) > 1, "texts share steps"


def test_priorities_hold_for_vectors_too() -> None:
    driven, texts = Driven(ENCODER), prompts([40, 40, 40, 40])
    for id, text in enumerate(texts):
        driven.submit(id, text, priority=-id)
    driven.run()
    first = driven.plans[0].request_ids.tolist()
    assert first == [3]


def test_an_aborted_text_leaves_the_others_alone() -> None:
    driven, texts = Driven(ENCODER), prompts([40, 40, 40])
    asked = [driven.submit(id, text) for id, text in enumerate(texts)]
    plan = driven.engine.plan(0.0)
    assert plan is not None and isinstance(asked[0], Request) and isinstance(asked[1], Request)
    driven.engine.abort(asked[0], 0.0)  # its step is under way
    driven.engine.abort(asked[1], 0.0)  # it waits
    driven.take(driven.model.run(plan))
    driven.run()
    assert list(driven.vectors) == [2]


def test_a_vector_that_is_not_finite_fails_its_own_request_only() -> None:
    driven = Driven(ENCODER)
    for id, text in enumerate(prompts([5, 6, 7])):
        driven.submit(id, text)

    def spoiled(result: StepResult) -> StepResult:
        result.pooled[24] = np.nan
        return result

    driven.run(spoiled)
    assert driven.failed == {1: FailKind.INVALID_LOGITS}
    assert sorted(driven.vectors) == [0, 2]


def test_a_failed_step_fails_its_texts() -> None:
    driven = Driven(ENCODER)
    driven.submit(0, [1, 2])
    driven.engine.plan(0.0)
    news = driven.engine.committer.fail_step(FailKind.STEP_FAILED, "because", 0.0)
    assert [failure.request.request_id for failure in news.failures] == [0]


def test_a_decoder_makes_vectors_and_tokens_side_by_side() -> None:
    driven, texts = Driven(DECODER, num_blocks=30), prompts([40, 12, 33, 40, 9])
    for id, text in enumerate(texts):
        driven.submit(id, text if id % 2 == 0 else text[:20], pools=id % 2 == 0)
    driven.run()
    for id, text in enumerate(texts):
        if id % 2 == 0:
            assert np.array_equal(driven.vectors[id], expected_vector(text, 24))
            assert not driven.tokens.get(id)
        else:
            assert len(driven.tokens[id]) == 3


def test_e5_the_door_takes_the_limit_and_no_more() -> None:
    driven = Driven(ENCODER)
    assert isinstance(driven.submit(0, [1] * LENGTH), Request)
    for count in (LENGTH + 1, 4 * LENGTH):
        refused = driven.submit(1, [1] * count)
        assert isinstance(refused, Rejected) and refused.kind is RejectKind.TOO_LONG
    driven.run()
    assert list(driven.vectors) == [0]


@pytest.mark.parametrize(("pooling", "pools"), [(ENCODER, False), (None, True)])
def test_the_door_refuses_what_the_model_does_not_make(pooling: PoolingFacts | None, pools: bool) -> None:
    door = Door(max_model_len=9, vocab_size=9, pooling=pooling, max_queued_requests=None, max_queued_tokens=None)
    answer = admit(
        Submit(1, 1, Sampling(max_tokens=1), pools=pools),
        np.array([1], np.int32).tobytes(),
        door,
        owner=1,
        order=0,
        num_queued=0,
        num_queued_tokens=0,
        root=lambda salt, adapter: b"",
        retry_after_s=1.0,
        default_seed=0,
    )
    assert isinstance(answer, Rejected) and answer.kind is RejectKind.INVALID


# forms of a vector


def test_e1_a_cut_vector_is_normalised_again() -> None:
    whole = np.arange(1, 25, dtype=np.float32)
    form = settle_form(ENCODER, EmbeddingText(matryoshka=()), dimensions=7, normalizes=None)
    cut = form.of(whole)
    assert cut.shape == (7,)
    assert np.allclose(cut, whole[:7] / np.linalg.norm(whole[:7]), atol=1e-7)


@pytest.mark.parametrize("matryoshka", [None, (), (8,)])
def test_e1_the_full_size_is_always_allowed(matryoshka: tuple[int, ...] | None) -> None:
    form = settle_form(ENCODER, EmbeddingText(matryoshka=matryoshka), dimensions=24, normalizes=None)
    assert form == VectorForm(24, True)


@pytest.mark.parametrize(
    ("matryoshka", "dimensions"), [(None, 8), ((), 0), ((), -1), ((), 25), ((8, 16), 9), (None, 0), (None, 25)]
)
def test_e1_other_sizes_are_refused(matryoshka: tuple[int, ...] | None, dimensions: int) -> None:
    with pytest.raises(RequestRefused) as refused:
        settle_form(ENCODER, EmbeddingText(matryoshka=matryoshka), dimensions=dimensions, normalizes=None)
    assert refused.value.param == "dimensions"


def test_a_vector_of_zeros_stays_one() -> None:
    assert not VectorForm(3, True).of(np.zeros(3, np.float32)).any()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
def test_a_cut_text_keeps_the_tokenizers_ends(max_tokens: int) -> None:
    cut = cut_inside([101, 5, 6, 7, 102], [5, 6, 7], max_tokens)
    assert cut == {1: [101], 2: [101, 102], 3: [101, 5, 102], 4: [101, 5, 6, 102], 5: [101, 5, 6, 7, 102]}[max_tokens]
