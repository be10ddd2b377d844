"""The admin routes."""

from typing import Literal

from msgspec import Struct


class LogLevelRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """POST /admin/log_level."""

    level: Literal["info", "warning", "error"]


class Done(Struct, frozen=True):
    """What was done, or has begun."""

    status: str
