"""Compiles the grammars that requests bring, once each, without holding up the loop or trusting any of them.

A grammar is tried in a process that may die of it (grammar_trial.py). What passes is compiled here in a thread, for
which llguidance lets go of the interpreter lock, and kept for the next request that brings the same.
"""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from asyncio.subprocess import Process
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from ..ipc.conditions import TrimaranError
from ..ipc.frontend_messages import RejectKind
from ..ipc.sampling import Grammar
from .grammar_limits import compiled, roomy_thread
from .grammar_trial import VERDICT, Ask, Verdict, arguments, framed
from .token_bytes import TokenBytes

log = logging.getLogger("trimaran.core")

_TRIAL_SHARE = 0.45  # of the limit: what passes its trial is compiled once more
_MAX_TRIALS = 2  # at a time
_MAX_CACHE_BYTES = 1 << 30

StartTask = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]
Key = tuple[str, str]


class GrammarRefused(TrimaranError):
    """The constraint cannot be honoured, or (kind UNAVAILABLE, QUEUE_FULL) cannot be compiled now."""

    def __init__(self, text: str, kind: RejectKind = RejectKind.GRAMMAR) -> None:
        super().__init__(text)
        self.text = text
        self.kind = kind


class CompiledGrammar:
    """A grammar at its beginning, to be copied for each sequence; `end_ids` are the tokens that end its answers."""

    __slots__ = ("end_ids", "key", "matcher", "num_bytes", "num_tokens")

    def __init__(self, matcher: LLMatcher, vocabulary: TokenBytes, key: Key = ("", ""), num_bytes: int = 0) -> None:
        self.matcher = matcher
        self.num_tokens = len(vocabulary)
        self.end_ids = vocabulary.end_ids
        self.key = key
        self.num_bytes = num_bytes


class GrammarCompiler:
    """Belongs to the core's loop. `num_cached` grammars are kept, those used last."""

    def __init__(self, start_task: StartTask, *, num_cached: int, limit_s: float) -> None:
        self._start_task = start_task
        self._num_cached = num_cached
        self._limit_s = limit_s
        self._cache: OrderedDict[Key, CompiledGrammar] = OrderedDict()
        self._compiling: dict[Key, asyncio.Future[CompiledGrammar]] = {}
        self._vocabulary: TokenBytes | None = None
        self._tokenizer: LLTokenizer | None = None
        self._known = asyncio.Event()
        self._slots = asyncio.Semaphore(_MAX_TRIALS)
        self._thread = roomy_thread("compile")
        self._trials = _Trials(start_task)
        self.num_compiled = self.num_hits = self.num_refused = 0

    def know(self, vocabulary: TokenBytes, *, prepares: bool) -> None:
        """The vocabulary, from the first frontend that says it. With `prepares` what is made of it is made now, which
        takes half a second where it is large; else when the first grammar needs it.
        """
        if self._vocabulary is None:
            self._vocabulary = vocabulary
            self._known.set()
            if prepares:
                self._prepared()

    def _prepared(self) -> LLTokenizer:
        assert self._vocabulary is not None
        if self._tokenizer is None:
            self._tokenizer = self._vocabulary.tokenizer()
        return self._tokenizer

    async def close(self) -> None:
        """End the process of trials and the thread."""
        await self._trials.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """From the cache, or anew. Raises GrammarRefused within the limit."""
        key = (grammar.kind, grammar.source)
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            self.num_hits += 1
            return found
        if key not in self._compiling:
            self._compiling[key] = asyncio.get_running_loop().create_future()
            self._start_task(self._compile_for_all(key), "compile a grammar")
        return await asyncio.shield(self._compiling[key])

    def forget(self, grammar: CompiledGrammar) -> None:
        """It has failed on the way: its states may have grown to their limit."""
        if self._cache.get(grammar.key) is grammar:
            del self._cache[grammar.key]

    async def _compile_for_all(self, key: Key) -> None:
        future = self._compiling[key]
        try:
            future.set_result(await self._compiled(key))
        except GrammarRefused as refusal:
            self.num_refused += 1
            future.set_exception(refusal)
            future.exception()  # told, even where everybody who waited has left
        finally:
            del self._compiling[key]

    async def _compiled(self, key: Key) -> CompiledGrammar:
        step = "its turn to be compiled"
        try:
            async with asyncio.timeout(self._limit_s):
                await self._known.wait()
                async with self._slots:
                    step = "its trial"
                    verdict = await self._tried(key)
                    step = "being compiled"
                    made = await self._made(key, verdict)
        except TimeoutError:
            log.warning("a %s was refused: it waited %g s for %s", key[0], self._limit_s, step)
            if step == "its turn to be compiled":
                raise GrammarRefused(
                    "too many other grammars are being compiled; try again later", RejectKind.QUEUE_FULL
                ) from None
            raise GrammarRefused(f"it takes more than {self._limit_s:g} s to compile; make it simpler") from None
        self.num_compiled += 1
        self._keep(made)
        return made

    async def _tried(self, key: Key) -> Verdict:
        assert self._vocabulary is not None
        verdict = await self._trials.ask(self._vocabulary, key, self._limit_s * _TRIAL_SHARE)
        if verdict.grammar is None:
            log.info("a %s was refused: %s", key[0], verdict.reason)
            raise GrammarRefused(verdict.reason)
        return verdict

    async def _made(self, key: Key, verdict: Verdict) -> CompiledGrammar:
        assert self._vocabulary is not None and verdict.grammar is not None
        loop = asyncio.get_running_loop()
        matcher = await loop.run_in_executor(self._thread, compiled, self._prepared(), verdict.grammar)
        if matcher.is_error():
            raise GrammarRefused(" ".join(matcher.get_error().split()))
        return CompiledGrammar(matcher, self._vocabulary, key, verdict.num_bytes)

    def _keep(self, made: CompiledGrammar) -> None:
        self._cache[made.key] = made
        while len(self._cache) > 1 and (len(self._cache) > self._num_cached or self._num_bytes() > _MAX_CACHE_BYTES):
            self._cache.popitem(last=False)

    def _num_bytes(self) -> int:
        return sum(kept.num_bytes for kept in self._cache.values())


class _Trials:
    """The process of trials, started with the first grammar and again should it have died."""

    def __init__(self, start_task: StartTask) -> None:
        self._start_task = start_task
        self._process: Process | None = None
        self._starting = asyncio.Lock()
        self._asked: dict[int, asyncio.Future[Verdict]] = {}
        self._number = 0
        self._death_pipe: tuple[int, int] | None = None
        self._shared: int | None = None

    async def ask(self, vocabulary: TokenBytes, key: Key, limit_s: float) -> Verdict:
        """How the trial of this grammar went. Raises GrammarRefused where there could be none."""
        writer = await self._started(vocabulary)
        self._number += 1
        number = self._number
        self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            writer.write(framed(Ask(number, *key, limit_s)))
            return await self._asked[number]
        finally:
            del self._asked[number]

    async def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        for descriptor in (*(self._death_pipe or ()), *(() if self._shared is None else (self._shared,))):
            os.close(descriptor)
        self._death_pipe = self._shared = None

    async def _started(self, vocabulary: TokenBytes) -> StreamWriter:
        async with self._starting:
            if self._process is None:
                if self._shared is None:
                    self._shared, self._death_pipe = vocabulary.share(), os.pipe()
                assert self._death_pipe is not None
                death_pipe, shared = self._death_pipe[0], self._shared
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", f"{__package__}.grammar_trial"),
                    *arguments(death_pipe, shared, os.getpid()),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=(death_pipe, shared),
                )
                assert self._process.stdout is not None
                self._start_task(self._listen(self._process, self._process.stdout), "hear of grammars tried")
            assert self._process.stdin is not None
            return self._process.stdin

    async def _listen(self, process: Process, reader: StreamReader) -> None:
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(4), "little")
                verdict = VERDICT.decode(await reader.readexactly(length))
                asked = self._asked.get(verdict.number)
                if asked is not None and not asked.done():
                    asked.set_result(verdict)
        except (IncompleteReadError, ConnectionError):
            self._process = None
            code = await process.wait()
            log.warning("the process in which grammars are tried ended with code %d", code)
            for asked in self._asked.values():
                if not asked.done():
                    refusal = GrammarRefused("the grammar's trial was lost; try again", RejectKind.UNAVAILABLE)
                    asked.set_exception(refusal)
