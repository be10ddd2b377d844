"""What an operator may do while the server runs. Guarded by admin keys; not there without one (see `Access`)."""

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....ipc.control import DrainAsked, LogLevelAsked
from ..asgi import read_json_body
from ..schema.admin import Done, LogLevelRequest
from ..serving import Serving


class AdminRoutes:
    """Handlers that tell the supervisor, or the core."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def routes(self) -> list[Route]:
        """For the router."""
        return [
            Route("/admin/drain", self.drain, methods=["POST"]),
            Route("/admin/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/admin/log_level", self.log_level, methods=["POST"]),
        ]

    async def drain(self, _: Request) -> Response:
        """As SIGTERM does: nothing new is taken, what runs may end, then the server does."""
        self._serving.tell_supervisor(DrainAsked())
        return _json(Done("draining"), 202)

    async def reset_prefix_cache(self, _: Request) -> Response:
        """Forget cached content that no live request holds. 503 when the core does not answer."""
        await self._serving.client.reset_prefix_cache()
        return _json(Done("forgotten"))

    async def log_level(self, request: Request) -> Response:
        """The least important lines that are printed from now on."""
        body = await read_json_body(request.scope, request.receive, self._serving.limits.max_body_bytes)
        asked = msgspec.json.decode(body, type=LogLevelRequest)
        self._serving.tell_supervisor(LogLevelAsked(asked.level))
        return _json(Done(f"log level {asked.level}"))


def _json(value: Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
