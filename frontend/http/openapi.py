"""The OpenAPI document, generated from the structs that parse the requests."""

from typing import Any

import msgspec
from msgspec import Struct

from ...ipc.configuration import RequestLimits
from .schema.admin import Done, LogLevelRequest
from .schema.chat import ChatCompletion, ChatRequest
from .schema.completions import Completion, CompletionRequest
from .schema.embeddings import (
    EmbeddingRequest,
    Embeddings,
    PoolingAnswer,
    Ranking,
    RerankRequest,
    ScoreRequest,
    Scores,
)
from .schema.errors import ErrorResponse
from .schema.generation import INT32_MAX
from .schema.models import Health, Model, ModelList, Ready, Version
from .schema.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from .schema.unsupported import CHAT, COMPLETIONS, GENERATION

_TEMPLATE = "#/components/schemas/{name}"
_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The key is no admin's.",
    404: "No such model.",
    405: "The path exists, with another method.",
    408: "The body stalled.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too much is queued; see Retry-After.",
    500: "The request failed in the engine.",
    503: "The engine cannot make a token now; see Retry-After.",
}
_READ_ERRORS = (401, 405, 503)
_WRITE_ERRORS = (400, 401, 404, 405, 408, 413, 415, 429, 500, 503)


class _Operation(Struct, frozen=True, kw_only=True):
    path: str
    method: str
    summary: str
    response: type[Struct] | None
    request: type[Struct] | None = None
    media: str = "application/json"
    streams: bool = False
    is_open: bool = False
    is_for_admins: bool = False
    status: int = 200
    parameters: tuple[str, ...] = ()


_OPERATIONS = (
    _Operation(
        path="/v1/chat/completions",
        method="post",
        summary="Answer a conversation",
        request=ChatRequest,
        response=ChatCompletion,
        streams=True,
    ),
    _Operation(
        path="/v1/completions",
        method="post",
        summary="Continue texts",
        request=CompletionRequest,
        response=Completion,
        streams=True,
    ),
    _Operation(
        path="/v1/embeddings",
        method="post",
        summary="Vectors of texts",
        request=EmbeddingRequest,
        response=Embeddings,
    ),
    _Operation(
        path="/pooling",
        method="post",
        summary="Vectors of texts as the model leaves them",
        request=EmbeddingRequest,
        response=PoolingAnswer,
    ),
    *(
        _Operation(path=path, method="post", summary="How near texts are", request=ScoreRequest, response=Scores)
        for path in ("/v1/score", "/score")
    ),
    *(
        _Operation(path=path, method="post", summary="Documents by relevance", request=RerankRequest, response=Ranking)
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
    _Operation(
        path="/tokenize",
        method="post",
        summary="Token ids of a text or conversation",
        request=TokenizeRequest,
        response=TokenizeResponse,
    ),
    _Operation(
        path="/detokenize",
        method="post",
        summary="Text of token ids",
        request=DetokenizeRequest,
        response=DetokenizeResponse,
    ),
    _Operation(path="/v1/models", method="get", summary="The served model", response=ModelList),
    _Operation(path="/v1/models/{model}", method="get", summary="One model", response=Model, parameters=("model",)),
    _Operation(path="/v1/server_info", method="get", summary="What the engine settled on, and why", response=None),
    _Operation(path="/health", method="get", summary="Whether this process answers", response=Health, is_open=True),
    _Operation(path="/ready", method="get", summary="Whether a token can be made now", response=Ready, is_open=True),
    _Operation(path="/metrics", method="get", summary="Prometheus metrics", response=None, media="text/plain"),
    _Operation(path="/version", method="get", summary="The version", response=Version),
    _Operation(path="/openapi.json", method="get", summary="This document", response=None),
    *(
        _Operation(
            path=path, method="post", summary=summary, response=Done, request=request, status=status, is_for_admins=True
        )
        for path, status, summary, request in (
            ("/admin/drain", 202, "End as SIGTERM does: live requests first", None),
            ("/admin/reset_prefix_cache", 200, "Forget cached content that nobody uses", None),
            ("/admin/log_level", 200, "What is printed from now on", LogLevelRequest),
        )
    ),
)


def document(
    version: str, limits: RequestLimits, *, trusts_templates: bool, has_admins: bool = False
) -> dict[str, Any]:
    """OpenAPI 3.1, as builtins, with this server's limits and the routes that it has."""
    operations = [operation for operation in _OPERATIONS if has_admins or not operation.is_for_admins]
    types = {
        kind
        for operation in operations
        for kind in (operation.request, operation.response, ErrorResponse)
        if kind is not None
    }
    ordered = sorted(types, key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template=_TEMPLATE)
    _mark_unsupported(components)
    _mark_limits(components, limits)
    _mark_inputs(components)
    if not trusts_templates:
        for kind in ("ChatRequest", "TokenizeRequest"):
            components[kind]["properties"]["chat_template"] = {"type": "null"}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Trimaran", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _described(operation: _Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method} {operation.path}",
        "responses": {str(operation.status): _success(operation)} | _failures(operation),
        "security": [] if operation.is_open else [*([] if operation.is_for_admins else [{}]), {"key": []}],
    }
    if operation.request is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _ref(operation.request)}},
        }
    if operation.parameters:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in operation.parameters
        ]
    return described


def _success(operation: _Operation) -> dict[str, Any]:
    schema: dict[str, Any] = {} if operation.response is None else _ref(operation.response)
    content: dict[str, Any] = {operation.media: {"schema": schema}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": operation.summary, "content": content}


def _failures(operation: _Operation) -> dict[str, Any]:
    statuses = _READ_ERRORS if operation.request is None else _WRITE_ERRORS
    if operation.parameters:
        statuses = (*statuses, 404)
    if operation.is_for_admins:
        statuses = (*statuses, 403)
    content = {"application/json": {"schema": _ref(ErrorResponse)}}
    return {str(status): {"description": _ERRORS[status], "content": content} for status in sorted(statuses)}


def _ref(kind: type[Struct]) -> dict[str, str]:
    return {"$ref": _TEMPLATE.format(name=kind.__name__)}


def _mark_unsupported(components: dict[str, Any]) -> None:
    """A refused field takes only the values that ask for nothing."""
    tables = {"ChatRequest": (CHAT, GENERATION), "CompletionRequest": (COMPLETIONS, GENERATION)}
    for kind, fields in tables.items():
        properties = components[kind]["properties"]
        for name, harmless in ((name, harmless) for table in fields for name, harmless in table.items()):
            properties[name] = {"enum": [None, *harmless], "description": "Not supported yet; refused otherwise."}


_NUMBERS = {"n": "max_n", "logprobs": "max_logprobs", "top_logprobs": "max_logprobs", "prompt_logprobs": "max_logprobs"}
_LENGTHS = {
    "stop": ("maxItems", "max_stop_strings"),
    "stop_token_ids": ("maxItems", "max_stop_token_ids"),
    "logit_bias": ("maxProperties", "max_logit_bias"),
    "bad_words": ("maxItems", "max_bad_words"),
}
_PART_TYPES = ["text", "input_text", "output_text", "refusal"]


def _mark_limits(components: dict[str, Any], limits: RequestLimits) -> None:
    """The bounds that are options, and what messages may hold."""
    for kind in ("ChatRequest", "CompletionRequest"):
        properties = components[kind]["properties"]
        for name, option in _NUMBERS.items():
            for choice in properties.get(name, {}).get("anyOf", ()):
                if choice["type"] == "integer":
                    choice["maximum"] = getattr(limits, option)
        for name, (keyword, option) in _LENGTHS.items():
            for choice in properties[name]["anyOf"]:
                if choice["type"] in ("array", "object"):
                    choice[keyword] = getattr(limits, option)


def _mark_inputs(components: dict[str, Any]) -> None:
    """What the handlers check beyond types."""
    token = {"type": "integer", "minimum": 0, "maximum": INT32_MAX}
    tokens = {"type": "array", "items": token, "minItems": 1}
    text = {"type": "string", "minLength": 1}
    components["ContentPart"] |= {"required": ["type", "text"]}
    components["ContentPart"]["properties"] |= {"type": {"enum": _PART_TYPES}, "text": {"type": "string"}}
    components["ChatMessage"]["properties"]["content"] = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": _TEMPLATE.format(name="ContentPart")}}],
        "description": "May be null in an assistant's message.",
    }
    components["ChatMessage"]["required"] = ["role", "content"]
    components["CompletionRequest"]["properties"]["prompt"] = {
        "anyOf": [
            text,
            {"type": "array", "items": text, "minItems": 1},
            tokens,
            {"type": "array", "items": tokens, "minItems": 1},
        ]
    }
    components["DetokenizeRequest"]["properties"]["tokens"] = {"type": "array", "items": token}
    tokenize = components["TokenizeRequest"]
    messages = {"type": "array", "items": {"$ref": _TEMPLATE.format(name="ChatMessage")}, "minItems": 1}
    tokenize["anyOf"] = [
        {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
        {"required": ["messages"], "properties": {"messages": messages, "prompt": {"type": "null"}}},
    ]
