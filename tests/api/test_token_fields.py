"""return_token_ids and truncate_prompt_tokens, streamed and plain. Rows L5, Q6."""

from typing import Any

import pytest

from trimaran.tests.api.conftest import CONTEXT, Served
from trimaran.tests.api.test_answers import CHAT, events
from trimaran.tests.api.test_refusals import check_refused

PATHS = ("/v1/chat/completions", "/v1/completions")


def body(path: str, **fields: Any) -> dict[str, Any]:
    return {**({"prompt": "one two three"} if path == PATHS[1] else CHAT), **fields}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"logprobs": 1}, {"stop": "quick b"}])
def test_q6_token_ids(served: Served, path: str, fields: dict[str, Any]) -> None:
    served.says("The quick 🙂 brown fox")
    if path == PATHS[0] and "logprobs" in fields:
        fields = {"logprobs": True}
    asked = body(path, return_token_ids=True, **fields)
    plain = served.http.post(path, json=asked).json()
    prompts = [plain["prompt_token_ids"]] if path == PATHS[0] else [c["prompt_token_ids"] for c in plain["choices"]]
    assert all(prompt == served.core.prompts[0] for prompt in prompts)
    want = [choice["token_ids"] for choice in plain["choices"]]
    assert sum(map(len, want)) == plain["usage"]["completion_tokens"]
    found: dict[int, list[int]] = {}
    told = []
    for event in events(served, path, asked):
        told += [event["prompt_token_ids"]] if "prompt_token_ids" in event else []
        for choice in event["choices"]:
            told += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
            found.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    assert [found[index] for index in range(len(want))] == want
    assert told == prompts or told == prompts * len(want)
    again = served.http.post("/v1/completions", json={"prompt": prompts[0] + want[0], "max_tokens": 1})
    assert again.status_code == 200, "what the server gave it takes back"


@pytest.mark.parametrize("path", PATHS)
def test_without_being_asked_there_are_no_ids(served: Served, path: str) -> None:
    served.says("The quick")
    assert "token_ids" not in served.http.post(path, json=body(path)).text
    assert not any("token_ids" in str(event) for event in events(served, path, body(path)))


@pytest.mark.parametrize("path", PATHS)
def test_l5_truncation_that_is_asked_for(served: Served, path: str) -> None:
    served.says("ok")
    served.http.post(path, json=body(path))
    whole = served.core.prompts[-1]
    answer = served.http.post(path, json=body(path, truncate_prompt_tokens=3)).json()
    assert served.core.prompts[-1] == whole[-3:]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["prompt_tokens_details"]["truncated_tokens"] == len(whole) - 3
    streamed = events(served, path, body(path, truncate_prompt_tokens=3, stream_options={"include_usage": True}))
    assert streamed[-1]["usage"] == answer["usage"]
    answer = served.http.post(path, json=body(path, truncate_prompt_tokens=10_000)).json()
    assert served.core.prompts[-1] == whole and answer["usage"]["prompt_tokens_details"]["truncated_tokens"] == 0
    assert "truncated_tokens" not in served.http.post(path, json=body(path)).text


@pytest.mark.parametrize("path", PATHS)
def test_l5_a_prompt_above_the_context(served: Served, path: str) -> None:
    long = "word " * 3 * CONTEXT
    asked: dict[str, Any] = {"prompt": long} if path == PATHS[1] else {"messages": [{"role": "user", "content": long}]}
    check_refused(served.http.post(path, json=asked))
    served.says("ok")
    answer = served.http.post(path, json={**asked, "max_tokens": 48, "truncate_prompt_tokens": -1}).json()
    assert answer["usage"]["prompt_tokens"] == CONTEXT - 48
    assert answer["usage"]["prompt_tokens_details"]["truncated_tokens"] > CONTEXT


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wrong", [0, -2, 1.5, 2**40, "x"])
def test_wrong_truncation(served: Served, path: str, wrong: Any) -> None:
    check_refused(served.http.post(path, json=body(path, truncate_prompt_tokens=wrong)), "truncate_prompt_tokens")


def test_best_of_is_refused_by_name(served: Served) -> None:
    for path in PATHS:
        check_refused(served.http.post(path, json=body(path, best_of=3)), "best_of")
