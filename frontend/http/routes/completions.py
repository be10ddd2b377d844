"""POST /v1/completions."""

import time
from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec import UNSET, Struct

from ...client.generation import Generation, GenerationRequest, SequenceListener, SequenceOutput, TokenLogprob
from ...client.refusals import RequestRefused
from ...client.sampling import check_limits, check_prompt_logprobs
from ..asgi import Exchange, Receive, Scope, read_json_body
from ..event_stream import DONE, EventStream
from ..schema.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from ..schema.generation import NO_PROMPT_LOGPROBS, Usage, usage
from ..schema.unsupported import COMPLETIONS, GENERATION, refuse_unsupported
from ..serving import ServedModel, Serving, new_id
from .generating import run_stream, run_whole
from .logprobs import LogprobForms, num_entries, prompt_entries
from .truncation import cut_prompt

_DECODER = msgspec.json.Decoder(CompletionRequest)
_encode = msgspec.json.Encoder().encode


class Prompt(Struct, frozen=True):
    """One prompt; `text` is what echo shows, None where it must be decoded."""

    token_ids: list[int]
    text: str | None
    num_cut: int | None = None


class CompletionsRoute:
    """Raw ASGI, because a stream's tokens are pushed from the batch callback."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        """Raises what the request is refused or failed with, as long as nothing was sent."""
        serving = self._serving
        model = serving.generating_model()
        request = _DECODER.decode(await read_json_body(scope, receive, serving.limits.max_body_bytes))
        serving.check_model_name(request.model)
        refuse_unsupported(request, COMPLETIONS, GENERATION)
        _check_fields(request)
        prompts = [self._cut(prompt, request) for prompt in await self._prompts(request, model)]
        requests = self._generation_requests(request, prompts)
        answer = CompletionAnswer(request, model, prompts)
        if request.stream:
            await run_stream(serving, model.text, requests, "prompt", answer, receive, exchange)
            return
        done = await run_whole(serving, model.text, requests, "prompt", receive)
        body = await serving.text_work.run(num_entries(done), lambda: answer.whole(done))
        await exchange.send_whole(200, body)

    def _generation_requests(self, request: CompletionRequest, prompts: list[Prompt]) -> list[GenerationRequest]:
        wanted = [request.prompt_logprobs, request.logprobs if request.echo else None]
        num_prompt_logprobs = max((number for number in wanted if number is not None), default=None)
        max_tokens = 1 if request.max_tokens == 0 else request.max_tokens  # 0 with echo: the one token is not shown
        params = request.sampling(max_tokens, request.logprobs, num_prompt_logprobs)
        check_limits(params, self._serving.limits)
        constraint = request.constraint(self._serving.limits)
        check_prompt_logprobs(params, sum(len(prompt.token_ids) for prompt in prompts), self._serving.limits)
        if len(prompts) * params.n > self._serving.limits.max_prompts:
            raise RequestRefused(
                f"prompt: {len(prompts)} prompts with n {params.n} are above this server's limit of "
                f"{self._serving.limits.max_prompts} choices",
                param="prompt",
            )
        return [
            GenerationRequest(
                prompt_token_ids=prompt.token_ids,
                params=params,
                priority=request.priority or 0,
                cache_salt=request.cache_salt,
                is_continuation=True,
                grammar=None if constraint is None else constraint.grammar,
                grammar_field="" if constraint is None else constraint.field,
                truncated_tokens=prompt.num_cut,
            )
            for prompt in prompts
        ]

    def _cut(self, prompt: Prompt, request: CompletionRequest) -> Prompt:
        ids, num_cut = cut_prompt(prompt.token_ids, request.truncate_prompt_tokens, request.max_tokens, self._serving)
        return Prompt(ids, None if num_cut else prompt.text, num_cut)

    async def _prompts(self, request: CompletionRequest, model: ServedModel) -> list[Prompt]:
        given = _given_prompts(request.prompt)
        if len(given) > self._serving.limits.max_prompts:
            raise RequestRefused(
                f"prompt: {len(given)} prompts are above this server's limit of {self._serving.limits.max_prompts}",
                param="prompt",
            )
        adds_special = request.add_special_tokens is not False
        size = sum(len(prompt) for prompt in given if isinstance(prompt, str))
        return await self._serving.text_work.run(size, partial(_encoded, given, model, adds_special))


def _encoded(given: list[str | list[int]], model: ServedModel, adds_special: bool) -> list[Prompt]:
    encode = model.text.tokenizer.encode
    return [
        Prompt(prompt, None)
        if isinstance(prompt, list)
        else Prompt(encode(prompt, add_special_tokens=adds_special), prompt)
        for prompt in given
    ]


def _given_prompts(prompt: str | list[int | str | list[int]]) -> list[str | list[int]]:
    """Each prompt apart. Raises RequestRefused for an empty or mixed list."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestRefused("prompt: the list is empty; send at least one token or text", param="prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [ids]
    others = [item for item in prompt if not isinstance(item, int)]
    if ids or len({type(item) for item in others}) > 1:
        raise RequestRefused("prompt: texts, token ids and lists of token ids cannot be mixed", param="prompt")
    return others


def _check_fields(request: CompletionRequest) -> None:
    request.check_stream_fields()
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestRefused("best_of: not supported beyond n; leave it out", param="best_of")
    if request.max_tokens == 0 and (not request.echo or request.stream):
        raise RequestRefused("max_tokens: 0 is allowed only with echo true and stream false", param="max_tokens")


class CompletionAnswer:
    """The answer to one request, whole or as events. Choices are numbered through all prompts."""

    def __init__(self, request: CompletionRequest, model: ServedModel, prompts: list[Prompt]) -> None:
        self.id = new_id("cmpl")
        self.num_logprobs = request.logprobs
        self.echoes = bool(request.echo)
        self.n = request.n or 1
        self._created = int(time.time())
        self._model = model
        self._prompts = prompts
        self._num_prompt_logprobs = request.prompt_logprobs
        self._skips_special = request.skip_special_tokens is not False
        self._hides_output = request.max_tokens == 0
        options = request.stream_options
        self._includes_usage = options is not None and bool(options.include_usage)
        self.has_running_usage = options is not None and bool(options.continuous_usage_stats)
        self.gives_token_ids = bool(request.return_token_ids)
        self.forms = LogprobForms(model.text.tokenizer, self._skips_special)

    def whole(self, generations: Sequence[Generation]) -> bytes:
        """The plain answer."""
        return _encode(
            Completion(
                id=self.id,
                created=self._created,
                model=self._model.name,
                choices=[
                    self._choice(prompt, generation, sequence)
                    for prompt, generation in enumerate(generations)
                    for sequence in generation.sequences
                ],
                usage=self._usage(generations),
            )
        )

    def echo(self, prompt: int) -> str:
        """The prompt's text as it stands before the completion."""
        if not self.echoes:
            return ""
        given = self._prompts[prompt]
        if given.text is not None:
            return given.text
        return self._model.text.tokenizer.decode(given.token_ids, skip_special_tokens=self._skips_special)

    def logprobs(
        self, generation: Generation, entries: Sequence[TokenLogprob], *, with_prompt: bool, offset: int
    ) -> CompletionLogprobs | None:
        """Of the prompt, if wanted, and of these tokens; `offset` is where the first one's text begins."""
        if self.num_logprobs is None:
            return None
        before = prompt_entries(generation) if with_prompt else []
        ids = generation.request.prompt_token_ids if with_prompt else []
        return self.forms.completion([*before, *entries], [*ids, *(entry.token_id for entry in entries)], offset)

    def _choice(self, prompt: int, generation: Generation, sequence: SequenceOutput) -> CompletionChoice:
        text = "" if self._hides_output else generation.text(sequence.choice)
        entries = [] if self._hides_output else sequence.take_logprobs()
        return CompletionChoice(
            index=prompt * self.n + sequence.choice,
            text=self.echo(prompt) + text,
            logprobs=self.logprobs(generation, entries, with_prompt=self.echoes, offset=0),
            finish_reason="length" if self._hides_output else sequence.finish_reason,
            stop_reason=None if self._hides_output else sequence.stop_reason,
            prompt_logprobs=(
                NO_PROMPT_LOGPROBS
                if self._num_prompt_logprobs is None
                else self.forms.prompt(generation, self._num_prompt_logprobs)
            ),
            prompt_token_ids=generation.request.prompt_token_ids if self.gives_token_ids else UNSET,
            token_ids=self._token_ids(sequence) if self.gives_token_ids else UNSET,
        )

    def _token_ids(self, sequence: SequenceOutput) -> list[int]:
        return [] if self._hides_output else sequence.token_ids

    def chunk_head(self) -> bytes:
        """Everything of a chunk before its choices."""
        return b'data: {"id":"%b","object":"text_completion","created":%d,"model":%b,"choices":[' % (
            self.id.encode(),
            self._created,
            _encode(self._model.name),
        )

    def open_sequence(self, stream: EventStream, prompt: int, sequence: SequenceOutput) -> SequenceListener:
        """Writes one choice's events."""
        if self.num_logprobs is None and not (self.has_running_usage or self.echoes or self.gives_token_ids):
            return _ChoiceStream(self, stream, prompt, sequence)
        return _DetailedChoiceStream(self, stream, prompt, sequence)

    def last_events(self, generations: Sequence[Generation]) -> bytes:
        """The usage, if asked for, and the end mark."""
        if not self._includes_usage:
            return DONE
        return self.chunk_head() + b'],"usage":' + _encode(self._usage(generations)) + b"}\n\n" + DONE

    def running_usage(self, generation: Generation) -> bytes:
        """The part of a chunk after its choices."""
        return b',"usage":' + _encode(self._usage([generation])) + b"}\n\n"

    def _usage(self, generations: Sequence[Generation]) -> Usage:
        return usage(
            sum(len(generation.request.prompt_token_ids) for generation in generations),
            0 if self._hides_output else sum(generation.num_tokens for generation in generations),
            sum(generation.cached_tokens for generation in generations),
            truncated_tokens=self._num_cut(generations),
        )

    def _num_cut(self, generations: Sequence[Generation]) -> int | None:
        cuts = [generation.request.truncated_tokens for generation in generations]
        return None if None in cuts else sum(cut or 0 for cut in cuts)


class _ChoiceStream:
    """One choice's events. `show` runs per token: the chunk is its text between two constants."""

    __slots__ = ("_answer", "_post", "_pre", "_prompt", "_sequence", "_write")

    def __init__(self, answer: CompletionAnswer, stream: EventStream, prompt: int, sequence: SequenceOutput) -> None:
        self._answer = answer
        self._prompt = prompt
        self._sequence = sequence
        self._write = stream.write
        index = prompt * answer.n + sequence.choice
        self._pre = answer.chunk_head() + b'{"index":%d,"text":' % index
        self._post = b',"logprobs":null,"finish_reason":null}]}\n\n'

    def show(self, text: str) -> None:
        """One chunk."""
        self._write(self._pre + _encode(text) + self._post)

    def finish(self) -> None:
        """The chunk with the finish reason."""
        self._write(self._pre + b'""' + self._finish(b"null") + b"}\n\n")

    def _finish(self, logprobs: bytes) -> bytes:
        return b',"logprobs":%b,"finish_reason":%b,"stop_reason":%b}]' % (
            logprobs,
            _encode(self._sequence.finish_reason),
            _encode(self._sequence.stop_reason),
        )


class _DetailedChoiceStream(_ChoiceStream):
    """With the prompt, log-probabilities or running usage in its chunks."""

    __slots__ = ("_num_given", "_offset", "_shows_prompt")

    def __init__(self, answer: CompletionAnswer, stream: EventStream, prompt: int, sequence: SequenceOutput) -> None:
        super().__init__(answer, stream, prompt, sequence)
        self._shows_prompt = answer.echoes
        self._offset = 0
        self._num_given: int | None = None

    def show(self, text: str) -> None:
        """One chunk, with what belongs to the tokens since the last."""
        text, logprobs = self._details(text)
        self._write(
            self._pre
            + _encode(text)
            + b',"logprobs":%b,"finish_reason":null' % logprobs
            + self._ids()
            + b"}]"
            + self._tail()
        )

    def finish(self) -> None:
        """The chunk with the finish reason."""
        text, logprobs = self._details("")
        self._write(self._pre + _encode(text) + self._finish(logprobs)[:-2] + self._ids() + b"}]" + self._tail())

    def _ids(self) -> bytes:
        """Those of the prompt with the first chunk, and of the tokens since the last."""
        if not self._answer.gives_token_ids:
            return b""
        ids = self._sequence.token_ids
        prompt = self._sequence.generation.request.prompt_token_ids
        head = b',"prompt_token_ids":' + _encode(prompt) if self._num_given is None else b""
        taken, self._num_given = ids[self._num_given or 0 :], len(ids)
        return head + b',"token_ids":' + _encode(taken)

    def _details(self, text: str) -> tuple[str, bytes]:
        with_prompt, self._shows_prompt = self._shows_prompt, False
        if with_prompt:
            text = self._answer.echo(self._prompt) + text
        found = self._answer.logprobs(
            self._sequence.generation, self._sequence.take_logprobs(), with_prompt=with_prompt, offset=self._offset
        )
        if found is not None:
            self._offset += sum(map(len, found.tokens))
        return text, _encode(found if found is not None and found.tokens else None)

    def _tail(self) -> bytes:
        if not self._answer.has_running_usage:
            return b"}\n\n"
        return self._answer.running_usage(self._sequence.generation)
