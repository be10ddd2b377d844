"""Runs the generations behind one request, streamed or whole, and ends them when the client leaves."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from ...client.generation import Generation, GenerationRequest, SequenceListener, SequenceOutput
from ...text.model_text import ModelText
from ..asgi import ClientLeft, Exchange, Receive
from ..event_stream import EventStream, StreamEnd
from ..serving import Serving


class StreamedAnswer(Protocol):
    """The form a family of answers has as events."""

    def open_sequence(self, stream: EventStream, prompt: int, sequence: SequenceOutput) -> SequenceListener:
        """Writes one choice's events."""

    def last_events(self, generations: Sequence[Generation]) -> bytes:
        """What follows the last choice."""


_SUBMITTED_AT_ONCE = 128  # prompts: some hundredths of a second of the loop


class _Generations:
    """The generations of one request. `on_end` is called once: with the first error, or None after the last."""

    def __init__(
        self,
        serving: Serving,
        num_expected: int,
        on_end: Callable[[Exception | None], None],
        open_sequence: Callable[[int, SequenceOutput], SequenceListener] | None,
    ) -> None:
        self.all: list[Generation] = []
        self._client = serving.client
        self._num_open = num_expected
        self._on_end = on_end
        self._open_sequence = open_sequence
        self._has_ended = False

    async def submit(self, requests: Sequence[GenerationRequest], model: ModelText, param: str) -> None:
        """All or none; others get their turn between. Raises RequestRefused."""
        try:
            for prompt, request in enumerate(requests):
                if prompt and prompt % _SUBMITTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
                feed = _Feed(self, prompt)
                self.all.append(self._client.submit(request, model, feed, param=param))
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """End what still runs."""
        for generation in self.all:
            if not generation.has_ended:
                self._client.abort(generation)

    def opened(self, prompt: int, sequence: SequenceOutput) -> SequenceListener | None:
        """One choice begins."""
        return None if self._open_sequence is None else self._open_sequence(prompt, sequence)

    def ended(self, generation: Generation) -> None:
        """One generation ended."""
        self._num_open -= 1
        if self._has_ended or (generation.error is None and self._num_open):
            return
        self._has_ended = True
        self._on_end(generation.error)


class _Feed:
    """The listener of one prompt's generation."""

    __slots__ = ("_generations", "_prompt")

    def __init__(self, generations: _Generations, prompt: int) -> None:
        self._generations, self._prompt = generations, prompt

    def open_sequence(self, sequence: SequenceOutput) -> SequenceListener | None:
        """One choice begins."""
        return self._generations.opened(self._prompt, sequence)

    def end(self, generation: Generation) -> None:
        """The generation ended."""
        self._generations.ended(generation)


async def run_whole(
    serving: Serving,
    model: ModelText,
    requests: Sequence[GenerationRequest],
    param: str,
    receive: Receive,
    open_sequence: Callable[[int, SequenceOutput], SequenceListener] | None = None,
) -> list[Generation]:
    """All generations, finished. Raises what any of them failed with; ClientLeft.

    `open_sequence` gives a choice (and its prompt's number) a listener of its own; without it, texts are collected.
    """
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_end(error: Exception | None) -> None:
        if ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    generations = _Generations(serving, len(requests), on_end, open_sequence)
    await generations.submit(requests, model, param)
    watcher = serving.start_task(watch(receive, lambda: on_end(ClientLeft())), "watch for the client leaving")
    try:
        await ended
    except ClientLeft:
        serving.statistics.client_left()
        raise
    finally:
        watcher.cancel()
        generations.abort()
    return generations.all


async def run_stream(
    serving: Serving,
    model: ModelText,
    requests: Sequence[GenerationRequest],
    param: str,
    answer: StreamedAnswer,
    receive: Receive,
    exchange: Exchange,
) -> None:
    """The whole exchange. Raises what the request failed with before its first event; ClientLeft."""
    stream = EventStream(exchange, serving.start_task)

    def on_end(error: Exception | None) -> None:
        if error is not None:
            stream.fail(error)
        else:
            stream.write(answer.last_events(generations.all))
            stream.end(StreamEnd.COMPLETE)

    def open_sequence(prompt: int, sequence: SequenceOutput) -> SequenceListener:
        return answer.open_sequence(stream, prompt, sequence)

    generations = _Generations(serving, len(requests), on_end, open_sequence)
    await generations.submit(requests, model, param)
    watcher = serving.start_task(
        watch(receive, lambda: stream.end(StreamEnd.CLIENT_LEFT)), "watch for the client leaving"
    )
    try:
        how = await stream.ended()
    finally:
        watcher.cancel()
        generations.abort()
    if how is StreamEnd.READER_TOO_SLOW:
        serving.statistics.reader_cut()
    if how is StreamEnd.CLIENT_LEFT:
        serving.statistics.client_left()
        raise ClientLeft


async def watch(receive: Receive, on_leave: Callable[[], object]) -> None:
    """Until the client leaves."""
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    finally:
        on_leave()  # also when the server says it by raising; after the answer's end nobody hears it
