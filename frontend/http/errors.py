"""Everything that can be wrong with a request, in the form OpenAI's clients read. Never a traceback."""

import math

import msgspec

from ...ipc.conditions import TrimaranError
from ...ipc.frontend_messages import FailKind, RejectKind
from ..client.refusals import RequestFailed, RequestRefused
from ..client.sampling import refusal_of
from ..text.template import TemplateRefusal
from .schema.errors import ErrorBody, ErrorResponse

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_REJECTED = {
    RejectKind.INVALID: (400, None),
    RejectKind.TOO_LONG: (400, "context_length_exceeded"),
    RejectKind.QUEUE_FULL: (429, "queue_full"),
    RejectKind.UNAVAILABLE: (503, "unavailable"),
    RejectKind.GRAMMAR: (400, "invalid_constraint"),
}
_RETRYABLE = (FailKind.WORKER_LOST, FailKind.CORE_LOST, FailKind.SHUTDOWN)


class ApiError(TrimaranError):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = list(headers)
        if retry_after_s is not None:
            self.headers.append((b"retry-after", str(max(1, math.ceil(retry_after_s))).encode()))

    def body(self) -> bytes:
        """The JSON object, also used as an event in a stream."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return msgspec.json.encode(ErrorResponse(ErrorBody(self.message, kind, self.param, self.code)))


def api_error(error: Exception) -> ApiError | None:
    """The answer to an error that has one; None for a bug of ours."""
    match error:
        case ApiError():
            return error
        case RequestRefused():
            status, code = _REJECTED[error.kind]
            return ApiError(
                status, error.text, param=error.param, code=code, retry_after_s=_retry_after_s(status, error)
            )
        case RequestFailed():
            if error.kind in _RETRYABLE:
                return ApiError(503, error.text, code=str(error.kind), retry_after_s=1.0)
            if error.kind is FailKind.GRAMMAR:  # of the client's making, though it shows on the way
                return ApiError(400, error.text, code="invalid_constraint")
            return ApiError(500, error.text, code=str(error.kind))
        case TemplateRefusal():
            return ApiError(400, str(error), param="messages")
        case msgspec.ValidationError():
            refusal = refusal_of(error)
            return ApiError(400, refusal.text, param=refusal.param)
        case msgspec.DecodeError():
            return ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json")
        case RecursionError():
            return ApiError(400, "the body is nested too deeply", code="invalid_json")
    return None


INTERNAL_ERROR = ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def _retry_after_s(status: int, error: RequestRefused) -> float | None:
    if status == 400:
        return None
    return 1.0 if error.retry_after_s is None else error.retry_after_s
