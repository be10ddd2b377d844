"""The ASGI application: access, dispatch, and one form for every error.

Generating routes are raw ASGI (their streams are pushed from the batch callback); all others go through Starlette.
"""

import logging
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from ..client.refusals import RequestFailed, RequestRefused
from ..text.template import TemplateRefusal
from .access import Access
from .asgi import ClientLeft, Exchange, Receive, Scope, Send
from .errors import INTERNAL_ERROR, ApiError, api_error
from .rate_limit import RateLimit
from .routes.admin import AdminRoutes
from .routes.chat import ChatRoute
from .routes.completions import CompletionsRoute
from .routes.state import StateRoutes
from .routes.tokens import TokenRoutes
from .routes.vectors import EmbeddingsRoute, PoolingRoute, RerankRoute, ScoreRoute
from .serving import Serving

_MAX_HEADERS = 100

log = logging.getLogger("trimaran.http")


class App:
    """What the HTTP server calls."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._statistics = serving.statistics
        configuration = serving.configuration
        self._access = Access(configuration.api_keys, configuration.admin_keys)
        self._rates: RateLimit | None = None
        if configuration.requests_per_minute is not None:
            num_keys = len(configuration.api_keys)
            self._rates = RateLimit(Path(configuration.rate_file), num_keys, configuration.requests_per_minute)
        self._generating: dict[str, Callable[[Scope, Receive, Exchange], Awaitable[None]]] = {
            "/v1/chat/completions": ChatRoute(serving),
            "/v1/completions": CompletionsRoute(serving),
            "/v1/embeddings": EmbeddingsRoute(serving),
            "/pooling": PoolingRoute(serving),
            **dict.fromkeys(("/v1/score", "/score"), ScoreRoute(serving)),
            **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), RerankRoute(serving)),
        }
        self._starlette = Starlette(
            routes=[*StateRoutes(serving).routes(), *TokenRoutes(serving).routes(), *AdminRoutes(serving).routes()],
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
        key = self._access.check(scope)
        self._check_head(scope)
        route = self._generating.get(scope["path"])
        if route is None:
            await self._starlette(scope, receive, exchange.send)
        elif scope["method"] != "POST":
            raise ApiError(405, f"{scope['path']} takes POST only", headers=((b"allow", b"POST"),))
        else:
            self._check_rate(key)
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

    def _check_rate(self, key: int | None) -> None:
        """Raises ApiError 429 for a key that asked too often."""
        if self._rates is None or key is None:
            return
        wait_s = self._rates.take(key)
        if wait_s is not None:
            raise ApiError(
                429,
                f"this key may make {self._rates.per_minute} requests a minute; ask again in {math.ceil(wait_s)} s",
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )

    def _route(self, scope: Scope) -> str:
        """A bounded set of names, whatever clients ask for."""
        path: str = scope["path"]
        if path in self._generating or any(path == route.path for route in self._starlette.routes):  # type: ignore[attr-defined]
            return path
        return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"


def from_origins(app: App, origins: tuple[str, ...]) -> Any:
    """The application for web pages of these origins too (CORS); itself without any."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


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
