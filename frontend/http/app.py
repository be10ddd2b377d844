"""The ASGI application: access, dispatch, and one form for every error.

Generating routes are raw ASGI (their streams are pushed from the batch callback); all others go through Starlette.
"""

import logging
import time
from collections.abc import Awaitable, Callable

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..client.refusals import RequestFailed, RequestRefused
from ..text.template import TemplateRefusal
from .access import Access
from .asgi import ClientLeft, Exchange, Receive, Scope, Send
from .errors import INTERNAL_ERROR, ApiError, api_error
from .routes.chat import ChatRoute
from .routes.completions import CompletionsRoute
from .routes.state import StateRoutes
from .routes.tokens import TokenRoutes
from .serving import Serving

_MAX_HEADERS = 100

log = logging.getLogger("trimaran.http")


class App:
    """What the HTTP server calls."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._statistics = serving.statistics
        self._access = Access(serving.configuration.api_keys)
        self._generating: dict[str, Callable[[Scope, Receive, Exchange], Awaitable[None]]] = {
            "/v1/chat/completions": ChatRoute(serving),
            "/v1/completions": CompletionsRoute(serving),
        }
        self._starlette = Starlette(
            routes=[*StateRoutes(serving).routes(), *TokenRoutes(serving).routes()],
            exception_handlers={HTTPException: _http_error} | dict.fromkeys(_CONDITIONS, _condition_error),
        )
        self._starlette.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, send)
        self._statistics.opened()
        try:
            await self._answer_or_error(scope, receive, exchange)
        except ClientLeft:
            pass
        finally:
            self._statistics.closed(scope["method"], self._route(scope), exchange.status)
            if self._serving.configuration.log_requests:
                _log_request(scope, exchange)

    async def _answer_or_error(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        try:
            await self._answer(scope, receive, exchange)
        except ClientLeft:
            raise
        except Exception as error:
            await self._answer_error(exchange, error)

    async def _answer(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        self._access.check(scope)
        self._check_head(scope)
        route = self._generating.get(scope["path"])
        if route is None:
            await self._starlette(scope, receive, exchange.send)
        elif scope["method"] != "POST":
            raise ApiError(405, f"{scope['path']} takes POST only", headers=((b"allow", b"POST"),))
        else:
            with self._serving.generating():
                await route(scope, receive, exchange)

    async def _answer_error(self, exchange: Exchange, error: Exception) -> None:
        answer = api_error(error)
        if answer is None:
            log.error("request %s failed", exchange.id, exc_info=error)
            answer = INTERNAL_ERROR
        if not exchange.is_started:
            await exchange.send_whole(answer.status, answer.body(), answer.headers)

    def _check_head(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._serving.limits.max_header_bytes or len(scope["headers"]) > _MAX_HEADERS:
            raise ApiError(431, "the request's headers are too large")

    def _route(self, scope: Scope) -> str:
        """A bounded set of names, whatever clients ask for."""
        path: str = scope["path"]
        if path in self._generating or any(path == route.path for route in self._starlette.routes):  # type: ignore[attr-defined]
            return path
        return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"


_CONDITIONS = (
    ApiError,
    RequestRefused,
    RequestFailed,
    TemplateRefusal,
    msgspec.MsgspecError,
    RecursionError,
    Exception,  # a bug of ours: answered here, and raised on, so that it is logged
)


def _log_request(scope: Scope, exchange: Exchange) -> None:
    """One line when a request is over; status 0: the client left before its answer began."""
    took_s = time.monotonic() - exchange.began_s
    name = exchange.id.decode()
    log.info("%s %s %d %.3f s, request %s", scope["method"], scope["path"], exchange.status, took_s, name)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = tuple((name.encode(), value.encode()) for name, value in (error.headers or {}).items())
    told = {404: "there is no such path", 405: "this path takes another method"}
    return _response(ApiError(error.status_code, told.get(error.status_code, error.detail), headers=headers))


async def _condition_error(_: Request, error: Exception) -> Response:
    return _response(api_error(error) or INTERNAL_ERROR)


def _response(answer: ApiError) -> Response:
    response = Response(answer.body(), answer.status, media_type="application/json")
    response.raw_headers.extend(answer.headers)
    return response
