"""How a request can go wrong, as conditions that every public surface turns into its own form of answer."""

from ...ipc.conditions import TrimaranError
from ...ipc.frontend_messages import FailKind, RejectKind


class RequestRefused(TrimaranError):
    """Turned away before any token. `param` names the field; `retry_after_s` is set where trying again may help."""

    def __init__(
        self,
        text: str,
        *,
        param: str | None = None,
        kind: RejectKind = RejectKind.INVALID,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(text)
        self.text = text
        self.param = param
        self.kind = kind
        self.retry_after_s = retry_after_s


class EngineUnavailable(RequestRefused):
    """The engine cannot make a token now."""

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text, kind=RejectKind.UNAVAILABLE, retry_after_s=retry_after_s)


class RequestFailed(TrimaranError):
    """Accepted, and then not finished."""

    def __init__(self, kind: FailKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


def first_cause(error: BaseException) -> BaseException:
    """The first error inside groups, which is what a caller wants to read."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
