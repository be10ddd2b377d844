"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from ...client.generation import Generation, GenerationRequest, SequenceListener, SequenceOutput
from ...client.refusals import RequestRefused
from ...client.sampling import check_limits, check_prompt_logprobs
from ...parsing.scanner import Event
from ...text.template import ChatTemplate
from ..asgi import Exchange, Receive, Scope, read_json_body
from ..errors import ApiError
from ..event_stream import DONE, EventStream
from ..schema.chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatInput,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    Tool,
)
from ..schema.generation import NO_PROMPT_LOGPROBS, Usage, usage
from ..schema.unsupported import CHAT, GENERATION, refuse_unsupported
from ..serving import ServedModel, Serving, new_id
from .chat_parsing import (
    ChoiceReader,
    CollectedChoice,
    Deltas,
    Parsed,
    Reading,
    constraint_with_tools,
    reading_of,
)
from .generating import run_stream, run_whole
from .logprobs import LogprobForms, num_entries

_END_LENGTH = 64  # characters of a prompt's end that are looked at
_MESSAGE_COST = 64  # characters: what rendering a message costs beside its text

_DECODER = msgspec.json.Decoder(ChatRequest)
_encode = msgspec.json.Encoder().encode


class ChatPrompt(NamedTuple):
    """A conversation as the model reads it; `end` is how its text ends, which may open the reasoning."""

    token_ids: list[int]
    end: str


class ChatRoute:
    """Raw ASGI, because a stream's tokens are pushed from the batch callback."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        """Raises what the request is refused or failed with, as long as nothing was sent."""
        serving = self._serving
        model = serving.generating_model()
        request = _DECODER.decode(await read_json_body(scope, receive, serving.limits.max_body_bytes))
        serving.check_model_name(request.model)
        refuse_unsupported(request, CHAT, GENERATION)
        reading = reading_of(request, model)
        prompt, generation = await self._generation_request(request, model, reading)
        answer = ChatAnswer(request, model, reading, prompt.end)
        if request.stream:
            await run_stream(serving, model.text, [generation], "messages", answer, receive, exchange)
            return
        listen = None if reading is None else answer.collect
        [done] = await run_whole(serving, model.text, [generation], "messages", receive, listen)
        body = await serving.text_work.run(num_entries([done]), lambda: answer.whole(done))
        await exchange.send_whole(200, body)

    async def _generation_request(
        self, request: ChatRequest, model: ServedModel, reading: Reading | None
    ) -> tuple[ChatPrompt, GenerationRequest]:
        request.check_stream_fields()
        if request.top_logprobs is not None and not request.logprobs:
            raise RequestRefused("top_logprobs: only allowed with logprobs true", param="top_logprobs")
        max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        params = request.sampling(max_tokens, logprobs, request.prompt_logprobs)
        check_limits(params, self._serving.limits)
        constraint = request.constraint(self._serving.limits)
        prompt = await chat_prompt(self._serving, request.chat(), model)
        constraint = constraint_with_tools(
            request, model, constraint, prompt.end, self._serving.limits.max_grammar_bytes
        )
        check_prompt_logprobs(params, len(prompt.token_ids), self._serving.limits)
        return prompt, GenerationRequest(
            prompt_token_ids=prompt.token_ids,
            params=params,
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            grammar=None if constraint is None else constraint.grammar,
            grammar_field="" if constraint is None else constraint.field,
            shown_ids=frozenset() if reading is None else reading.shown_ids,
        )


async def chat_prompt(serving: Serving, request: ChatInput, model: ServedModel) -> ChatPrompt:
    """The token ids of a conversation. Raises RequestRefused, TemplateRefusal."""
    _check_template_fields(serving, request)
    messages = [_template_message(index, message) for index, message in enumerate(request.messages)]
    size = sum(len(message["content"]) + _MESSAGE_COST for message in messages)

    arguments = dict(request.chat_template_kwargs or {})
    if request.tools:
        arguments["tools"] = [_told_tool(tool) for tool in request.tools]
    if request.documents:
        arguments["documents"] = request.documents
    if request.tools or request.documents:  # long ones are rendered and encoded off the loop, as long messages are
        size += len(_encode((request.tools, request.documents)))

    def work() -> ChatPrompt:
        template = _template(request, model)
        rendered = template.render(
            messages,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            control_tokens_in_content=serving.configuration.control_tokens_in_content,
            arguments=arguments,
        )
        return ChatPrompt(model.text.tokenizer.encode_rendered(rendered), rendered[-_END_LENGTH:])

    return await serving.text_work.run(size, work)


def _template(request: ChatInput, model: ServedModel) -> ChatTemplate:
    if request.chat_template is not None:
        return ChatTemplate(request.chat_template, model.text.tokenizer)
    if model.text.template is None:
        raise ApiError(
            400,
            "this model has no chat template, so it cannot chat; start the server with --chat-template FILE, "
            "or use /v1/completions",
            code="no_chat_template",
        )
    return model.text.template


def _check_template_fields(serving: Serving, request: ChatInput) -> None:
    arguments = request.chat_template_kwargs or {}
    is_given = request.chat_template is not None or "chat_template" in arguments
    if is_given and not serving.configuration.trust_request_templates:
        raise RequestRefused("chat_template: this server does not run templates from requests", param="chat_template")
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestRefused(
            "continue_final_message: not together with add_generation_prompt", param="continue_final_message"
        )


def _template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    param = f"messages[{index}].content"
    content = _flat_content(param, message)
    if content is None and message.role != "assistant":
        raise RequestRefused(f"{param}: a {message.role} message needs content", param=param)
    told = {"role": message.role, "content": content or ""}
    extra = {
        "name": message.name,
        "reasoning_content": message.reasoning if message.reasoning_content is None else message.reasoning_content,
        "tool_call_id": message.tool_call_id,
        "tool_calls": None if message.tool_calls is None else [_parsed_call(call) for call in message.tool_calls],
    }
    return told | {name: value for name, value in extra.items() if value is not None}


def _flat_content(param: str, message: ChatMessage) -> str | None:
    if message.content is None or isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for position, part in enumerate(message.content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise RequestRefused(
                f"{param}[{position}].type: content of type {part.type!r} is not supported by this server; send text",
                param=f"{param}[{position}].type",
            )
        if text is None:
            raise RequestRefused(f"{param}[{position}]: a text part needs text", param=f"{param}[{position}].text")
        texts.append(text)
    return "\n".join(texts)


def _told_tool(tool: Tool) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(tool)
    told["function"] = {name: value for name, value in told["function"].items() if value is not None}
    return told


def _parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    """Templates want a call's arguments as an object, clients send them as JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except msgspec.DecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class ChatAnswer:
    """The answer to one chat request, whole or as events."""

    def __init__(
        self, request: ChatRequest, model: ServedModel, reading: Reading | None = None, prompt_end: str = ""
    ) -> None:
        self._reading = reading
        self._prompt_end = prompt_end
        self._readers: list[ChoiceReader] = []
        self._collected: list[CollectedChoice] = []
        self.id = new_id("chatcmpl")
        self._created = int(time.time())
        self._model = model.name
        self._num_prompt_logprobs = request.prompt_logprobs
        options = request.stream_options
        self._includes_usage = options is not None and bool(options.include_usage)
        self.has_running_usage = options is not None and bool(options.continuous_usage_stats)
        self.num_top = (request.top_logprobs or 0) if request.logprobs else None
        self.forms = LogprobForms(model.text.tokenizer, request.skip_special_tokens is not False)

    def whole(self, generation: Generation) -> bytes:
        """The plain answer."""
        prompt_logprobs = (
            NO_PROMPT_LOGPROBS
            if self._num_prompt_logprobs is None
            else self.forms.prompt(generation, self._num_prompt_logprobs)
        )
        return _encode(
            ChatCompletion(
                id=self.id,
                created=self._created,
                model=self._model,
                choices=[self._choice(generation, sequence) for sequence in generation.sequences],
                usage=self.usage(generation),
                prompt_logprobs=prompt_logprobs,
            )
        )

    def _choice(self, generation: Generation, sequence: SequenceOutput) -> ChatChoice:
        if self._reading is None:
            finish_reason, message = sequence.finish_reason, AssistantMessage(content=generation.text(sequence.choice))
        else:
            collected = self._collected[sequence.choice]
            finish_reason, message = collected.reader.finish_reason, _message(collected.parsed)
        assert finish_reason is not None
        return ChatChoice(sequence.choice, message, self.taken_logprobs(sequence), finish_reason, sequence.stop_reason)

    def usage(self, generation: Generation) -> Usage:
        """So far; with reasoning tokens where a parser reads reasoning."""
        reasons = self._reading is not None and self._reading.parsers.reasoning is not None
        return usage(
            len(generation.request.prompt_token_ids),
            generation.num_tokens,
            generation.cached_tokens,
            sum(reader.reasoning_tokens for reader in self._readers) if reasons else None,
        )

    def collect(self, prompt: int, sequence: SequenceOutput) -> SequenceListener:
        """Takes one choice's output apart for a plain answer."""
        self._collected.append(CollectedChoice(self._reader(sequence)))
        return self._collected[-1]

    def _reader(self, sequence: SequenceOutput) -> ChoiceReader:
        assert self._reading is not None
        self._readers.append(ChoiceReader(self._reading, self._prompt_end, sequence))
        return self._readers[-1]

    def taken_logprobs(self, sequence: SequenceOutput) -> ChatLogprobs | None:
        """Those of the tokens since the last call."""
        return None if self.num_top is None else self.forms.chat(sequence.take_logprobs(), self.num_top)

    def chunk_head(self) -> bytes:
        """Everything of a chunk before its choices."""
        return b'data: {"id":"%b","object":"chat.completion.chunk","created":%d,"model":%b,"choices":[' % (
            self.id.encode(),
            self._created,
            _encode(self._model),
        )

    def open_sequence(self, stream: EventStream, prompt: int, sequence: SequenceOutput) -> SequenceListener:
        """Writes one choice's events."""
        if self._reading is not None:
            return _ParsedChoiceStream(self, stream, sequence, self._reader(sequence))
        if self.num_top is None and not self.has_running_usage:
            return _ChoiceStream(self, stream, sequence)
        return _DetailedChoiceStream(self, stream, sequence)

    def last_events(self, generations: Sequence[Generation]) -> bytes:
        """The usage, if asked for, and the end mark."""
        if not self._includes_usage:
            return DONE
        [generation] = generations
        return self.chunk_head() + b'],"usage":' + _encode(self.usage(generation)) + b"}\n\n" + DONE


class _ChoiceStream:
    """One choice's events. `show` runs per token: the chunk is its text between two constants."""

    __slots__ = ("_answer", "_close", "_head", "_is_open", "_post", "_pre", "_sequence", "_write")

    def __init__(self, answer: ChatAnswer, stream: EventStream, sequence: SequenceOutput) -> None:
        self._answer = answer
        self._sequence = sequence
        self._write = stream.write
        self._is_open = False
        self._head = answer.chunk_head() + b'{"index":%d,"delta":' % sequence.choice
        self._pre = self._head + b'{"content":'
        self._post = b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def show(self, text: str) -> None:
        """One chunk."""
        if self._is_open:
            self._write(self._pre + _encode(text) + self._post)
        else:
            self._write(self._opening() + self._pre + _encode(text) + self._post)

    def finish(self) -> None:
        """The chunk with the finish reason."""
        self._write(self._opening() + self._last(b"null") + self._tail())

    def _opening(self) -> bytes:
        if self._is_open:
            return b""
        self._is_open = True
        return self._head + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]' + self._tail()

    def _last(self, logprobs: bytes) -> bytes:
        sequence = self._sequence
        return self._head + b'{},"logprobs":%b,"finish_reason":%b,"stop_reason":%b}]' % (
            logprobs,
            _encode(self._finish_reason()),
            _encode(sequence.stop_reason),
        )

    def _finish_reason(self) -> str | None:
        return self._sequence.finish_reason

    def _tail(self) -> bytes:
        return b"}\n\n"


class _DetailedChoiceStream(_ChoiceStream):
    """With log-probabilities or running usage in its chunks."""

    __slots__ = ()

    def show(self, text: str) -> None:
        """One chunk, with what belongs to the tokens since the last."""
        self._write(
            self._opening()
            + self._pre
            + _encode(text)
            + b'},"logprobs":%b,"finish_reason":null}]' % _encode(self._answer.taken_logprobs(self._sequence))
            + self._tail()
        )

    def finish(self) -> None:
        """The chunk with the finish reason."""
        rest = self._answer.taken_logprobs(self._sequence)
        logprobs = _encode(rest if rest is not None and rest.content else None)
        self._write(self._opening() + self._last(logprobs) + self._tail())

    def _tail(self) -> bytes:
        if not self._answer.has_running_usage:
            return b"}\n\n"
        return b',"usage":' + _encode(self._answer.usage(self._sequence.generation)) + b"}\n\n"


class _ParsedChoiceStream(_DetailedChoiceStream):
    """With reasoning and tool calls apart from the text."""

    __slots__ = ("_deltas", "_reader")

    def __init__(self, answer: ChatAnswer, stream: EventStream, sequence: SequenceOutput, reader: ChoiceReader) -> None:
        super().__init__(answer, stream, sequence)
        self._reader = reader
        self._deltas = Deltas(reader)

    def show(self, text: str) -> None:
        """A chunk for each event that the text decides."""
        self._send(self._reader.read(text))

    def finish(self) -> None:
        """What was held back, and the chunk with the finish reason."""
        self._send(self._reader.read_rest())
        super().finish()

    def _send(self, events: list[Event]) -> None:
        for delta in self._deltas.of(events):
            self._write(
                self._opening()
                + self._head
                + b'%b,"logprobs":%b,"finish_reason":null}]'
                % (_encode(delta), _encode(self._answer.taken_logprobs(self._sequence)))
                + self._tail()
            )

    def _finish_reason(self) -> str | None:
        return self._reader.finish_reason


def _message(parsed: Parsed) -> AssistantMessage:
    reasoning = parsed.reasoning or UNSET
    return AssistantMessage(
        content=parsed.content,
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=parsed.calls or UNSET,
    )
