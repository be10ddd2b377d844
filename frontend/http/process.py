"""A frontend process: HTTP on one side, the engine core on the other, the supervisor above.

The port opens at once. Until the model is known and the engine ready, every API route answers 503 with the phase.
"""

import asyncio
import contextlib
import logging
import os
import sys
from pathlib import Path

import uvloop
from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.http import HTTP1Settings
from granian.server.embed import Server

from ...ipc.actor import Actor
from ...ipc.conditions import Refusal
from ...ipc.configuration import FrontendConfiguration
from ...ipc.control import (
    CoreLost,
    CoreStarted,
    Drain,
    Drained,
    Fault,
    Listening,
    ModelKnown,
    PhaseNotice,
    Pulse,
    Refused,
    Stop,
    ToChild,
)
from ...ipc.frontend_messages import FailKind
from ...ipc.process import Adopted, adopt
from ..client.engine_client import EngineClient
from ..client.refusals import RequestFailed
from ..text.model_text import ModelText
from .app import App, from_origins
from .serving import Serving

_BACKLOG = 4096  # connections; the server's own default stops answering, /health included, at 128
_HEADER_READ_TIMEOUT_MS = 30_000
_PULSE_EVERY_S = 1.0
_REPORT_EVERY_S = 1.0
_REPORT_PAUSE_S = 0.1
_ORDERLY_END_S = 3.0  # for error events to reach clients that read
_LISTENER_END_S = 1.0

log = logging.getLogger("trimaran.frontend")


class Frontend(Actor):
    """Owns everything of this process."""

    def __init__(self, adopted: Adopted) -> None:
        super().__init__()
        configuration = adopted.begin.configuration
        assert isinstance(configuration, FrontendConfiguration)
        self._configuration = configuration
        self._link = adopted.link
        self._client = EngineClient(
            core_address=configuration.core_address,
            index=configuration.index,
            incarnation=configuration.incarnation,
            stall_limit_s=configuration.stall_limit_s,
            default_max_tokens=configuration.default_max_tokens,
        )
        self._serving = Serving(configuration, self._client, self.start_task, self._link.send)
        certificate, key = configuration.tls_certificate, configuration.tls_key
        self._server = Server(
            from_origins(App(self._serving), configuration.cors_origins),
            address=configuration.host,
            port=configuration.port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            http1_settings=HTTP1Settings(
                header_read_timeout=_HEADER_READ_TIMEOUT_MS,
                max_buffer_size=max(8192, configuration.limits.max_header_bytes),
            ),
            websockets=False,
            backlog=_BACKLOG,
            backpressure=_BACKLOG,
            log_enabled=False,
            ssl_cert=None if certificate is None else Path(certificate),
            ssl_key=None if key is None else Path(key),
            ssl_protocol_min=SSLProtocols.tls12,
        )

    async def open(self) -> None:
        """Serve at once."""
        self.start_task(self._client.run(), "engine client")
        await asyncio.sleep(0)  # the client opens its channel
        self._http = self.start_task(self._serve(), "http server")
        self.start_task(self._announce(), "announce the port")
        self.start_task(self._report(), "push statistics")
        self._link.open(self._receive, _orphaned)
        self.start_task(self._pulse(), "pulse")

    async def close(self) -> None:
        """Nothing of ours outlives the process."""
        self._serving.text_work.close()
        self._link.close()

    async def _serve(self) -> None:
        try:
            await self._server.serve()
        except RuntimeError as error:
            address = f"{self._configuration.host}:{self._configuration.port}"
            reason = str(error).splitlines()[0] if str(error) else "unknown"
            self._link.send(Refused(f"cannot listen on {address}: {reason}; choose another --host or --port"))
            raise
        if not self._serving.is_ending:
            raise RuntimeError("the HTTP server ended by itself")

    async def _announce(self) -> None:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._configuration.host, self._configuration.host)
        while True:
            try:
                _, writer = await asyncio.open_connection(host, self._configuration.port)
            except OSError:
                await asyncio.sleep(0.005)
                continue
            writer.close()
            self._link.send(Listening(self._configuration.port))
            return

    async def _pulse(self) -> None:
        while True:
            self._link.send(Pulse())
            await asyncio.sleep(_PULSE_EVERY_S)

    async def _report(self) -> None:
        """Soon after a change, so that any frontend's /metrics is near the truth; at leisure for a core that is new."""
        statistics = self._serving.statistics
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_EVERY_S):
                    await statistics.changed.wait()
            statistics.changed.clear()
            self._client.report(statistics.families())
            await asyncio.sleep(_REPORT_PAUSE_S)

    def _receive(self, message: ToChild, _: list[int]) -> None:
        match message:
            case ModelKnown():
                self.start_task(self._load(message), "load the tokenizer")
            case PhaseNotice():
                self._client.phase_noticed(message)
            case CoreStarted():
                self._client.core_started(message.incarnation)
            case CoreLost():
                self._client.core_lost(message.incarnation, message.cause)
            case Drain():
                self._serving.is_draining = True
                self.start_task(self._drain(), "drain")
            case Stop():
                self._serving.is_draining = self._serving.is_ending = True
                self.start_task(self._end(), "end in order")
            case _:
                log.warning("a frontend has no use for %s", type(message).__name__)

    async def _load(self, message: ModelKnown) -> None:
        configuration = self._configuration
        try:
            text = await asyncio.to_thread(
                ModelText.load,
                Path(message.directory),
                chat_template=configuration.chat_template,
                generation_defaults=configuration.generation_defaults,
                matryoshka=configuration.matryoshka,
                reranker=configuration.reranker,
            )
        except Refusal as refusal:
            self._link.send(Refused(str(refusal)))
            return
        if text.template is None:
            log.warning("this model has no chat template: /v1/chat/completions will refuse; pass --chat-template")
        self._client.know_vocabulary(text)
        self._serving.model_known(message.directory, message.root, text)

    async def _drain(self) -> None:
        await self._serving.idle.wait()
        self._link.send(Drained())

    async def _end(self) -> None:
        self._client.fail_all(RequestFailed(FailKind.SHUTDOWN, "the server is shutting down"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ORDERLY_END_S):
                await self._serving.idle.wait()
        self._server.stop()  # type: ignore[no-untyped-call]
        await asyncio.wait([self._http], timeout=_LISTENER_END_S)  # it waits for clients without a limit of its own
        self.stop()


def _orphaned() -> None:
    """The supervisor is gone; its death kills this process at any moment, so nothing is begun any more."""
    os._exit(1)


def main() -> None:
    """The process."""
    adopted = adopt()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        uvloop.run(Frontend(adopted).run())
    except BaseException as error:
        log.critical("the frontend ends", exc_info=error)
        with contextlib.suppress(Exception):
            adopted.link.send(Fault(f"frontend: {error}"))
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # without waiting for the HTTP server's threads, which may hold a stalled client


if __name__ == "__main__":
    main()
