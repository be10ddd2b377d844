"""The engine's own door: whatever a frontend lets through, nothing that the plan cannot hold gets in."""

from typing import Any

import numpy as np
import pytest

from trimaran.engine_core.admission import Door, admit
from trimaran.engine_core.request import Request
from trimaran.ipc.frontend_messages import Rejected, RejectKind, Submit
from trimaran.ipc.sampling import Sampling

DOOR = Door(max_model_len=64, vocab_size=100, max_queued_requests=None, max_queued_tokens=None)


def at_the_door(prompt: list[int] | bytes, *, num_sequences: int = 1, **sampling: Any) -> Request | Rejected:
    submit = Submit(
        request_id=1,
        core_incarnation=1,
        num_sequences=num_sequences,
        sampling=Sampling(**{"max_tokens": 4, **sampling}),
        arrival_s=0.0,
    )
    return admit(
        submit,
        prompt if isinstance(prompt, bytes) else np.array(prompt, np.int32).tobytes(),
        DOOR,
        owner=1,
        order=0,
        num_queued=0,
        num_queued_tokens=0,
        root=lambda salt, adapter: b"",
        retry_after_s=1.0,
        default_seed=0,
    )


@pytest.mark.user_pain("V1", "V2")
@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ([], {}),
        (b"abc", {}),
        ([-1], {}),
        ([100], {}),
        ([1], {"num_sequences": 0}),
        ([1], {"max_tokens": 0}),
        ([1], {"stop_token_ids": (100,)}),
        ([1], {"end_token_ids": (-1,)}),
        ([1], {"logit_bias": ((2**40, 1.0),)}),
        ([1], {"seed": -1}),
        ([1], {"seed": 2**64}),
        ([1], {"top_k": -1}),
        ([1], {"top_k": 2**31}),
        ([1], {"min_tokens": 5}),
        ([1], {"min_tokens": -1}),
        ([1], {"max_tokens": 2**63, "min_tokens": 2**31 - 1}),
        ([1], {"num_logprobs": 2**31}),
        ([1], {"num_prompt_logprobs": -1}),
    ],
)
def test_what_would_end_the_engine_is_rejected(prompt: list[int] | bytes, fields: dict[str, Any]) -> None:
    answer = at_the_door(prompt, **fields)
    assert isinstance(answer, Rejected) and answer.kind is RejectKind.INVALID


def test_the_extremes_are_admitted() -> None:
    for fields in ({"seed": 2**64 - 1}, {"seed": 0}, {"top_k": 2**31 - 1}, {"min_tokens": 4}, {"max_tokens": 2**63}):
        assert isinstance(at_the_door([0, 99], **fields), Request), fields
