"""Errors."""

from msgspec import Struct


class ErrorBody(Struct, frozen=True):
    """What went wrong; `param` is the field at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(Struct, frozen=True):
    """Every answer that is not a success."""

    error: ErrorBody
