"""An engine in this process, for asyncio: the same core and workers as `trimaran serve`, without HTTP."""

import asyncio
import operator
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from msgspec.structs import replace

from ...ipc.configuration import RequestRules
from ...ipc.control import CoreLost, CoreStarted, ModelKnown, PhaseNotice, ToChild
from ...ipc.frontend_messages import RejectKind
from ..parsing.choosing import Parsers
from ..text.encoding import TextWork
from ..text.model_text import ModelText
from .chat_form import ChatForm
from .constraints import Constraint, constraint_of
from .embedder import Embedder, EncodingWishes
from .engine_client import EngineClient
from .engine_host import EngineHost, OpenHost, supervised
from .generation import Generation, GenerationListener, GenerationRequest, SequenceOutput
from .outputs import EmbeddingOutput, RequestOutput, request_output
from .parsed_choice import ParsedChoice
from .refusals import RequestRefused, first_cause
from .sampling import SamplingParams, check_limits, check_prompt_logprobs
from .scores import PairWishes, scorer_for
from .thinking import Thinking, thinking_after
from .tool_use import ToolWishes, tool_use
from .tools import template_call, template_tool
from .vectors import settle_form

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
_IN_FLIGHT = 512  # requests of one call at a time; the engine queues what it cannot run


class AsyncLLM:
    """`async with AsyncLLM(model) as llm: output = await llm.generate("Once upon a time")`.

    Options are those of `trimaran serve`, by keyword. Belongs to the loop that entered it.
    """

    _defaults: ClassVar[Mapping[str, object]] = {}

    def __init__(
        self,
        model: str = "",
        *,
        host: OpenHost | None = None,
        **options: object,
    ) -> None:
        if host is not None:
            self._open_host, self._rules = host, RequestRules()
        else:
            self._open_host, self._rules = supervised(model, options, self._defaults)
        self._text_work = TextWork()
        self._stack = AsyncExitStack()
        self._host: EngineHost | None = None
        self._client: EngineClient | None = None
        self._model: ModelText | None = None
        self._parsers = Parsers()
        self._core_started: asyncio.Future[int] | None = None
        self._model_known: asyncio.Future[ModelKnown] | None = None

    async def __aenter__(self) -> Self:
        """Start the engine and wait until it is ready. Raises what kept it from it."""
        loop = asyncio.get_running_loop()
        self._core_started, self._model_known = loop.create_future(), loop.create_future()
        self._group = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._host = self._open_host(self._heard)
        self._running = self._group.create_task(self._run_host(self._host), name="engine")
        try:
            await self._connect(self._host)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the engine; live requests fail."""
        if self._client is not None:
            self._client.stop()
        if self._host is not None and not self._running.done():
            self._host.terminate()
        self._text_work.close()
        try:
            await self._stack.aclose()
        except BaseExceptionGroup as group:
            raise first_cause(group) from None

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Continue a text or token ids. Raises RequestRefused, RequestFailed."""
        ids = await self._encoded(prompt)
        request = self._request(ids, params, is_continuation=True)
        generation = self._submit(replace(request, priority=priority, cache_salt=cache_salt))
        return await self._finished(generation, prompt if isinstance(prompt, str) else None)

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        thinking_token_budget: int | None = None,
        **template_arguments: Any,
    ) -> RequestOutput:
        """Answer a conversation. Tools, their choice and the budget are those of the HTTP API, and the answer is parted
        into reasoning, calls and text as there. Raises RequestRefused, RequestFailed, TemplateRefusal.
        """
        request = self._request([], params, is_continuation=False)
        wishes = ToolWishes.of(tools, tool_choice, parallel_tool_calls)
        asked = None if request.grammar is None else Constraint(request.grammar_field, request.grammar)
        use = tool_use(wishes, asked, self._parsers, self._rules.limits)
        shown = {"tools": [template_tool(tool) for tool in wishes.shown]} if wishes.shown else {}
        prompt, thinking = await self._rendered(messages, {**template_arguments, **shown})
        form = ChatForm(self._parsers, use, thinking)
        request = form.asked(
            replace(request, prompt_token_ids=prompt), self._text().tokenizer, _budget(thinking_token_budget)
        )
        listener = _ChatListener(form) if form.is_parsed and request.params.detokenize else None
        generation = self._submit(request, listener)
        return await self._finished(generation, None, None if listener is None else listener.choices)

    async def embed(
        self,
        prompts: Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingOutput]:
        """Vectors of texts or token ids, in the given order. `prompt_name` names one of the model's own prompts,
        `prompt` is a text that goes before each. Raises RequestRefused, RequestFailed.
        """
        embedder = self._embedder()
        form = settle_form(embedder.facts(), self._text().embedding, dimensions=dimensions, normalizes=normalize)
        wishes = EncodingWishes(truncate_to=truncate_prompt_tokens, prompt_name=prompt_name, prompt=prompt)
        encoded = await embedder.encode([_checked(one) for one in prompts], wishes, "prompts")
        found = await embedder.vectors(encoded)
        return [
            EmbeddingOutput(
                prompt=given if isinstance(given, str) else None,
                prompt_token_ids=ids,
                embedding=form.of(one.vector),
            )
            for given, ids, one in zip(prompts, encoded, found, strict=True)
        ]

    async def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
    ) -> list[float]:
        """How near texts are: one against each of the others, or as many against as many. `instruction` is for a
        reranker. Raises RequestRefused, RequestFailed.
        """
        firsts, seconds = ([given] if isinstance(given, str) else list(given) for given in (text_1, text_2))
        wishes = PairWishes(truncate_to=truncate_prompt_tokens, instruction=instruction)
        scorer = scorer_for(self._ready_client(), self._text(), self._text_work)
        return (await scorer.pairs(firsts, seconds, wishes)).scores

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[str]:
        """The text of one continuation, as it comes. Leaving the iteration ends the request."""
        listener = _QueueListener()
        checked = _for_stream(params)
        if not checked.detokenize:
            raise RequestRefused(
                "detokenize: a stream of text needs text; leave it True, or use stream_token_ids", param="detokenize"
            )
        ids = await self._encoded(prompt)
        generation = self._submit(self._request(ids, params, is_continuation=True), listener)
        try:
            while (piece := await listener.pieces.get()) is not None:
                yield piece
        finally:
            self._ready_client().abort(generation)
        if generation.error is not None:
            raise generation.error

    async def stream_token_ids(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[list[int]]:
        """The token ids of one continuation as they come: several at once where the reader is late. Makes no text,
        so stop strings are refused. Leaving the iteration ends the request.
        """
        listener = _TokenListener()
        ids = await self._encoded(prompt)
        without_text = replace(_for_stream(params), detokenize=False)
        generation = self._submit(self._request(ids, without_text, is_continuation=True), listener)
        try:
            while new := await listener.next():
                yield new
        finally:
            self._ready_client().abort(generation)
        if generation.error is not None:
            raise generation.error

    async def run_all(
        self,
        work: Sequence[Callable[[], Any]],
        on_done: Callable[[RequestOutput], None],
    ) -> list[RequestOutput]:
        """Run calls of `generate` or `chat` side by side, in order of admission; a full queue is waited for."""
        gate = asyncio.Semaphore(_IN_FLIGHT)

        async def one(call: Callable[[], Any]) -> RequestOutput:
            async with gate:
                output: RequestOutput = await _when_admitted(call)
            on_done(output)
            return output

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(call)) for call in work]
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        return [task.result() for task in tasks]

    # Starting.

    async def _run_host(self, host: EngineHost) -> None:
        """Whatever ends the host ends the waiting for it."""
        try:
            await host.run()
        finally:
            for waiting in (self._core_started, self._model_known):
                if waiting is not None and not waiting.done():
                    waiting.cancel()

    async def _connect(self, host: EngineHost) -> None:
        assert self._core_started is not None and self._model_known is not None
        known = await self._model_known
        self._model = await asyncio.to_thread(
            ModelText.load,
            Path(known.directory),
            chat_template=self._rules.chat_template,
            generation_defaults=self._rules.generation_defaults,
            matryoshka=self._rules.matryoshka,
            reranker=self._rules.reranker,
        )
        self._parsers = Parsers.chosen(
            None if self._model.template is None else self._model.template.source,
            self._model.tokenizer.control_texts,
            tools=self._rules.tool_parser,
            reasoning=self._rules.reasoning_parser,
        )
        incarnation = await self._core_started
        self._client = EngineClient(
            core_address=host.core_address,
            index=0,
            incarnation=1,
            default_max_tokens=self._rules.default_max_tokens,
        )
        self._client.know_vocabulary(self._model)
        self._group.create_task(self._client.run(), name="engine client")
        await asyncio.sleep(0)  # the client opens its channel
        self._client.core_started(incarnation)
        await host.wait_ready()
        await self._client.wait_ready()

    def _heard(self, message: ToChild) -> None:
        match message:
            case ModelKnown() if self._model_known is not None and not self._model_known.done():
                self._model_known.set_result(message)
            case CoreStarted():
                if self._core_started is not None and not self._core_started.done():
                    self._core_started.set_result(message.incarnation)
                elif self._client is not None:
                    self._client.core_started(message.incarnation)
            case CoreLost() if self._client is not None:
                self._client.core_lost(message.incarnation, message.cause)
            case PhaseNotice() if self._client is not None:
                self._client.phase_noticed(message)
            case _:
                pass

    # Requests.

    def _ready_client(self) -> EngineClient:
        assert self._client is not None, "enter the AsyncLLM first: async with AsyncLLM(...) as llm"
        return self._client

    def _text(self) -> ModelText:
        assert self._model is not None, "enter the AsyncLLM first: async with AsyncLLM(...) as llm"
        return self._model

    def _embedder(self) -> Embedder:
        return Embedder(self._ready_client(), self._text(), self._text_work)

    async def _encoded(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return _token_ids(prompt)
        _check_text(prompt, "prompt")
        tokenizer = self._text().tokenizer
        return await self._text_work.run(len(prompt), lambda: tokenizer.encode(prompt, add_special_tokens=True))

    async def _rendered(self, messages: Messages, arguments: Mapping[str, Any]) -> tuple[list[int], Thinking]:
        model = self._text()
        template = model.template
        if template is None:
            raise RequestRefused("this model has no chat template; pass chat_template=FILE", param="messages")
        if not all(isinstance(message, Mapping) for message in messages):
            raise RequestRefused('messages: give a list of {"role": ..., "content": ...}', param="messages")
        chat = [_template_message(message) for message in messages]
        texts = [content for message in chat if isinstance(content := message.get("content"), str)]
        for text in texts:
            _check_text(text, "messages")

        def work() -> tuple[list[int], Thinking]:
            rendered = template.render(
                chat, control_tokens_in_content=self._rules.control_tokens_in_content, arguments=arguments
            )
            thinking = thinking_after(rendered, None, self._parsers.reasoning_format)
            return model.tokenizer.encode_rendered(rendered), thinking

        return await self._text_work.run(sum(map(len, texts)) + len(repr(arguments)), work)

    def _request(self, ids: list[int], params: SamplingParams | None, *, is_continuation: bool) -> GenerationRequest:
        """Raises RequestRefused."""
        checked = _given(params).checked()
        check_limits(checked, self._rules.limits)
        constraint = constraint_of(checked.structured_outputs, self._rules.limits)
        return GenerationRequest(
            prompt_token_ids=ids,
            params=checked,
            is_continuation=is_continuation,
            grammar=None if constraint is None else constraint.grammar,
            grammar_field="" if constraint is None else constraint.field,
        )

    def _submit(self, request: GenerationRequest, listener: GenerationListener | None = None) -> Generation:
        check_prompt_logprobs(request.params, len(request.prompt_token_ids), self._rules.limits)
        return self._ready_client().submit(request, self._text(), listener)

    async def _finished(
        self, generation: Generation, prompt: str | None, parsed: Sequence[ParsedChoice] | None = None
    ) -> RequestOutput:
        try:
            await generation.wait()
        finally:
            if not generation.has_ended:
                self._ready_client().abort(generation)
        return request_output(prompt, generation, parsed)


class _ChatListener:
    """Parts the choices of an answer."""

    def __init__(self, form: ChatForm) -> None:
        self.choices: list[ParsedChoice] = []
        self._form = form

    def open_sequence(self, sequence: SequenceOutput) -> ParsedChoice:
        """One choice begins."""
        self.choices.append(self._form.open_choice(sequence))
        return self.choices[-1]

    def end(self, generation: Generation) -> None:
        """Whoever waits for it knows."""


class _QueueListener:
    """Text for an iterator. None marks the end."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[str | None] = asyncio.Queue()

    def open_sequence(self, sequence: SequenceOutput) -> Self:
        """One stream has one sequence."""
        return self

    def show(self, text: str) -> None:
        """More text."""
        self.pieces.put_nowait(text)

    def finish(self) -> None:
        """`end` follows."""

    def end(self, generation: Generation) -> None:
        """The end."""
        self.pieces.put_nowait(None)


class _TokenListener:
    """Token ids for an iterator, which takes all that have come since it last looked."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._num_taken = 0
        self._has_ended = False
        self._waiting: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    async def next(self) -> list[int]:
        """At least one id; none at the end."""
        if self._num_taken == len(self._token_ids) and not self._has_ended:
            self._waiting = self._loop.create_future()
            await self._waiting
        new = self._token_ids[self._num_taken :]
        self._num_taken += len(new)
        return new

    def open_sequence(self, sequence: SequenceOutput) -> Self:
        """One stream has one sequence."""
        self._token_ids = sequence.token_ids
        sequence.hear(self._wake)
        return self

    def show(self, text: str) -> None:
        """Nothing is made of the tokens."""

    def finish(self) -> None:
        """`end` follows."""

    def end(self, generation: Generation) -> None:
        """The end."""
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


def _given(params: SamplingParams | None) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestRefused(f"params: give SamplingParams, not {type(params).__name__}", param="params")
    return params or SamplingParams()


def _for_stream(params: SamplingParams | None) -> SamplingParams:
    given = _given(params)
    if given.n != 1:
        raise RequestRefused(f"n: a stream has one choice, not {given.n}; use generate, or stream several", param="n")
    return given


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """As templates want it: with content, and arguments of calls as objects."""
    told = {**message, "content": message.get("content") or ""}
    calls = message.get("tool_calls")
    return told if not isinstance(calls, list) else {**told, "tool_calls": [template_call(call) for call in calls]}


def _budget(given: Any) -> int | None:
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and 0 <= given < 1 << 63):
        return given
    raise RequestRefused(
        f"thinking_token_budget: give a number of tokens, 0 or more, not {given!r:.40}", param="thinking_token_budget"
    )


def _token_ids(prompt: Prompt) -> list[int]:
    try:
        if not isinstance(prompt, bytes):
            return [operator.index(id) for id in prompt]  # type: ignore[arg-type]
    except TypeError:
        pass
    raise RequestRefused(f"prompt: give a text or token ids, not {prompt!r:.40}", param="prompt")


def _checked(prompt: Prompt) -> str | list[int]:
    if not isinstance(prompt, str):
        return _token_ids(prompt)
    _check_text(prompt, "prompts")
    return prompt


def _check_text(text: str, param: str) -> None:
    """A Python string may hold what is no text: the halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestRefused(
            f"{param}: the character at {error.start} is half of a surrogate pair, which is no text; remove it",
            param=param,
        ) from None


async def _when_admitted(call: Callable[[], Any]) -> Any:
    while True:
        try:
            return await call()
        except RequestRefused as refusal:
            if refusal.kind is not RejectKind.QUEUE_FULL:
                raise
            await asyncio.sleep(min(1.0, refusal.retry_after_s or 0.1))
