"""What all handlers share: the engine client, the served model once known, and whether requests are taken."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from ...ipc.configuration import FrontendConfiguration
from ...ipc.control import FromChild
from ..client.engine_client import EngineClient
from ..client.vectors import NO_TOKENS
from ..parsing.choosing import Parsers
from ..text.encoding import TextWork
from ..text.model_text import ModelText
from .errors import ApiError
from .pusher import StartTask
from .statistics import Statistics

log = logging.getLogger("trimaran.http")


class ServedModel(Struct, frozen=True):
    """The model by the name clients use; `root` is what the operator gave or where it lies."""

    name: str
    root: str
    text: ModelText
    created: int
    parsers: Parsers = Parsers()


class Serving:
    """Belongs to the frontend's loop."""

    def __init__(
        self,
        configuration: FrontendConfiguration,
        client: EngineClient,
        start_task: StartTask,
        tell_supervisor: Callable[[FromChild], None],
    ) -> None:
        self.configuration = configuration
        self.tell_supervisor = tell_supervisor
        self.limits = configuration.limits
        self.client = client
        self._start_task = start_task
        self.statistics = Statistics()
        self.text_work = TextWork()
        self.model: ServedModel | None = None
        self.is_draining = False
        self.is_ending = False
        self.idle = asyncio.Event()  # no request makes tokens: what a drain waits for
        self.idle.set()
        self._num_generating = 0

    def start_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task of one request: what it raises is logged and ends nobody else."""
        return self._start_task(_contained(work, name), name)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Around a request that makes tokens."""
        self._num_generating += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._num_generating -= 1
            if self._num_generating == 0:
                self.idle.set()

    def model_known(self, directory: str, root: str, text: ModelText) -> None:
        """From now on requests can be read."""
        name = self.configuration.served_model_name or root or Path(directory).name
        parsers = Parsers.chosen(
            None if text.template is None else text.template.source,
            text.tokenizer.control_texts,
            tools=self.configuration.tool_parser,
            reasoning=self.configuration.reasoning_parser,
        )
        log.info("tool calls are read as %s, reasoning as %s", parsers.tools or "none", parsers.reasoning or "none")
        self.model = ServedModel(name, root, text, int(time.time()), parsers)

    def ready_model(self) -> ServedModel:
        """The model, when a request for it can be taken now. Raises ApiError 503 with reason and Retry-After."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after_s=5.0)
        readiness = self.client.readiness()
        if not readiness.ready or self.model is None:
            code = "loading" if self.client.limits is None else "unavailable"
            raise ApiError(503, readiness.text, code=code, retry_after_s=readiness.retry_after_s)
        return self.model

    def generating_model(self) -> ServedModel:
        """The model, when it makes tokens. Raises ApiError 503 as above, 400 for one that makes vectors only."""
        served, limits = self.ready_model(), self.client.limits
        if limits is not None and not limits.generates:
            raise ApiError(400, NO_TOKENS, param="model", code="wrong_kind_of_model")
        return served

    def check_model_name(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served here."""
        assert self.model is not None
        if name is not None and name != self.model.name:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; ask for {self.model.name!r}",
                param="model",
                code="model_not_found",
            )


async def _contained(work: Coroutine[Any, Any, None], name: str) -> None:
    try:
        await work
    except Exception as error:
        log.error("a request's task failed: %s", name, exc_info=error)


def new_id(prefix: str) -> str:
    """A globally unique id of an answer."""
    return f"{prefix}-{uuid.uuid4().hex}"
