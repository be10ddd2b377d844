"""The OpenAPI document against the whole server on the null platform: no answer is a 5xx, whatever is sent, nothing is
left running, and it serves afterwards.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from trimaran.tests.server import Server

ALIASES = ("/score", "/rerank", "/v2/rerank")  # of /v1/score and /v1/rerank
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}


@pytest.fixture(scope="module")
def served(demo_folder: Path) -> Iterator[Server]:
    """A short context, because a request without max_tokens fills it."""
    with Server(demo_folder, "--served-model-name", "test-model", "--max-model-len", "256") as server:
        yield server


def test_document_is_valid_and_complete(served: Server) -> None:
    document = served.http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    post = document["paths"]["/v1/chat/completions"]["post"]
    assert {"200", "400", "401", "404", "405", "413", "415", "429", "503"} <= set(post["responses"])
    schemas = document["components"]["schemas"]
    assert schemas["ChatRequest"]["required"] == ["messages"]
    temperature = schemas["ChatRequest"]["properties"]["temperature"]["anyOf"]
    assert {"type": "number", "minimum": 0, "maximum": 2} in temperature
    answer = served.http.post("/v1/chat/completions", json={**CHAT, "logprobs": True, "prompt_logprobs": 1}).json()
    resolver = {"$ref": "#/components/schemas/ChatCompletion", "components": document["components"]}
    jsonschema_rs.Draft202012Validator(resolver).validate(answer)
    completion = served.http.post("/v1/completions", json={"prompt": "x", "logprobs": 1, "echo": True}).json()
    resolver = {"$ref": "#/components/schemas/Completion", "components": document["components"]}
    jsonschema_rs.Draft202012Validator(resolver).validate(completion)


def fuzz(served: Server, num_requests: int) -> None:
    document = served.http.get("/openapi.json").json()
    for component in document["components"]["schemas"].values():  # else nearly every request asks for no such model
        if "model" in component["properties"]:
            component["properties"]["model"] = {"enum": ["test-model", None]}
    _know_the_vocabulary(document, served.http.get("/v1/server_info").json()["limits"]["vocab_size"])
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=served.url)
    operations = [operation.ok() for operation in schema.get_all_operations() if operation.ok().path not in ALIASES]
    statuses: Counter[tuple[str, int]] = Counter()
    for operation in operations:
        weight = 8 if operation.method == "post" else 1
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            _fuzz_one(operation, mode, max(1, num_requests * weight // 80), statuses)
    assert statuses.total() >= num_requests * 0.8, statuses
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert statuses[path, 200] and statuses[path, 400], statuses
    assert served.http.post("/v1/chat/completions", json=CHAT).status_code == 200
    served.assert_idle()
    info = served.http.get("/v1/server_info").json()
    assert info["generation"] == 1 and served.metrics()["engine_steps_total"] > 1, "nothing was restarted"


def _know_the_vocabulary(node: Any, size: int) -> None:
    """Token ids within the vocabulary, which the document does not know."""
    if isinstance(node, dict):
        if node.get("minimum") == 0 and node.get("maximum") == 2**31 - 1:
            node["maximum"] = size - 1
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            _know_the_vocabulary(item, size)


def _fuzz_one(operation: Any, mode: GenerationMode, num_requests: int, statuses: Counter[tuple[str, int]]) -> None:
    @settings(
        max_examples=num_requests,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        response = case.call(timeout=10)
        statuses[operation.path, response.status_code] += 1
        assert response.status_code < 500, (case.body, response.text)

    try:
        send()
    except schemathesis.errors.InvalidSchema:
        raise
    except Exception as error:
        if "Unsatisfiable" not in type(error).__name__:  # nothing can be wrong about an operation without input
            raise


WRONG: list[Any] = [
    *(None, True, False, 0, -1, 1.5, "", "x", "\0", 1e308, -(2**63), 2**64),
    *([], {}, [None], {"a": None}, [[]], [[[]]], {"0": 0}),
]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/completions": ("CompletionRequest", {"prompt": "x", "max_tokens": 1}),
    "/v1/chat/completions": ("ChatRequest", CHAT),
    "/tokenize": ("TokenizeRequest", {"messages": CHAT["messages"]}),
    "/detokenize": ("DetokenizeRequest", {"tokens": [1]}),
}


@pytest.mark.parametrize("path", BODIES)
def test_every_field_with_every_kind_of_value(served: Server, path: str) -> None:
    """Nothing is a 5xx, and a 400 names the field."""
    schema, body = BODIES[path]
    document = served.http.get("/openapi.json").json()
    for field in document["components"]["schemas"][schema]["properties"]:
        for value in WRONG:
            answer = served.http.post(path, json={**body, field: value})
            assert answer.status_code in ((200, 400, 404) if field == "model" else (200, 400)), (field, value)
            if answer.status_code == 400 and (path, field) != ("/tokenize", "messages"):
                assert answer.json()["error"]["param"].startswith(field), (field, value, answer.text)
    served.assert_idle()


def test_schema_driven_fuzz(served: Server) -> None:
    fuzz(served, 200)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_schema_driven_fuzz_at_length(served: Server) -> None:
    fuzz(served, 2000)
