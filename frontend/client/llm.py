"""An engine in this process, for scripts: batches in, results out, with a progress bar."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from numbers import Integral
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ...ipc.frontend_messages import FailKind
from .async_llm import AsyncLLM, Messages, Prompt
from .engine_host import OpenHost
from .outputs import EmbeddingOutput, RequestOutput
from .refusals import RequestFailed, RequestRefused
from .sampling import SamplingParams

T = TypeVar("T")


class _WholeAnswers(AsyncLLM):
    _defaults = {"prompt_step": 1.0}


class LLM:
    """`LLM(model).generate(prompts, SamplingParams(max_tokens=64))`.

    Options are those of `trimaran serve`, by keyword; `prompt_step` is a second here, since nobody reads tokens as they
    come. The engine runs in processes of its own, driven by one thread
    of this one; it ends with `close`, with the `with` block, or with this process.
    """

    def __init__(
        self,
        model: str = "",
        *,
        host: OpenHost | None = None,
        **options: object,
    ) -> None:
        self._engine = _WholeAnswers(model, host=host, **options)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._loop = self._runner.get_loop()
        self._closing = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self._end: BaseException | None = None
        started: Future[None] = Future()
        # The engine's processes die with the thread that started them, so this one lives until `close`.
        self._thread = threading.Thread(target=self._live, args=(started,), name="trimaran-llm", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:  # also an interrupt: no engine may stay behind
            self._interrupt_start()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the engine. A second call does nothing."""
        self._tell(self._closing.set)
        self._thread.join()

    def _interrupt_start(self) -> None:
        def cancel() -> None:
            if self._life is not None:
                self._life.cancel()

        self._tell(cancel)
        self._thread.join()

    def _tell(self, call: Callable[[], Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: all has ended
            self._loop.call_soon_threadsafe(call)

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
        **arguments: Any,
    ) -> list[RequestOutput]:
        """Answer each conversation, in the given order; `arguments` (`tools` among them) are those of `AsyncLLM.chat`.
        Raises RequestRefused, RequestFailed, TemplateRefusal.
        """
        listed: list[Any] = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        calls = [
            partial(self._engine.chat, conversation, chosen, **arguments)
            for conversation, chosen in zip(listed, _spread(params, len(listed)), strict=True)
        ]
        return self._run_all(calls, show_progress)

    def embed(self, prompts: Prompt | Sequence[Prompt], **wishes: Any) -> list[EmbeddingOutput]:
        """The vector of each text (or token ids), in the given order; `wishes` are those of `AsyncLLM.embed`. Raises
        RequestRefused, RequestFailed.
        """
        return self._call(self._engine.embed(_listed(prompts), **wishes))

    def score(self, text_1: str | Sequence[str], text_2: str | Sequence[str], **wishes: Any) -> list[float]:
        """How near texts are: one against each of the others, or as many against as many. Raises RequestRefused,
        RequestFailed.
        """
        return self._call(self._engine.score(text_1, text_2, **wishes))

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
        if not self._thread.is_alive():
            work.close()
            raise self._ended()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:  # by the end of the loop
            self._thread.join()
            raise self._ended() from None
        except BaseException:
            future.cancel()  # an interrupt: what was asked for need not be finished
            raise

    def _ended(self) -> Exception:
        how = "was closed" if self._end is None else f"has ended: {self._end}"
        return RequestFailed(FailKind.SHUTDOWN, f"this LLM {how}; make another one")

    def _live(self, started: "Future[None]") -> None:
        with self._runner:
            self._runner.run(self._hold(started))

    async def _hold(self, started: "Future[None]") -> None:
        self._life = asyncio.current_task()
        try:
            async with self._engine:
                started.set_result(None)
                await self._closing.wait()
        except BaseException as error:
            self._end = error
            if not started.done():
                started.set_exception(error)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | bytes):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestRefused(f"prompts: give texts or lists of token ids, not {prompts!r}", param="prompts")
    listed = list(prompts)
    return [listed] if listed and isinstance(listed[0], Integral) else listed  # type: ignore[list-item, return-value]


def _spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams | None]:
    if not isinstance(params, list | tuple):
        return [params] * count  # type: ignore[list-item]
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling params were given for {count} prompts; give one, or one for each")
    return params
