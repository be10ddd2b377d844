"""The whole server over HTTP: supervisor, frontend, core and worker as a user starts them.

`real` answers with SmolLM2 on the CPU. `scripted` has the same tokenizer before the null platform, so the test decides
every token.
"""

import base64
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from trimaran.tests.server import Server

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
TELL: Any = [{"role": "user", "content": "Tell me about the sea."}]
MIXED_TEXT = "Grüße 🙂🙃 👩‍👩‍👧 漢字かな交じり文 مرحبا Ελληνικά 🏴‍☠️ naïve\n"
SMALL = ("--kv-memory-bytes", str(256 << 20))
SCRIPTED_CONTEXT = 2048


@pytest.fixture(scope="module")
def real() -> Iterator[Server]:
    """The demo, as `make serve` starts it."""
    with Server(None, *SMALL, "--served-model-name", "smol", script=None) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(demo_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_folder / "tokenizer.json"))


def cycling(text: str, tokenizer: Tokenizer) -> str:
    """A null script that answers with this text for ever."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return f"mode=cycle:{','.join(map(str, ids))}"


@pytest.fixture(scope="module")
def scripted(demo_folder: Path, tokenizer: Tokenizer) -> Iterator[Server]:
    """Says MIXED_TEXT for ever, a step every two milliseconds."""
    arguments = ("--served-model-name", "smol", "--max-model-len", str(SCRIPTED_CONTEXT))
    with Server(demo_folder, *arguments, script=f"step_ms=2 {cycling(MIXED_TEXT, tokenizer)}") as server:
        yield server


def post(server: Server, path: str, body: Any) -> Any:
    answer = server.http.post(path, json={"model": "smol", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(server: Server, path: str, body: Any) -> dict[str, Any]:
    """A stream put together: per choice text, finish_reason, stop_reason and logprob entries; and the usage."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    is_done = False
    asked = {"model": "smol", **body, "stream": True, "stream_options": {"include_usage": True}}
    with server.http.stream("POST", path, json=asked) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            assert not is_done or not line
            if line == "data: [DONE]":
                is_done = True
            elif line:
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                for part in event["choices"]:
                    _add(choices.setdefault(part["index"], _new_choice()), part)
    assert is_done
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def _new_choice() -> dict[str, Any]:
    return {"text": "", "finish_reason": None, "stop_reason": None, "logprobs": []}


def _add(choice: dict[str, Any], part: dict[str, Any]) -> None:
    assert choice["finish_reason"] is None, "something follows the finish reason"
    choice["text"] += part["text"] if "text" in part else part["delta"].get("content") or ""
    choice["finish_reason"] = part["finish_reason"]
    choice["stop_reason"] = part.get("stop_reason")
    choice["logprobs"] += entries(part["logprobs"])


def whole(server: Server, path: str, body: Any) -> dict[str, Any]:
    answer = post(server, path, body)
    return {
        "choices": [
            {
                "text": choice["text"] if "text" in choice else choice["message"]["content"],
                "finish_reason": choice["finish_reason"],
                "stop_reason": choice["stop_reason"],
                "logprobs": entries(choice["logprobs"]),
            }
            for choice in answer["choices"]
        ],
        "usage": answer["usage"],
    }


def entries(logprobs: Any) -> list[Any]:
    """One list in either form."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [list(entry) for entry in zip(*(logprobs[name] for name in names), strict=True)]


# with SmolLM2


def test_paris_with_the_openai_client(real: Server) -> None:
    plain = real.openai.chat.completions.create(model="smol", messages=FRANCE, temperature=0)
    assert "Paris" in (plain.choices[0].message.content or "")
    assert plain.choices[0].finish_reason == "stop"
    stream = real.openai.chat.completions.create(model="smol", messages=FRANCE, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == plain.choices[0].message.content
    text = real.openai.completions.create(model="smol", prompt="The capital of France is", temperature=0, max_tokens=4)
    assert "Paris" in text.choices[0].text
    assert [model.id for model in real.openai.models.list()] == ["smol"]


def test_the_demo_answers_sensibly_when_nothing_is_asked_for(real: Server) -> None:
    """As the README asks it. At the API's own temperature of 1 a model so small talks nonsense."""
    answer = post(real, "/v1/chat/completions", {"messages": FRANCE, "max_tokens": 40, "n": 16})
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert all("Paris" in text for text in texts), texts


def _close(left: Any, right: Any) -> bool:
    """Equal, with numbers to four digits: a batch's shape moves the last ones."""
    if isinstance(left, float) and isinstance(right, float):
        return left == pytest.approx(right, rel=2e-2, abs=2e-2)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_close, left, right))
    if isinstance(left, dict):
        return set(left) == set(right) and all(_close(left[key], right[key]) for key in left)
    return bool(left == right)


@pytest.mark.user_pain("S5")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_s5_streamed_equals_plain(real: Server, path: str) -> None:
    """Text, tokens, finish reason and usage, over {n 1, 3} x {stop, none} x {logprobs, none} x {echo, none}."""
    is_chat = path.startswith("/v1/chat")
    for n, stop, wants_logprobs, echo in itertools.product((1, 3), (None, "sea"), (False, True), (False, True)):
        if is_chat and echo:
            continue
        body: dict[str, Any] = {"n": n, "stop": stop, "temperature": 0, "max_tokens": 12}
        body |= {"messages": TELL} if is_chat else {"prompt": "One two three, the deep blue", "echo": echo}
        if wants_logprobs:
            body |= {"logprobs": True, "top_logprobs": 0} if is_chat else {"logprobs": 0}
        plain, pieces = whole(real, path, body), streamed(real, path, body)
        for answer in (plain, pieces):
            answer["usage"].pop("prompt_tokens_details")  # the second finds its prompt in the cache
        assert _close(plain, pieces), (body, plain, pieces)
        assert len(plain["choices"]) == n
        usage = plain["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.user_pain("S7")
def test_s7_logprob_bytes_join_to_the_content(real: Server) -> None:
    ask = {"messages": TELL, "logprobs": True, "top_logprobs": 3, "max_tokens": 9}
    answer = post(real, "/v1/chat/completions", ask)
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    joined = bytes(itertools.chain.from_iterable(entry["bytes"] for entry in content))
    assert joined.decode() == choice["message"]["content"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] <= entry["top_logprobs"][0]["logprob"] <= 0


def test_prompt_logprobs(real: Server) -> None:
    ids = post(real, "/tokenize", {"prompt": "The capital of France is Paris"})["tokens"]
    answer = post(real, "/v1/completions", {"prompt": ids, "prompt_logprobs": 2, "max_tokens": 1, "temperature": 0})
    positions = answer["choices"][0]["prompt_logprobs"]
    assert len(positions) == len(ids) and positions[0] is None
    for id, candidates in zip(ids[1:], positions[1:], strict=True):
        assert 2 <= len(candidates) <= 3 and candidates[str(id)]["logprob"] <= 0
    assert positions[-1][str(ids[-1])]["rank"] == 1, "Paris is the likeliest"
    echoed = post(real, "/v1/completions", {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0})
    own = [positions[at][str(id)]["logprob"] for at, id in enumerate(ids) if at]
    assert echoed["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(own, abs=0.05)


@pytest.mark.user_pain("V2")
def test_v2_a_tiny_temperature_gives_the_greedy_text(real: Server) -> None:
    greedy, tiny = (
        post(real, "/v1/chat/completions", {"messages": TELL, "temperature": temperature, "max_tokens": 12})
        for temperature in (0, 1e-5)
    )
    assert greedy["choices"] == tiny["choices"]


@pytest.mark.user_pain("Q4")
def test_q4_seeds(real: Server) -> None:
    body = {"messages": TELL, "max_tokens": 8, "temperature": 1.0}

    def say(**fields: Any) -> list[str]:
        answer = post(real, "/v1/chat/completions", {**body, **fields})
        return [choice["message"]["content"] for choice in answer["choices"]]

    alone = say(seed=7)
    assert all(say(seed=7) == alone for _ in range(4))
    assert say(seed=8) != alone or say(seed=9) != alone
    four = say(seed=7, n=4)
    assert len(set(four)) > 1 and sorted(say(seed=7, n=4)) == sorted(four)
    assert len({*say(), *say(), *say()}) > 1, "without a seed, draws differ"
    for seed in (-1, -(2**63), 2**63 - 1):  # a negative seed once ended the core
        assert say(seed=seed) == say(seed=seed)
    with ThreadPoolExecutor(4) as pool:  # neighbours without a seed
        neighbours = [pool.submit(say, n=2) for _ in range(3)]
        beside = pool.submit(say, seed=7)
        assert len([task.result() for task in neighbours]) == 3
    # Kernels may round otherwise in a batch (only --batch-invariant promises the text): the draws are the same.
    assert beside.result()[0][:4] == alone[0][:4]


def test_sampling_fields_do_what_they_say(real: Server) -> None:
    ask = {"prompt": "1 2 3 4 5 6 7 8 9 1 2 3 4", "temperature": 0, "max_tokens": 10, "ignore_eos": True}

    def text(**fields: Any) -> str:
        return str(post(real, "/v1/completions", {**ask, **fields})["choices"][0]["text"])

    def ids(written: str) -> list[int]:
        return list(post(real, "/tokenize", {"prompt": written, "add_special_tokens": False})["tokens"])

    plain = text()
    digit = ids("5")[0]
    assert "5" in plain
    assert "5" not in text(logit_bias={str(digit): -100})
    assert text(logit_bias={str(digit): 100}, max_tokens=5) == "55555"
    assert "5" not in text(bad_words=["5"]) and text(bad_words=["nowhere to be found"]) == plain
    first, second = plain.split()[:2]
    assert f"{first} {second}" in plain and f"{first} {second}" not in text(bad_words=[f"{first} {second}"])
    assert set(text(allowed_token_ids=[digit, *ids("7")])) <= set("57")
    assert text(frequency_penalty=2.0, max_tokens=30) != text(max_tokens=30)
    assert text(presence_penalty=2.0, max_tokens=30) != text(max_tokens=30)
    assert text(repetition_penalty=50.0) != plain
    stopped = post(real, "/v1/completions", {**ask, "stop_token_ids": [digit]})["choices"][0]
    assert stopped["finish_reason"] == "stop" and stopped["stop_reason"] == digit and "5" not in stopped["text"]
    kept = post(real, "/v1/completions", {**ask, "stop_token_ids": [digit], "min_tokens": 10})
    assert kept["usage"]["completion_tokens"] == 10
    assert text(stop=["5"], include_stop_str_in_output=True) == plain[: plain.index("5") + 1]


def test_min_tokens_and_ignore_eos(real: Server) -> None:
    plain = post(real, "/v1/chat/completions", {"messages": FRANCE, "temperature": 0, "max_tokens": 20})
    count = plain["usage"]["completion_tokens"]
    assert plain["choices"][0]["finish_reason"] == "stop" and count < 16
    for fields in ({"ignore_eos": True}, {"min_tokens": 20}):
        longer = post(real, "/v1/chat/completions", {"messages": FRANCE, "temperature": 0, "max_tokens": 20, **fields})
        assert longer["usage"]["completion_tokens"] == 20
        assert longer["choices"][0]["finish_reason"] == "length"
        assert "<|im_end|>" not in longer["choices"][0]["message"]["content"]


@pytest.mark.user_pain("Q2", "S5")
def test_cached_tokens_and_cache_salt(real: Server) -> None:
    ask = {"prompt": "A long beginning that fills blocks. " * 20, "max_tokens": 1, "temperature": 0}

    def cached(**fields: Any) -> int:
        usage = post(real, "/v1/completions", {**ask, **fields})["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0 and cached() > 100
    assert cached(cache_salt="mine") == 0 and cached(cache_salt="mine") > 100
    assert cached(cache_salt="yours") == 0
    assert cached(priority=-5) > 100


def test_batches_of_prompts(real: Server) -> None:
    texts = ["The capital of France is", "2 + 2 ="]
    ids = [post(real, "/tokenize", {"prompt": text})["tokens"] for text in texts]
    ask = {"max_tokens": 3, "temperature": 0, "n": 2}
    by_text = post(real, "/v1/completions", {"prompt": texts, **ask})
    by_ids = post(real, "/v1/completions", {"prompt": ids, **ask})
    assert by_text["choices"] == by_ids["choices"]
    assert [choice["index"] for choice in by_text["choices"]] == [0, 1, 2, 3]
    assert by_text["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert by_text["usage"]["completion_tokens"] == 12
    assert "Paris" in by_text["choices"][1]["text"]


def test_tokenize_agrees_with_usage(real: Server, tokenizer: Tokenizer) -> None:
    told = post(real, "/tokenize", {"messages": FRANCE})
    answer = post(real, "/v1/chat/completions", {"messages": FRANCE, "max_tokens": 1})
    assert told["count"] == len(told["tokens"]) == answer["usage"]["prompt_tokens"]
    text = post(real, "/detokenize", {"tokens": told["tokens"]})["prompt"]
    assert "What is the capital of France?" in text and text.endswith("<|im_start|>assistant\n")
    raw = post(real, "/tokenize", {"prompt": MIXED_TEXT})["tokens"]
    assert raw == tokenizer.encode(MIXED_TEXT).ids
    assert post(real, "/detokenize", {"tokens": raw})["prompt"] == MIXED_TEXT


def test_models_and_server_info_are_complete(real: Server) -> None:
    (model,) = real.http.get("/v1/models").json()["data"]
    assert model["id"] == "smol" and (Path(model["root"]) / "config.json").is_file() and model["max_model_len"] == 8192
    info = real.http.get("/v1/server_info").json()
    decided = {decision["name"]: decision for decision in info["decisions"]}
    assert {"platform", "dtype", "threads", "block_size", "max_num_seqs", "max_model_len", "num_blocks"} <= set(decided)
    assert all(decision["value"] and decision["reason"] for decision in info["decisions"])
    assert not decided["threads"]["overridden"], "nobody asked for a number of threads"
    kernels = {resolution["kernel"]: resolution for resolution in info["kernels"]}
    assert {"paged_attention", "linear", "rms_norm", "rotary_and_kv_write", "sample", "token_logprobs"} <= set(kernels)
    assert all(resolution["chosen"] for resolution in kernels.values())
    (device,) = info["devices"]
    assert device["platform"] == "cpu" and device["memory_bytes"] > 0 and device["provenance"]
    phases = {(phase["process"], phase["name"]): phase for phase in info["phases"]}
    for phase in (("supervisor", "model"), ("worker 0", "weights"), ("worker 0", "kernels"), ("core", "boot token")):
        assert phase in phases
    assert all(phase["took_s"] is not None for phase in phases.values())
    assert info["memory"]["weights"] > 0 and info["memory"]["kv_cache"] > 0
    assert info["limits"]["max_model_len"] == info["model"]["max_model_len"] == 8192


def test_metrics_bear_the_known_names(real: Server) -> None:
    before = real.metrics()
    answer = post(real, "/v1/chat/completions", {"messages": TELL, "max_tokens": 5, "ignore_eos": True})
    after = real.metrics()
    grown = {name: after[name] - before[name] for name in before if name in after}
    assert grown["prompt_tokens_total"] == answer["usage"]["prompt_tokens"]
    assert grown["generation_tokens_total"] == 5
    assert grown['request_success_total{finished_reason="length"}'] == 1
    assert grown["time_to_first_token_seconds_count"] == grown["e2e_request_latency_seconds_count"] == 1
    assert grown["inter_token_latency_seconds_count"] == 4
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[name] == 0
    text = real.http.get("/metrics").text
    assert all(line.startswith(("#", "trimaran:")) for line in text.splitlines() if line)


# with a script


@pytest.mark.user_pain("S1")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_s1_emoji_and_cjk_arrive_whole(scripted: Server, tokenizer: Tokenizer, path: str) -> None:
    ask: dict[str, Any] = {"messages": FRANCE} if "chat" in path else {"prompt": "x"}
    ask |= {"max_tokens": 3 * len(tokenizer.encode(MIXED_TEXT, add_special_tokens=False).ids)}
    plain, pieces = whole(scripted, path, ask), streamed(scripted, path, ask)
    assert plain["choices"] == pieces["choices"] and plain["usage"]["total_tokens"] == pieces["usage"]["total_tokens"]
    assert plain["choices"][0]["text"] == MIXED_TEXT * 3, "no half of a character in any piece"


@pytest.mark.user_pain("S1")
def test_s1_a_cut_character_is_not_shown_in_halves(scripted: Server) -> None:
    """Answers of every length end where they may: streamed and plain agree, and only the very end can be a stump."""
    for max_tokens in range(1, 24):
        ask = {"prompt": "x", "max_tokens": max_tokens}
        plain = post(scripted, "/v1/completions", ask)["choices"][0]["text"]
        reader = scripted.stream("x", max_tokens=max_tokens)
        reader.read_all()
        reader.socket.close()
        pieces = [event["choices"][0]["text"] for event in reader.events()[:-1]]
        assert "".join(pieces) == plain and MIXED_TEXT.startswith(plain.rstrip("\ufffd"))
        assert not any("\ufffd" in piece for piece in pieces[:-2])


@pytest.mark.user_pain("S2")
def test_s2_stop_strings_over_chunk_borders(scripted: Server) -> None:
    for stop in ("🙃", "漢字か", "\n", "‍👧", "Grüße 🙂", "مر"):
        ask = {"prompt": "x", "max_tokens": 200, "stop": stop}
        plain, pieces = whole(scripted, "/v1/completions", ask), streamed(scripted, "/v1/completions", ask)
        assert plain["choices"] == pieces["choices"]
        assert plain["usage"]["completion_tokens"] == pieces["usage"]["completion_tokens"]
        (choice,) = plain["choices"]
        assert choice["text"] == MIXED_TEXT[: MIXED_TEXT.index(stop)]
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
    near = whole(scripted, "/v1/completions", {"prompt": "x", "max_tokens": 60, "stop": ["漢字か!", MIXED_TEXT + "?"]})
    assert near["choices"][0]["finish_reason"] == "length"
    assert (MIXED_TEXT * 3).startswith(near["choices"][0]["text"].rstrip("\ufffd"))


@contextmanager
def bystander(server: Server) -> Iterator[None]:
    """A stream that runs meanwhile: it must not lose a token, nor stand still."""
    reader = server.stream("bystander", max_tokens=SCRIPTED_CONTEXT - 16)
    ending = threading.Event()
    gaps_s: list[float] = []

    def read() -> None:
        last_s = time.monotonic()
        while data := reader.socket.recv(65536):
            now_s = time.monotonic()
            gaps_s.append(now_s - last_s)
            last_s = now_s
            reader.raw += data
            if ending.is_set():
                break

    reader.read_until(b"data: ")
    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(30)
        reader.socket.close()
    text = "".join(event["choices"][0]["text"] for event in reader.events() if event != "[DONE]" and event["choices"])
    assert b'"error"' not in reader.raw
    assert text and (MIXED_TEXT * (len(text) // len(MIXED_TEXT) + 1)).startswith(text)
    assert max(gaps_s) < 2.0, "the running stream stood still"


def refused(server: Server, path: str, body: Any) -> Any:
    """The error of a request that must be refused."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.http.post(path, content=content, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500, (content[:80], answer.status_code, answer.text[:200])
    return answer.json()["error"]


@pytest.mark.user_pain("V1", "V2", "V3", "V4", "V6")
def test_a_hostile_client_is_refused_and_disturbs_nobody(scripted: Server) -> None:
    deep = b"[" * 10_000 + b"]" * 10_000
    chat, text = "/v1/chat/completions", "/v1/completions"
    with bystander(scripted):
        for path, body in (
            (text, b'{"prompt":"x","unknown":' + deep + b"}"),
            (text, b'{"prompt":"x","guided_json":' + deep + b"}"),
            (chat, b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":' + deep + b"}}"),
            (chat, b'{"messages":[{"role":"user","content":' + deep + b"}]}"),
            ("/tokenize", b'{"messages":' + deep + b"}"),
            (text, b'{"prompt":"x","max_tokens":' + b"9" * 100_000 + b"}"),
            (text, b'{"prompt":"\\ud800"}'),
            (chat, b'{"messages":[{"role":"user","content":"\\udfff"}]}'),
            (text, b'{"prompt":"x","stop":"\\ud800"}'),
            (text, b'{"prompt":"x","cache_salt":"\\ud800"}'),
            (text, b'{"prompt":"x\xed\xa0\x80"}'),
            (text, b'{"prompt":"x\xff"}'),
            (text, b'{"prompt":"x\0"}'),
            (text, '{"prompt":"x"}'.encode("utf-16")),
            (text, b"\xef\xbb\xbf{}"),
            (text, b'{"prompt":"x","logit_bias":{"1":NaN}}'),
            (text, b'{"prompt":"x","logit_bias":{"1":1e308}}'),
            (text, b'{"prompt":"x","logit_bias":{"01":1,"1":1}}'),
            (text, {"prompt": "x", "stop": "x" * 100_000}),
            (text, {"prompt": [[1] * 2000] * 51, "prompt_logprobs": 20, "max_tokens": 1}),
            (text, {"prompt": [1] * 2000, "n": 51, "echo": True, "logprobs": 20, "max_tokens": 1}),
            (chat, {"messages": [{"role": "user", "content": "a " * 1000}], "n": 128, "prompt_logprobs": 20}),
            (text, {"prompt": ["x"] * 10_000}),
            (text, {"prompt": [[1]] * 10_000}),
            (text, {"prompt": [1] * SCRIPTED_CONTEXT}),
            (text, {"prompt": [1] * (SCRIPTED_CONTEXT + 1)}),
            (text, {"prompt": [1] * 1_000_000}),
            (text, {"prompt": "word " * 300_000}),
            (chat, {"messages": [{"role": "user", "content": "a"}] * 30_000}),
        ):
            refused(scripted, path, body)
    assert post(scripted, text, {"prompt": "x", "max_tokens": 2})["usage"]["completion_tokens"] == 2


@pytest.mark.user_pain("V3", "V5")
def test_numbers_at_their_limits_are_served(scripted: Server) -> None:
    """Whatever the schema lets through must not hurt the engine."""
    limits: list[dict[str, Any]] = [
        *({"seed": seed} for seed in (-1, -(2**63), 2**63 - 1, 0)),
        *({"top_k": top_k} for top_k in (-1, 0, 2**31 - 1)),
        *({"priority": priority} for priority in (-(2**31), 2**31 - 1)),
        *({"temperature": temperature} for temperature in (0, 1e-300, 5e-324, 2)),
        {"top_p": 5e-324, "min_p": 1.0},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1e-300},
        {"repetition_penalty": 100, "logit_bias": {str(id): -100 for id in range(1024)}},
        {"logprobs": 20, "prompt_logprobs": 20, "n": 128},
        {"prompt": [[1] * 2000] * 12, "prompt_logprobs": 20, "max_tokens": 1},
        {"prompt": ["x"] * 16, "n": 128, "logit_bias": {str(id): -1 for id in range(1024)}},
        {"prompt": [[1] * 2000] * 64, "frequency_penalty": 1, "seed": -5, "min_tokens": 2, "stop_token_ids": [1, 2]},
        {"stop": ["é" * 1024] * 16, "stop_token_ids": list(range(128))},
        {"cache_salt": "\0", "user": "\0"},
        {"prompt": "a\0b", "echo": True},
        {"prompt": [1] * (SCRIPTED_CONTEXT - 1), "max_tokens": 2**63 - 1},
        {"prompt": [1] * (SCRIPTED_CONTEXT - 9), "max_tokens": None, "min_tokens": 2**63 - 1},
        {"prompt": ["x"] * 2048, "max_tokens": 1},
    ]
    with bystander(scripted):
        for fields in limits:
            ask = {"prompt": "x", "max_tokens": 3, **fields}
            answer = post(scripted, "/v1/completions", ask)
            counts = [choice["finish_reason"] for choice in answer["choices"]]
            assert set(counts) <= {"length", "stop"}
    assert scripted.metrics()["engine_generation"] == 1


def raw(server: Server, *pieces: bytes, half_close: bool = False) -> bytes:
    """What comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            while data := connection.recv(65536):
                answer += data
        except (BrokenPipeError, ConnectionResetError):
            return b""
    return answer


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt":"x","max_tokens":2}'


def counted(body: bytes = BODY, head: bytes = HEAD) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes = BODY, size: int = 1) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.user_pain("X7")
def test_x7_bytes_on_the_socket(scripted: Server) -> None:
    closing = HEAD + b"Connection: close\r\n"
    with bystander(scripted):
        answer = raw(scripted, counted() + counted() + counted(head=closing))
        assert answer.count(b"HTTP/1.1 200") == 3, "requests sent at once are answered in turn"
        assert b"200 OK" in raw(scripted, closing + b"Transfer-Encoding: chunked\r\n\r\n" + chunked())
        slow = [BODY[at : at + 4] for at in range(0, len(BODY), 4)]
        begin = closing + b"Content-Length: %d\r\n\r\n" % len(BODY)
        assert b"200 OK" in raw(scripted, begin, *slow)
        for pieces, half_close in (
            ((counted()[:-5],), True),
            ((HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nabc\r\n",), False),
            ((HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nabc\r\n",), False),
            ((HEAD + b"Content-Length: 5\r\nContent-Length: 29\r\n\r\n" + BODY,), False),
            ((HEAD + b"Content-Length: -1\r\n\r\n" + BODY,), False),
            ((HEAD + b"Content-Length: 999999999999\r\n\r\n",), False),
            ((b"GET /version HTTP/1.1\r\nHost: x\r\nX-A: b\0c\r\n\r\n",), False),
            ((b"\x16\x03\x01\x00\xa5\x01" + os.urandom(200),), False),
        ):
            answer = raw(scripted, *pieces, half_close=half_close)
            assert answer.startswith(b"HTTP/1.1 4"), (pieces[0][-60:], answer[:100])
        for left in (b"POST /v1/comp", HEAD, counted()[:-5]):  # and gone
            with socket.create_connection(("127.0.0.1", scripted.port), timeout=5) as connection:
                connection.sendall(left)
    assert scripted.status("/ready") == 200


@pytest.mark.user_pain("X7")
def test_x7_nothing_is_smuggled_behind_a_body(scripted: Server) -> None:
    """With two lengths the chunks count, and the connection ends: what follows is never read as a request."""
    for lengths in (
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
    ):
        answer = raw(scripted, HEAD + lengths + chunked() + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.count(b"HTTP/1.1 ") == 1 and b'"version"' not in answer


def test_a_request_id_cannot_inject_a_header(scripted: Server) -> None:
    for id in (b"a\rX-Evil: 1", b"a\tX-Evil: 1", b"a%0d%0aX-Evil: 1 2", b"\xc3\xa9", b"a" * 129, b""):
        answer = raw(
            scripted, b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: " + id + b"\r\n\r\n"
        )
        assert b"evil" not in answer.lower()
        assert answer.startswith(b"HTTP/1.1 400") or (id not in answer if id else b"x-request-id: \r" not in answer)


def test_a_thousand_connections(scripted: Server) -> None:
    """Idle ones, ones with half a head, and a hundred streams that vanish: the next is answered."""
    sockets = [socket.create_connection(("127.0.0.1", scripted.port), timeout=10) for _ in range(1000)]
    try:
        for connection in sockets[::2]:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost:")
        assert post(scripted, "/v1/completions", {"prompt": "x", "max_tokens": 2})["usage"]["completion_tokens"] == 2
        readers = [scripted.stream("x", max_tokens=400, n=1 + number % 2, stop=["zzz"]) for number in range(100)]
        for number, reader in enumerate(readers):
            if number % 3:
                reader.read_until(b"data: ")
            reader.vanish(reset=number % 2 == 0)
    finally:
        for connection in sockets:
            connection.close()
    scripted.assert_idle()


@pytest.mark.user_pain("X5")
def test_x5_no_way_round_the_key(demo_folder: Path) -> None:
    """Odd paths and methods, over the real HTTP server."""
    with Server(demo_folder, environment={"TRIMARAN_API_KEY": "sesame"}, wait=False) as server:
        server.until(lambda: server.status("/health") == 200, 20, "the port")
        tail = b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        paths = b"/v1/models //v1/models /V1/models /health/ /health/../v1/models /health/%2e%2e/v1/models".split()
        paths += b"/health%2f..%2fv1/models /health;/v1/models /health%00/v1/models /metrics /openapi.json / *".split()
        for method, path in itertools.product(b"GET HEAD OPTIONS POST DELETE TRACE FOO".split(), paths):
            assert raw(server, method + b" " + path + tail + b"\r\n").startswith(b"HTTP/1.1 401"), (method, path)
        basic = base64.b64encode(b"x:sesame")
        for sent in (b"Bearer", b"Bearer ", b"sesame", b"Basic " + basic, b"Bearer sesamee", b"Bearer SESAME", b"\xff"):
            head = b"GET /version" + tail + b"Authorization: " + sent + b"\r\n\r\n"
            assert raw(server, head).startswith(b"HTTP/1.1 401"), sent
        for sent in (b"Bearer sesame", b"bearer sesame"):
            head = b"GET /version" + tail + b"Authorization: " + sent + b"\r\n\r\n"
            assert raw(server, head).startswith(b"HTTP/1.1 200"), sent
        deep = HEAD + b"Content-Length: 99999999999\r\n\r\n"
        assert raw(server, deep).startswith(b"HTTP/1.1 401"), "nothing is validated before the key"


def bench(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "trimaran.frontend.launch.commands", "bench", "serve"]
    sizes = ["--num-prompts", "4", "--input-len", "8", "--output-len", "4"]
    return subprocess.run(
        [*command, "--base-url", server.url, *sizes, *arguments], capture_output=True, text=True, timeout=60
    )


def test_bench_serve_counts_and_tells_refusals(scripted: Server, tmp_path: Path) -> None:
    done = bench(scripted, "--result-file", str(tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())
    assert done.returncode == 0 and "error" not in done.stdout, done.stdout
    assert (report["completed"], report["failed"], report["total_output_tokens"]) == (4, 0, 16)
    done = bench(scripted, "--model", "nobody")
    assert done.returncode == 1 and "error: HTTP 404" in done.stdout and "'nobody' is not served here" in done.stdout
