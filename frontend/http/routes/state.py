"""Health, readiness, models, metrics and the server's description."""

import logging

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .... import __version__
from ....ipc.server_info import EngineLimits
from ...client.refusals import EngineUnavailable
from ..errors import ApiError
from ..exposition import render
from ..openapi import document
from ..schema.models import Health, Model, ModelList, Ready, Version
from ..serving import ServedModel, Serving

_TEXT = "text/plain; version=0.0.4; charset=utf-8"

log = logging.getLogger("trimaran.http")


class StateRoutes:
    """Handlers that answer from what this process knows, or ask the core."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._last_metrics = b""
        self._document: bytes | None = None

    def routes(self) -> list[Route]:
        """For the router."""
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/v1/server_info", self.server_info, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
        ]

    async def health(self, _: Request) -> Response:
        """This process answers; nothing is said about the engine."""
        return _json(Health())

    async def ready(self, _: Request) -> Response:
        """200 when a token can be made now; else 503 with reason, phase, elapsed time and Retry-After."""
        self._serving.ready_model()
        return _json(Ready())

    async def metrics(self, _: Request) -> Response:
        """The totals; when no core answers, the last known."""
        serving = self._serving
        families = serving.statistics.families()
        serving.client.report(families)
        try:
            self._last_metrics = render(await serving.client.metrics())
        except EngineUnavailable:
            if not self._last_metrics:
                self._last_metrics = render(families)
        return Response(self._last_metrics, media_type=_TEXT)

    async def version(self, _: Request) -> Response:
        """Ours."""
        return _json(Version(__version__))

    async def server_info(self, _: Request) -> Response:
        """What the engine settled on and why."""
        return Response(msgspec.json.encode(await self._serving.client.info()), media_type="application/json")

    async def models(self, _: Request) -> Response:
        """The one served model."""
        return _json(ModelList(data=[self._card(self._serving.ready_model())]))

    async def model(self, request: Request) -> Response:
        """One model by its name."""
        served = self._serving.ready_model()
        name = request.path_params["model"]
        self._serving.check_model_name(name)
        return _json(self._card(served))

    async def openapi(self, _: Request) -> Response:
        """The description of this interface."""
        if self._document is None:
            configuration = self._serving.configuration
            told = document(
                __version__,
                configuration.limits,
                trusts_templates=configuration.trust_request_templates,
                has_admins=bool(configuration.admin_keys),
            )
            self._document = msgspec.json.encode(told)
        return Response(self._document, media_type="application/json")

    def _card(self, served: ServedModel) -> Model:
        limits = self._serving.client.limits
        if limits is None:
            raise ApiError(503, "the engine has not settled its limits", code="loading", retry_after_s=1.0)
        return Model(
            id=served.name,
            created=served.created,
            max_model_len=limits.max_model_len,
            root=served.root,
            capabilities=_capabilities(limits, judges=served.text.judge is not None),
        )


def _capabilities(limits: EngineLimits, *, judges: bool) -> list[str]:
    has = {"generate": limits.generates, "embed": limits.pooling is not None}
    return [name for name, there in {**has, "score": has["embed"] or judges}.items() if there]


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
