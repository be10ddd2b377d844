"""An engine in this process, for scripts: batches in, results out, with a progress bar."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .async_llm import AsyncLLM, Messages, Prompt
from .engine_host import OpenHost
from .outputs import RequestOutput
from .sampling import SamplingParams

T = TypeVar("T")


class LLM:
    """`LLM(model).generate(prompts, SamplingParams(max_tokens=64))`.

    Options are those of `trimaran serve`, by keyword. The engine runs in processes of its own, driven by one thread
    of this one; it ends with `close`, with the `with` block, or with this process.
    """

    def __init__(
        self,
        model: str = "",
        *,
        host: OpenHost | None = None,
        chat_template: str | None = None,
        generation_defaults: bool = True,
        **options: object,
    ) -> None:
        self._engine = AsyncLLM(
            model, host=host, chat_template=chat_template, generation_defaults=generation_defaults, **options
        )
        self._loop = uvloop.new_event_loop()
        self._closing: asyncio.Event | None = None
        started: Future[None] = Future()
        # The engine's processes die with the thread that started them, so this one lives until `close`.
        self._thread = threading.Thread(target=self._live, args=(started,), name="trimaran-llm", daemon=True)
        self._thread.start()
        started.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the engine. A second call does nothing."""
        if self._thread.is_alive() and self._closing is not None:
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt (text or token ids), in the given order. Raises RequestRefused, RequestFailed."""
        listed = _listed(prompts)
        calls = [
            partial(self._engine.generate, prompt, chosen)
            for prompt, chosen in zip(listed, _spread(params, len(listed)), strict=True)
        ]
        return self._run_all(calls, show_progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Answer each conversation, in the given order. Raises RequestRefused, RequestFailed, TemplateRefusal."""
        listed: list[Any] = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        calls = [
            partial(self._engine.chat, conversation, chosen, **template_arguments)
            for conversation, chosen in zip(listed, _spread(params, len(listed)), strict=True)
        ]
        return self._run_all(calls, show_progress)

    def _run_all(self, calls: Sequence[Callable[[], Any]], show_progress: bool) -> list[RequestOutput]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), disable=not show_progress) as progress:
            bar = progress.add_task("Requests", total=len(calls), rate="")
            num_tokens = 0

            def on_done(output: RequestOutput) -> None:
                nonlocal num_tokens
                num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
                elapsed_s = progress.tasks[bar].elapsed or 0.0
                rate = f"{num_tokens / elapsed_s:.0f} tokens/s" if elapsed_s else ""
                progress.update(bar, advance=1, rate=rate)

            return self._call(self._engine.run_all(calls, on_done))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _live(self, started: "Future[None]") -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._hold(started))
        finally:
            self._loop.close()

    async def _hold(self, started: "Future[None]") -> None:
        self._closing = asyncio.Event()
        try:
            async with self._engine:
                started.set_result(None)
                await self._closing.wait()
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling params were given for {count} prompts; give one, or one for each")
    return params
