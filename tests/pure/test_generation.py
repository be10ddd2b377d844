"""One request's mailbox under any order of events: one end, at most one finish a choice, nothing after either."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.frontend.client.generation import Generation, GenerationRequest, SequenceOutput
from trimaran.frontend.client.output_reader import read_outputs
from trimaran.frontend.client.refusals import RequestFailed
from trimaran.frontend.client.sampling import SamplingParams
from trimaran.frontend.text.model_text import ModelText
from trimaran.ipc.frontend_messages import FailKind, FinishReason, OutputColumns
from trimaran.tests.pure import vocabularies

MODELS: list[ModelText] = []


def model() -> ModelText:
    if not MODELS:
        with tempfile.TemporaryDirectory() as directory:
            MODELS.append(ModelText.load(vocabularies.byte_level_chatml(Path(directory))))
    return MODELS[0]


class Record:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int, str]] = []

    def open_sequence(self, sequence: SequenceOutput) -> "RecordOne":
        return RecordOne(self, sequence.choice)

    def end(self, generation: Generation) -> None:
        self.log.append(("end", -1, ""))


class RecordOne:
    def __init__(self, record: Record, choice: int) -> None:
        self.record, self.choice = record, choice

    def show(self, text: str) -> None:
        assert text
        self.record.log.append(("show", self.choice, text))

    def finish(self) -> None:
        self.record.log.append(("finish", self.choice, ""))


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("token"), st.integers(0, 1), st.integers(0, 900)),
        st.tuples(st.just("end"), st.integers(0, 1), st.sampled_from([1, 2, 3, 4])),
        st.tuples(st.just("fail"), st.just(0), st.just(0)),
        st.tuples(st.just("close"), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(events=EVENTS, stops=st.sampled_from([(), ("e",), (" a", "zz")]), logprobs=st.sampled_from([None, 0]))
def test_any_order_of_events(events: list[tuple[str, int, int]], stops: tuple[str, ...], logprobs: int | None) -> None:
    record = Record()
    params = SamplingParams(n=2, stop=stops, logprobs=logprobs)
    request = GenerationRequest(prompt_token_ids=[5], params=params)
    finished: list[int] = []
    generation = Generation(7, request, model(), lambda _, choice: finished.append(choice), record)
    for kind, choice, value in events:
        before = len(record.log)
        was_over = generation.has_ended
        if kind == "token":
            deliver(generation, choice, value, FinishReason.NONE)
        elif kind == "end":
            deliver(generation, choice, 5 if value < 4 else None, FinishReason(value))
        elif kind == "fail":
            generation.fail(RequestFailed(FailKind.CORE_LOST, "gone"))
        else:
            generation.close()
        assert not was_over or len(record.log) == before, "something was told after the end"
    ends = [entry for entry in record.log if entry[0] == "end"]
    assert len(ends) <= 1
    if ends:
        assert record.log[-1] == ends[0]
    for choice in (0, 1):
        heard = [kind for kind, of, _ in record.log if of == choice]
        assert "finish" not in heard[:-1]
        assert finished.count(choice) <= 1


def deliver(generation: Generation, choice: int, token: int | None, reason: FinishReason) -> None:
    """Through the wire's form."""
    has_token = token is not None
    has_logprob = has_token and generation.request.params.logprobs is not None
    columns = OutputColumns(
        request_ids=np.array([7], np.int64),
        choices=np.array([choice], np.int32),
        token_counts=np.array([int(has_token)], np.int32),
        finish=np.array([reason], np.uint8),
        done=np.array([0], np.uint8),
        cached_tokens=np.array([0], np.int32),
        token_ids=np.array([token] if has_token else [], np.int32),
        **(
            {
                "logprob_counts": np.array([1], np.int32),
                "logprobs": np.array([-1.0], np.float32),
                "ranks": np.array([1], np.int32),
                "top_counts": np.array([0], np.int32),
            }
            if has_logprob
            else {}
        ),
    )
    broken: list[Exception] = []
    read_outputs(columns, {7: generation}, lambda _, error: broken.append(error))
    assert not broken, broken


def test_a_listener_that_raises_harms_nobody_else() -> None:
    class Raising(Record):
        def open_sequence(self, sequence: SequenceOutput) -> "RecordOne":
            return RaisingOne(self, 0)

    class RaisingOne(RecordOne):
        def show(self, text: str) -> None:
            raise OSError("gone")

    request = GenerationRequest(prompt_token_ids=[5], params=SamplingParams())
    bad, good = Raising(), Record()
    live = {
        1: Generation(1, request, model(), lambda *_: None, bad),
        2: Generation(2, request, model(), lambda *_: None, good),
    }
    columns = OutputColumns(
        request_ids=np.array([1, 2], np.int64),
        choices=np.array([0, 0], np.int32),
        token_counts=np.array([1, 1], np.int32),
        finish=np.array([0, 0], np.uint8),
        done=np.array([0, 0], np.uint8),
        cached_tokens=np.array([0, 0], np.int32),
        token_ids=np.array([70, 70], np.int32),
    )
    broken: list[int] = []
    read_outputs(columns, live, lambda generation, _: broken.append(generation.request_id))
    assert broken == [1] and [kind for kind, _, _ in good.log] == ["show"]
