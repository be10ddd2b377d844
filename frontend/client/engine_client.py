"""A frontend's end of the engine: submits requests, routes outputs to their mailboxes, knows whether the core lives.

Every submitted request ends in exactly one terminal: the core's last output, its rejection, its failure, or the loss
of the core as told by the supervisor.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq
from msgspec import Struct, structs

from ...ipc.actor import Actor
from ...ipc.channel import DealerChannel
from ...ipc.control import PhaseNotice
from ...ipc.frontend_messages import (
    TO_FRONTEND,
    Abort,
    EngineState,
    Failed,
    FailKind,
    FinishSequence,
    Hello,
    InfoReply,
    InfoRequest,
    MetricsReply,
    MetricsRequest,
    OutputColumns,
    Outputs,
    Rejected,
    RejectKind,
    Report,
    ResetPrefixCache,
    Submit,
    ToFrontend,
    Vocabulary,
)
from ...ipc.metrics import MetricFamily
from ...ipc.sampling import Sampling
from ...ipc.server_info import EngineLimits, ServerInfo
from ..text.model_text import ModelText
from .generation import Generation, GenerationListener, GenerationRequest
from .output_reader import read_outputs, read_vectors
from .readiness import Readiness
from .refusals import EngineUnavailable, RequestFailed, RequestRefused
from .sampling import TokenRoom, check_prompt, settle
from .vectors import NO_TOKENS, VectorRequest

_HELLO_EVERY_S = 0.5
_STALE_AFTER_S = 5.0  # five heartbeats
_QUERY_LIMIT_S = 2.0

log = logging.getLogger("trimaran.engine_client")


class EngineClient(Actor):
    """One connection to the engine core. All methods belong to the loop that runs it."""

    def __init__(
        self,
        *,
        core_address: str,
        index: int,
        incarnation: int,
        stall_limit_s: float = 20.0,
        default_max_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self._address = core_address
        self._index, self._incarnation = index, incarnation
        self._stale_after_s = min(_STALE_AFTER_S, stall_limit_s)
        self._default_max_tokens = default_max_tokens
        # index: 10 bits, incarnation: 14, counter: 38; positive in int64
        self._request_ids = itertools.count((index % 1024 << 52) | (incarnation % 16384 << 38))
        self._query_ids = itertools.count(1)
        self._live: dict[int, Generation] = {}
        self._vectors: dict[int, VectorRequest] = {}
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._state: EngineState | None = None
        self._state_s = 0.0
        self._lost_incarnation = -1
        self._vocabulary: tuple[Vocabulary, bytes, bytes] | None = None
        self._vocabulary_told_to = -1  # incarnation
        self._phase: PhaseNotice | None = None
        self._phase_s = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._was_ready = asyncio.Event()

    async def open(self) -> None:
        """Connect; the core may not be there yet."""
        self._context = zmq.Context(io_threads=1)
        self._channel = DealerChannel(
            self._context,
            self._address,
            f"frontend-{self._index}-{self._incarnation}",
            TO_FRONTEND,
            self._receive,
        )
        self._channel.open()
        self.start_task(self._greet(), "greet the core")

    async def close(self) -> None:
        """Disconnect; what is live fails."""
        self.fail_all(RequestFailed(FailKind.SHUTDOWN, "the server is shutting down"))
        if self._context is not None:
            self._channel.close()
            self._context.term()
            self._context = None

    @property
    def limits(self) -> EngineLimits | None:
        """The last known limits of the engine; they outlive a restart of the core."""
        return None if self._state is None else self._state.limits

    def readiness(self) -> Readiness:
        """The engine's word on itself, if fresh."""
        state = self._state
        if state is None or state.incarnation <= self._lost_incarnation:
            return self._unready("no engine core is connected")
        if not self._is_fresh():
            age_s = time.monotonic() - self._state_s
            return Readiness(ready=False, reason=f"the engine core has been silent for {age_s:.1f} s")
        if state.draining:
            return Readiness(ready=False, reason="the server is draining", retry_after_s=state.retry_after_s)
        if not state.ready:
            return self._unready(state.reason, state.retry_after_s)
        if state.limits is None:
            return self._unready("the engine has not settled its limits", state.retry_after_s)
        return Readiness(ready=True)

    def _is_fresh(self) -> bool:
        return self._state is not None and time.monotonic() - self._state_s <= self._stale_after_s

    def _unready(self, reason: str, retry_after_s: float = 1.0) -> Readiness:
        notice = self._phase
        if notice is None:
            return Readiness(ready=False, reason=reason, retry_after_s=retry_after_s)
        elapsed_s = notice.elapsed_s + time.monotonic() - self._phase_s
        return Readiness(
            ready=False, reason=reason, phase=notice.phase, elapsed_s=elapsed_s, retry_after_s=retry_after_s
        )

    def know_vocabulary(self, model: ModelText) -> None:
        """The bytes of its tokens, for the core's grammars; told to each core once, ahead of any request."""
        table, tokenizer = model.tokenizer.bytes.table, model.tokenizer
        end_ids = tuple(id for id in model.end_token_ids if 0 <= id < len(table))
        if end_ids:  # else nothing could end an answer where its grammar does
            message = Vocabulary(tuple(sorted(tokenizer.control_ids)), end_ids)
            lengths = np.array([len(token) for token in table], np.int32)
            self._vocabulary = (message, b"".join(table), lengths.tobytes())
        self._tell_vocabulary()

    def _tell_vocabulary(self) -> None:
        if self._state is not None and self._vocabulary is not None:
            incarnation = self._state.incarnation
            if incarnation > max(self._vocabulary_told_to, self._lost_incarnation):
                self._vocabulary_told_to = incarnation
                self._send(*self._vocabulary)

    # The supervisor's word, by the control link.

    def phase_noticed(self, notice: PhaseNotice) -> None:
        """What the engine is doing while it is not ready."""
        self._phase, self._phase_s = notice, time.monotonic()

    def core_started(self, incarnation: int) -> None:
        """A core takes connections."""
        self._send(Hello(self._index, self._incarnation))

    def core_lost(self, incarnation: int, cause: str) -> None:
        """Fail what was live there."""
        self._lost_incarnation = max(self._lost_incarnation, incarnation)
        error = RequestFailed(FailKind.CORE_LOST, f"the engine core was lost: {cause}")
        for request in self._all_live():
            if request.core_incarnation <= incarnation:
                self._forget(request.request_id)
                request.fail(error)
        for query in self._queries.values():
            if not query.done():
                query.set_exception(EngineUnavailable("the engine core was lost", 1.0))

    async def wait_ready(self) -> None:
        """Until the core has said for the first time that it is ready."""
        await self._was_ready.wait()

    # Requests.

    def submit(
        self,
        request: GenerationRequest,
        model: ModelText,
        listener: GenerationListener | None = None,
        *,
        param: str = "prompt",
    ) -> Generation:
        """Check against the engine's limits and send. Raises RequestRefused; `param` names the prompt's field."""
        readiness, state = self.readiness(), self._state
        if not readiness.ready:
            raise EngineUnavailable(readiness.text, readiness.retry_after_s)
        assert state is not None and state.limits is not None
        if not state.limits.generates:
            raise RequestRefused(NO_TOKENS, param="model")
        room = TokenRoom(
            prompt_tokens=len(request.prompt_token_ids),
            max_model_len=state.limits.max_model_len,
            vocab_size=state.limits.vocab_size,
            default_max_tokens=self._default_max_tokens,
        )
        check_prompt(request.prompt_token_ids, request.params, room, param)
        if request.grammar is not None and self._vocabulary is None:
            raise RequestRefused(
                f"{request.grammar_field}: this model's files name no end token, so a constrained answer could not "
                "end; add eos_token_id to generation_config.json",
                param=request.grammar_field,
            )
        sampling = settle(request.params, model, room)
        if request.thought is not None:
            sampling = structs.replace(sampling, thought=request.thought)
        generation = Generation(next(self._request_ids), request, model, self._finish_sequence, listener)
        generation.core_incarnation = state.incarnation
        self._live[generation.request_id] = generation
        self._send(
            Submit(
                generation.request_id,
                state.incarnation,
                sampling,
                num_sequences=request.params.n,
                priority=request.priority,
                arrival_s=generation.arrival_s,
                cache_salt=request.cache_salt,
                grammar=request.grammar,
            ),
            np.array(request.prompt_token_ids, np.int32).tobytes(),
        )
        return generation

    def abort(self, generation: Generation) -> None:
        """The owner wants nothing more. The core still sends its terminal, which nobody hears."""
        generation.close()
        if generation.request_id in self._live:
            self._send(Abort(generation.request_id))

    def submit_vector(self, token_ids: list[int], *, priority: int = 0) -> VectorRequest:
        """Ask for the vector of a checked text. Raises RequestRefused."""
        readiness, state = self.readiness(), self._state
        if not readiness.ready:
            raise EngineUnavailable(readiness.text, readiness.retry_after_s)
        assert state is not None
        request = VectorRequest(next(self._request_ids), len(token_ids), state.incarnation)
        self._vectors[request.request_id] = request
        self._send(
            Submit(
                request.request_id,
                state.incarnation,
                Sampling(max_tokens=1),
                priority=priority,
                arrival_s=request.arrival_s,
                pools=True,
            ),
            np.array(token_ids, np.int32).tobytes(),
        )
        return request

    def abort_vector(self, request: VectorRequest) -> None:
        """The owner wants nothing more. The core still sends its terminal, which nobody hears."""
        request.close()
        if request.request_id in self._vectors:
            self._send(Abort(request.request_id))

    def fail_all(self, error: RequestFailed) -> None:
        """Fail every live request here and abort it in the core."""
        for request in self._all_live():
            self._send(Abort(request.request_id))
            request.fail(error)

    def _all_live(self) -> list[Generation | VectorRequest]:
        return [*self._live.values(), *self._vectors.values()]

    def _forget(self, request_id: int) -> Generation | VectorRequest | None:
        return self._live.pop(request_id, None) or self._vectors.pop(request_id, None)

    def _finish_sequence(self, generation: Generation, choice: int) -> None:
        self._send(FinishSequence(generation.request_id, choice))

    # Questions.

    async def metrics(self) -> Sequence[MetricFamily]:
        """The totals of core and frontends. Raises EngineUnavailable when no core answers in time."""
        reply: MetricsReply = await self._ask(MetricsRequest)
        return reply.families

    async def info(self) -> ServerInfo:
        """What the engine settled on. Raises EngineUnavailable."""
        reply: InfoReply = await self._ask(InfoRequest)
        return reply.info

    async def reset_prefix_cache(self) -> None:
        """Forget cached content. Raises EngineUnavailable."""
        await self._ask(ResetPrefixCache)

    def report(self, families: tuple[MetricFamily, ...]) -> None:
        """Push this frontend's own metrics; not into the queue of a core that is not there."""
        if self._is_fresh():
            self._send(Report(self._index, self._incarnation, families))

    async def _ask(self, kind: type[MetricsRequest] | type[InfoRequest] | type[ResetPrefixCache]) -> Any:
        query_id = next(self._query_ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = answer
        try:
            self._send(kind(query_id))
            async with asyncio.timeout(_QUERY_LIMIT_S):
                return await answer
        except TimeoutError:
            raise EngineUnavailable("the engine core did not answer", 1.0) from None
        finally:
            del self._queries[query_id]

    def _send(self, message: Struct, *frames: bytes) -> None:
        """Nothing is sent once the client is closed: the core hears of the frontend's end from the supervisor."""
        if self._context is not None:
            self._channel.send(message, *frames)

    # The core's messages.

    async def _greet(self) -> None:
        """Say Hello until the core has spoken, and again when it has been silent: it may be another one."""
        while True:
            if self._state is None or time.monotonic() - self._state_s > 2.0:
                self._send(Hello(self._index, self._incarnation))
            await asyncio.sleep(_HELLO_EVERY_S if self._state is None else 1.0)

    def _receive(self, message: ToFrontend, frames: list[bytes]) -> None:
        match message:
            case Outputs():
                self._receive_outputs(frames)
            case EngineState():
                self._receive_state(message)
            case Rejected():
                self._receive_rejection(message)
            case Failed():
                self._receive_failure(message)
            case MetricsReply() | InfoReply():
                answer = self._queries.get(message.query_id)
                if answer is not None and not answer.done():
                    answer.set_result(message)

    def _receive_outputs(self, frames: list[bytes]) -> None:
        columns = OutputColumns.unpack(frames[0])
        if len(columns.pooled_dims):
            read_vectors(columns, self._vectors)
        for request_id in read_outputs(columns, self._live, self._broke):
            request = self._forget(request_id)
            if request is not None and not request.has_ended:
                request.fail(RequestFailed(FailKind.STEP_FAILED, "the engine ended the request without a reason"))

    def _broke(self, generation: Generation, error: Exception) -> None:
        """A bug of ours met one request: it fails, the others do not notice."""
        log.error("request %d broke its listener", generation.request_id, exc_info=error)
        self._send(Abort(generation.request_id))
        try:
            generation.fail(RequestFailed(FailKind.STEP_FAILED, "the server failed on this request; its log says why"))
        except Exception as another:
            log.error("and again as it was told", exc_info=another)
            generation.close()

    def _receive_state(self, state: EngineState) -> None:
        if state.incarnation <= self._lost_incarnation:
            return
        if state.limits is None and self._state is not None and self._state.limits is not None:
            known = self._state.limits
            state = EngineState(**{name: getattr(state, name) for name in state.__struct_fields__} | {"limits": known})
        self._state, self._state_s = state, time.monotonic()
        self._tell_vocabulary()
        if state.ready:
            self._phase = None
            self._was_ready.set()

    def _receive_rejection(self, message: Rejected) -> None:
        request = self._forget(message.request_id)
        if request is not None:
            field = request.request.grammar_field if isinstance(request, Generation) else ""
            request.fail(_refusal(message, field))

    def _receive_failure(self, message: Failed) -> None:
        for request_id in message.request_ids:
            request = self._forget(request_id)
            if request is not None:
                request.fail(RequestFailed(message.kind, message.text))


def _refusal(message: Rejected, field: str) -> RequestRefused:
    if message.kind is not RejectKind.GRAMMAR:
        return RequestRefused(message.text, kind=message.kind, retry_after_s=message.retry_after_s)
    return RequestRefused(
        f"{field}: the constraint cannot be honoured: {message.text}; change it", param=field, kind=message.kind
    )
