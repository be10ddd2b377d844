"""The form of answers, streamed and whole. Rows S1-S9, L2, P7."""

import json
import math
from typing import Any

import pytest
from openai import BadRequestError

from trimaran.tests.api.conftest import CONTEXT, Served, eventually, talking_to

CHAT = {"model": "test-model", "messages": [{"role": "user", "content": "Hello"}]}
EMOJI = "naïve 漢字かな 🙂🙃 👩‍👩‍👧 Ελληνικά end"


def events(served: Served, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of every event, decoded strictly; the last must be [DONE]."""
    found: list[Any] = []
    with served.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line:
                assert line.startswith("data: ")
                found.append("[DONE]" if line == "data: [DONE]" else strict(line[6:]))
    assert found[-1] == "[DONE]" and found.count("[DONE]") == 1
    return found[:-1]


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_s1_emoji_and_cjk_arrive_whole(served: Served) -> None:
    served.says(EMOJI)
    chunks = list(served.openai.chat.completions.create(**CHAT, stream=True))
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert len(deltas) > 5
    assert all("\ufffd" not in delta for delta in deltas)
    whole = served.openai.chat.completions.create(**CHAT).choices[0].message.content
    assert "".join(deltas) == whole == EMOJI
    completion = served.openai.completions.create(model="test-model", prompt="x", max_tokens=500)
    assert completion.choices[0].text == EMOJI


@pytest.mark.parametrize("stop", ["漢字", "quick br", "x j", " "])
@pytest.mark.parametrize("include", [False, True])
def test_s2_stop_strings(served: Served, stop: str, include: bool) -> None:
    text = "The quick brown fox jumps 漢字 over"
    served.says(text, ends=False)
    body = {**CHAT, "stop": [stop, "never there"], "include_stop_str_in_output": include, "max_tokens": 200}
    end = text.index(stop) + (len(stop) if include else 0)
    whole = served.http.post("/v1/chat/completions", json=body).json()
    assert whole["choices"][0]["message"]["content"] == text[:end]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["stop_reason"] == stop
    streamed = events(served, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert "".join(c["delta"].get("content", "") for e in streamed for c in e["choices"]) == text[:end]
    assert streamed[-1]["usage"] == whole["usage"]
    needed = next(
        n
        for n in range(1, 100)
        if stop
        in served.model.tokenizer.decode(
            served.core.script(served.core.submits[0], [], 0)[:n], skip_special_tokens=True
        )
    )
    assert whole["usage"]["completion_tokens"] == needed
    eventually(lambda: len(served.core.finishes) == 2 and not served.core.live)


def test_s2_near_miss_loses_nothing(served: Served) -> None:
    served.says("The quick brown fox")
    body = {**CHAT, "stop": ["quick brawn", "foxy"]}
    assert served.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == (
        "The quick brown fox"
    )
    streamed = events(served, "/v1/chat/completions", body)
    assert "".join(c["delta"].get("content", "") for e in streamed for c in e["choices"]) == "The quick brown fox"


def test_s2_stop_token_hidden_unless_included(served: Served) -> None:
    served.says("one two three", ends=False)
    ids = served.model.tokenizer.encode("one two three", add_special_tokens=False)
    body = {**CHAT, "stop_token_ids": [ids[-1]], "max_tokens": 50}
    hidden = served.http.post("/v1/chat/completions", json=body).json()
    shown = served.http.post("/v1/chat/completions", json={**body, "include_stop_str_in_output": True}).json()
    assert shown["choices"][0]["message"]["content"] == "one two three"
    assert hidden["choices"][0]["message"]["content"] == served.model.tokenizer.decode(
        ids[:-1], skip_special_tokens=True
    )
    assert hidden["choices"][0]["stop_reason"] == ids[-1]
    assert hidden["usage"]["completion_tokens"] == len(ids)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("max_tokens", "reason"), [(3, "length"), (200, "stop")])
def test_s3_one_finish_reason_after_the_last_text(
    served: Served, path: str, n: int, max_tokens: int, reason: str
) -> None:
    served.says("some words to say here")
    body: dict[str, Any] = {"n": n, "max_tokens": max_tokens}
    body |= {"prompt": "x"} if path == "/v1/completions" else CHAT
    reasons: dict[int, list[str]] = {}
    for event in events(served, path, body):
        for choice in event["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content")
            assert not (text and choice["index"] in reasons), "text after the finish reason"
            if choice["finish_reason"] is not None:
                reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    assert reasons == {index: [reason] for index in range(n)}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_s4_usage_chunk(served: Served, path: str) -> None:
    body: dict[str, Any] = {"prompt": "x y z"} if path == "/v1/completions" else dict(CHAT)
    plain = events(served, path, body)
    assert all("usage" not in event or event["usage"] is None for event in plain)
    assert all(event["choices"] for event in plain)
    told = events(served, path, {**body, "stream_options": {"include_usage": True}})
    assert [bool(event.get("usage")) for event in told] == [False] * (len(told) - 1) + [True]
    assert told[-1]["choices"] == []
    running = events(served, path, {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    counts = [event["usage"]["completion_tokens"] for event in running]
    assert counts == sorted(counts) and counts[-1] == told[-1]["usage"]["completion_tokens"]


def test_s5_usage_is_the_same_streamed_and_whole(served: Served) -> None:
    served.core.cached_tokens = 5
    whole = served.openai.chat.completions.create(**CHAT).usage
    chunks = list(served.openai.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert whole is not None and whole == chunks[-1].usage
    assert whole.total_tokens == whole.prompt_tokens + whole.completion_tokens
    assert whole.prompt_tokens == len(served.core.prompts[0])
    assert whole.prompt_tokens_details is not None and whole.prompt_tokens_details.cached_tokens == 5
    served.core.cached_tokens = 0
    details = served.openai.chat.completions.create(**CHAT).usage
    assert details is not None and details.prompt_tokens_details is not None
    assert details.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("n", [2, 4, 8])
def test_s6_exactly_n_choices(served: Served, n: int) -> None:
    served.core.script = lambda submit, prompt, choice: [
        *served.model.tokenizer.encode(f"answer {choice} " * (choice + 1), add_special_tokens=False),
        submit.sampling.end_token_ids[0],
    ]
    for _ in range(10):
        whole = served.openai.chat.completions.create(**CHAT, n=n)
        assert [choice.index for choice in whole.choices] == list(range(n))
        texts = {choice.index: choice.message.content for choice in whole.choices}
        streamed: dict[int, str] = {}
        num_tokens = 0
        for chunk in served.openai.chat.completions.create(
            **CHAT, n=n, stream=True, stream_options={"include_usage": True}
        ):
            for choice in chunk.choices:
                streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
            num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
        assert streamed == texts == {i: f"answer {i} " * (i + 1) for i in range(n)}
        expected = sum(
            len(served.model.tokenizer.encode(text or "", add_special_tokens=False)) + 1 for text in texts.values()
        )
        assert whole.usage is not None and whole.usage.completion_tokens == num_tokens == expected


def test_s7_chat_logprobs_alone(served: Served) -> None:
    served.says(EMOJI)
    answer = strict(served.http.post("/v1/chat/completions", json={**CHAT, "logprobs": True}).text)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in entries)
    assert all(entry["top_logprobs"] == [] for entry in entries)
    assert bytes(b for entry in entries for b in entry["bytes"]).decode() == EMOJI
    streamed = events(served, "/v1/chat/completions", {**CHAT, "logprobs": True})
    chunks = [c["logprobs"]["content"] for e in streamed for c in e["choices"] if c["logprobs"]]
    assert [entry for chunk in chunks for entry in chunk] == entries


def test_s7_logprobs_end_where_a_stop_string_cuts(served: Served) -> None:
    served.says("alpha beta gamma delta", ends=False)
    body = {**CHAT, "logprobs": True, "stop": "gamma", "max_tokens": 99}
    [choice] = served.http.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["message"]["content"] == "alpha beta "
    shown = bytes(b for entry in choice["logprobs"]["content"] for b in entry["bytes"]).decode()
    assert shown.startswith("alpha beta") and "gamma" not in shown


def test_s8_infinite_logprobs_are_finite_json(served: Served) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 20, "temperature": 0.01, "top_p": 0.05}
    answer = strict(served.http.post("/v1/chat/completions", json=body).text)
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 20
        assert all(math.isfinite(top["logprob"]) for top in entry["top_logprobs"])


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("prompt", ["The quick brown", None])
def test_s8_echo_with_logprobs(served: Served, max_tokens: int, prompt: str | None) -> None:
    ids = served.model.tokenizer.encode("The quick brown", add_special_tokens=True)
    served.says(" fox jumps over")
    body = {"prompt": prompt or ids, "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    [choice] = strict(served.http.post("/v1/completions", json=body).text)["choices"]
    found = choice["logprobs"]
    assert len({len(column) for column in found.values()}) == 1
    assert len(found["tokens"]) == len(ids) + max_tokens
    assert "".join(found["tokens"]) == choice["text"]
    assert choice["text"].startswith("The quick brown")
    assert found["token_logprobs"][0] is None and all(x is not None for x in found["token_logprobs"][1:])
    assert all(choice["text"][o:].startswith(t) for o, t in zip(found["text_offset"], found["tokens"], strict=True))
    if max_tokens:
        streamed = events(served, "/v1/completions", body)
        chunks = [c for e in streamed for c in e["choices"]]
        assert "".join(c["text"] for c in chunks) == choice["text"]
        joined = {name: [x for c in chunks if c["logprobs"] for x in c["logprobs"][name]] for name in found}
        assert joined == found


def test_prompt_logprobs(served: Served) -> None:
    body = {**CHAT, "prompt_logprobs": 3}
    answer = served.http.post("/v1/chat/completions", json=body).json()
    prompt = served.core.prompts[-1]
    assert len(answer["prompt_logprobs"]) == len(prompt) and answer["prompt_logprobs"][0] is None
    for id, candidates in zip(prompt[1:], answer["prompt_logprobs"][1:], strict=True):
        assert candidates[str(id)]["logprob"] == -1.5 and len(candidates) in (3, 4)
    completion = served.http.post("/v1/completions", json={"prompt": "a b c", "prompt_logprobs": 0}).json()
    assert len(completion["choices"][0]["prompt_logprobs"]) == len(served.core.prompts[-1])
    refused = served.http.post("/v1/chat/completions", json={**body, "stream": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


def test_s9_end_tokens_min_tokens_ignore_eos(served: Served) -> None:
    tokenizer = served.model.tokenizer
    ends = served.model.end_token_ids
    assert len(ends) == 2
    words = tokenizer.encode("one two", add_special_tokens=False)
    for end in ends:
        served.core.script = lambda submit, prompt, choice, end=end: [*words, end, *words]  # type: ignore[misc]
        answer = served.openai.chat.completions.create(**CHAT, max_tokens=50)
        assert answer.choices[0].message.content == "one two"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None and answer.usage.completion_tokens == len(words) + 1
    served.http.post("/v1/chat/completions", json={**CHAT, "min_tokens": 4, "ignore_eos": True, "max_tokens": 9})
    sampling = served.core.submits[-1].sampling
    assert (sampling.min_tokens, sampling.max_tokens, sampling.end_token_ids) == (4, 9, ())


def test_s9_stop_strings_wait_for_min_tokens(served: Served) -> None:
    served.says("a stop b stop c", ends=False)
    ids = served.model.tokenizer.encode("a stop", add_special_tokens=False)
    body = {**CHAT, "stop": "stop", "min_tokens": len(ids) + 1, "max_tokens": 99}
    [choice] = served.http.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["message"]["content"] == "a stop b "


def test_batches_of_prompts(served: Served) -> None:
    ids = served.model.tokenizer.encode("three", add_special_tokens=False)
    for prompt in (["one", "two three"], [ids, [*ids, *ids]]):
        answer = served.http.post("/v1/completions", json={"prompt": prompt, "n": 2, "max_tokens": 100}).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts[0] == texts[1] and texts[2] == texts[3] and texts[0] != texts[2]
        streamed = events(served, "/v1/completions", {"prompt": prompt, "n": 2})
        joined = dict.fromkeys(range(4), "")
        for event in streamed:
            for choice in event["choices"]:
                joined[choice["index"]] += choice["text"]
        assert list(joined.values()) == texts


def test_every_sampling_field_reaches_the_core(served: Served) -> None:
    body = {
        **CHAT,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 7,
        "max_completion_tokens": 5,
        "max_tokens": 99,
        "stop_token_ids": [3, 4],
        "min_tokens": 2,
        "n": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": 1.5, "6": -100},
        "logprobs": True,
        "top_logprobs": 3,
        "priority": -2,
        "cache_salt": "tenant",
        "user": "somebody",
        "some_future_field": {"a": 1},
    }
    assert served.http.post("/v1/chat/completions", json=body).status_code == 200
    submit = served.core.submits[-1]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (
        0.7,
        0.9,
        40,
        0.1,
        7,
    )
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop_token_ids) == (5, 2, (3, 4))
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.2)
    assert dict(sampling.logit_bias) == {5: 1.5, 6: -100.0} and sampling.num_logprobs == 3
    assert (submit.num_sequences, submit.priority, submit.cache_salt) == (2, -2, "tenant")
    assert submit.arrival_s > 0


def test_bad_words_are_meant_at_the_beginning_and_behind_a_space(served: Served) -> None:
    body = {**CHAT, "bad_words": ["cat", "the end"], "allowed_token_ids": [5, 6], "max_tokens": 1}
    assert served.http.post("/v1/chat/completions", json=body).status_code == 200
    sampling = served.core.submits[-1].sampling
    texts = ["cat", " cat", "the end", " the end"]
    encode = served.model.tokenizer.encode
    assert sampling.bad_token_ids == tuple(tuple(encode(text, add_special_tokens=False)) for text in texts)
    assert sampling.allowed_token_ids == (5, 6)


def test_p7_models_tell_the_context_of_one_request(served: Served) -> None:
    [model] = served.http.get("/v1/models").json()["data"]
    assert model["max_model_len"] == CONTEXT and model["id"] == "test-model" and model["root"]
    assert served.openai.models.list().data[0].id == "test-model"
    assert served.openai.models.retrieve("test-model").id == "test-model"
    ids = [5] * (CONTEXT - 1)
    assert served.http.post("/v1/completions", json={"prompt": ids, "max_tokens": 1}).status_code == 200


def test_request_id_is_echoed(served: Served) -> None:
    response = served.http.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "abc-123"})
    assert response.headers["x-request-id"] == "abc-123"
    assert len(served.http.get("/health").headers["x-request-id"]) == 32
    assert served.http.get("/nope", headers={"X-Request-Id": "q"}).headers["x-request-id"] == "q"


def test_content_parts_and_roles(served: Served) -> None:
    body = {
        "messages": [
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"arguments": "{}"}}]},
            {"role": "tool", "content": "7", "tool_call_id": "1"},
        ]
    }
    assert served.http.post("/v1/chat/completions", json=body).status_code == 200
    text = served.model.tokenizer.decode(served.core.prompts[-1], skip_special_tokens=False)
    assert "<|im_start|>system\nBe kind.<|im_end|>" in text and "user\na\nb<|im_end|>" in text


def test_tokenize_and_detokenize(served: Served) -> None:
    asked = {"prompt": "Hello world", "return_token_strs": True}
    found = served.http.post("/tokenize", json=asked).json()
    assert found["tokens"] == served.model.tokenizer.encode("Hello world", add_special_tokens=True)
    assert "".join(found["token_strs"]) == "Hello world" and found["count"] == len(found["tokens"])
    assert served.http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "Hello world"}
    chat = served.http.post("/tokenize", json={"messages": CHAT["messages"]}).json()["tokens"]
    served.http.post("/v1/chat/completions", json=CHAT)
    assert served.core.prompts[-1] == chat


def test_l2_without_a_template(shared: Served, tmp_path: Any) -> None:
    from trimaran.tests.api.frontend_process import FrontendProcess
    from trimaran.tests.pure import vocabularies

    directory = vocabularies.byte_level_chatml(tmp_path / "model")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    frontend = FrontendProcess(shared.core.address, directory, index=3).wait_ready()
    try:
        with talking_to(shared.core, frontend, shared.model) as bare:
            with pytest.raises(BadRequestError, match="--chat-template"):
                bare.openai.chat.completions.create(**CHAT)
            assert bare.openai.completions.create(model="test-model", prompt="x").choices[0].text == "x"
    finally:
        frontend.stop()
