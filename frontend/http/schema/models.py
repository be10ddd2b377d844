"""Models and the state of the server."""

from typing import Literal

from msgspec import Struct


class Model(Struct, frozen=True, kw_only=True):
    """A served model. `max_model_len` is the context of one request, whatever else runs; `capabilities` are what
    it makes: tokens ("generate"), vectors ("embed"), scores ("score").
    """

    id: str
    created: int
    max_model_len: int
    root: str
    capabilities: list[str]
    object: Literal["model"] = "model"
    owned_by: Literal["trimaran"] = "trimaran"
    parent: None = None


class ModelList(Struct, frozen=True, kw_only=True):
    """GET /v1/models."""

    data: list[Model]
    object: Literal["list"] = "list"


class Health(Struct, frozen=True):
    """GET /health: this process answers."""

    status: Literal["alive"] = "alive"


class Ready(Struct, frozen=True):
    """GET /ready: the engine can make a token now."""

    status: Literal["ready"] = "ready"


class Version(Struct, frozen=True):
    """GET /version."""

    version: str
