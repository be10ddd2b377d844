"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from ...client.chat_form import ChatForm
from ...client.generation import Generation, GenerationRequest, SequenceListener, SequenceOutput
from ...client.parsed_choice import ParsedChoice
from ...client.refusals import RequestRefused
from ...client.sampling import check_limits, check_prompt_logprobs
from ...client.tool_use import ToolUse, tool_use
from ..asgi import Exchange, Receive, Scope, read_json_body
from ..event_stream import DONE, EventStream
from ..schema.chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
)
from ..schema.generation import NO_PROMPT_LOGPROBS, Usage, usage
from ..schema.unsupported import CHAT, GENERATION, refuse_unsupported
from ..serving import ServedModel, Serving, new_id
from .chat_prompt import chat_prompt
from .generating import run_stream, run_whole
from .logprobs import LogprobForms, num_entries
from .parsed_choices import ParsedChoiceStream, message_of
from .truncation import cut_prompt

_DECODER = msgspec.json.Decoder(ChatRequest)
_encode = msgspec.json.Encoder().encode


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
        use = tool_use(request.tool_wishes(), request.constraint(serving.limits), model.parsers, serving.limits)
        generation, form = await self._generation_request(request, model, use)
        answer = ChatAnswer(request, model, form)
        if request.stream:
            await run_stream(serving, model.text, [generation], "messages", answer, receive, exchange)
            return
        opened = answer.open_parsed if answer.is_parsed else None
        [done] = await run_whole(serving, model.text, [generation], "messages", receive, opened)
        body = await serving.text_work.run(num_entries([done]), lambda: answer.whole(done))
        await exchange.send_whole(200, body)

    async def _generation_request(
        self, request: ChatRequest, model: ServedModel, use: ToolUse
    ) -> tuple[GenerationRequest, ChatForm]:
        request.check_stream_fields()
        if request.top_logprobs is not None and not request.logprobs:
            raise RequestRefused("top_logprobs: only allowed with logprobs true", param="top_logprobs")
        max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        params = request.sampling(max_tokens, logprobs, request.prompt_logprobs)
        check_limits(params, self._serving.limits)
        prompt, thinking = await chat_prompt(self._serving, request.chat(), model)
        prompt_token_ids, num_cut = cut_prompt(prompt, request.truncate_prompt_tokens, max_tokens, self._serving)
        check_prompt_logprobs(params, len(prompt_token_ids), self._serving.limits)
        generation = GenerationRequest(
            prompt_token_ids=prompt_token_ids,
            params=params,
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            truncated_tokens=num_cut,
        )
        form = ChatForm(model.parsers, use, thinking)
        return form.asked(generation, model.text.tokenizer, request.thinking_token_budget), form


class ChatAnswer:
    """The answer to one chat request, whole or as events."""

    def __init__(self, request: ChatRequest, model: ServedModel, form: ChatForm) -> None:
        self.id = new_id("chatcmpl")
        self._created = int(time.time())
        self._model = model.name
        self._num_prompt_logprobs = request.prompt_logprobs
        options = request.stream_options
        self._includes_usage = options is not None and bool(options.include_usage)
        self.has_running_usage = options is not None and bool(options.continuous_usage_stats)
        self.num_top = (request.top_logprobs or 0) if request.logprobs else None
        self.forms = LogprobForms(model.text.tokenizer, request.skip_special_tokens is not False)
        self._form = form
        self._shows_reasoning = request.include_reasoning is not False
        self._parsed: list[ParsedChoice] = []
        self.gives_token_ids = bool(request.return_token_ids)

    @property
    def is_parsed(self) -> bool:
        """Whether text may hold reasoning or calls."""
        return self._form.is_parsed

    def open_parsed(self, prompt: int, sequence: SequenceOutput) -> ParsedChoice:
        """One choice of a plain answer."""
        choice = self._form.open_choice(sequence, shows_reasoning=self._shows_reasoning)
        self._parsed.append(choice)
        return choice

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
                usage=self._usage(generation),
                prompt_logprobs=prompt_logprobs,
                prompt_token_ids=generation.request.prompt_token_ids if self.gives_token_ids else UNSET,
            )
        )

    def _choice(self, generation: Generation, sequence: SequenceOutput) -> ChatChoice:
        parsed = self._parsed[sequence.choice] if self._parsed else None
        message = AssistantMessage(generation.text(sequence.choice)) if parsed is None else message_of(parsed)
        finish_reason = sequence.finish_reason if parsed is None else parsed.finish_reason
        assert finish_reason is not None
        return ChatChoice(
            sequence.choice,
            message,
            self.taken_logprobs(sequence),
            finish_reason,
            sequence.stop_reason,
            sequence.token_ids if self.gives_token_ids else UNSET,
        )

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
        if self.is_parsed or self.gives_token_ids:
            choice = ParsedChoiceStream(
                self._form.parser(),
                sequence,
                is_single=self._form.use.is_single,
                shows_reasoning=self._shows_reasoning,
                form=self,
                stream=stream,
            )
            self._parsed.append(choice)
            return choice
        if self.num_top is None and not self.has_running_usage:
            return _ChoiceStream(self, stream, sequence)
        return _DetailedChoiceStream(self, stream, sequence)

    def last_events(self, generations: Sequence[Generation]) -> bytes:
        """The usage, if asked for, and the end mark."""
        if not self._includes_usage:
            return DONE
        [generation] = generations
        return self.chunk_head() + b'],"usage":' + _encode(self._usage(generation)) + b"}\n\n" + DONE

    def usage(self, sequence: SequenceOutput) -> Usage:
        """So far."""
        return self._usage(sequence.generation)

    def _usage(self, generation: Generation) -> Usage:
        reasoning = None
        if self._form.parsers.reasoning_format is not None:
            reasoning = sum(choice.num_reasoning_tokens for choice in self._parsed)
        return usage(
            len(generation.request.prompt_token_ids),
            generation.num_tokens,
            generation.cached_tokens,
            reasoning_tokens=reasoning,
            truncated_tokens=generation.request.truncated_tokens,
        )


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
            _encode(sequence.finish_reason),
            _encode(sequence.stop_reason),
        )

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
        return b',"usage":' + _encode(self._answer.usage(self._sequence)) + b"}\n\n"
