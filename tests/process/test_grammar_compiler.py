"""Grammars are tried in processes of their own: what explodes there is refused, and the core goes on."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from trimaran.engine_core.grammar_compiler import GrammarCompiler, GrammarRefused
from trimaran.ipc.frontend_messages import RejectKind
from trimaran.ipc.sampling import Grammar
from trimaran.tests.explosive import ENDS_ITS_PROCESS, LARGE_BUT_FINE, MALFORMED, MINUTES_TO_COMPILE, TOO_LARGE
from trimaran.tests.pure.constrained import VOCABULARY


@asynccontextmanager
async def compiling(
    *, num_cached: int = 8, limit_s: float = 10.0, knows: bool = True
) -> AsyncIterator[GrammarCompiler]:
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[None]] = []

        def start(work: object, name: str) -> asyncio.Task[None]:
            tasks.append(group.create_task(work, name=name))  # type: ignore[arg-type]
            return tasks[-1]

        compiler = GrammarCompiler(start, num_cached=num_cached, limit_s=limit_s)
        if knows:
            compiler.know(VOCABULARY, prepares=True)
        try:
            yield compiler
        finally:
            for task in tasks:
                task.cancel()
            await compiler.close()


def regex(text: str) -> Grammar:
    return Grammar(kind="regex", source=text)


async def refusal(compiler: GrammarCompiler, kind: str, source: str) -> GrammarRefused:
    with pytest.raises(GrammarRefused) as caught:
        await compiler.compile(Grammar(kind=kind, source=source))
    return caught.value


def trial_servers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if any("grammar_trial" in part for part in child.cmdline())]


@pytest.mark.user_pain("P8")
async def test_p8_the_second_use_comes_from_the_cache() -> None:
    async with compiling() as compiler:
        first = await compiler.compile(regex("a+"))
        began_s = time.perf_counter()
        assert await compiler.compile(regex("a+")) is first
        assert time.perf_counter() - began_s < 0.02
        assert await compiler.compile(Grammar(kind="choice", source='["a+"]')) is not first, "the kind counts"
        assert (compiler.num_compiled, compiler.num_hits) == (2, 1)


async def test_the_same_grammar_at_once_is_compiled_once() -> None:
    async with compiling() as compiler:
        made = await asyncio.gather(*(compiler.compile(regex("b+")) for _ in range(20)))
        assert len({id(grammar) for grammar in made}) == 1 and compiler.num_compiled == 1


async def test_the_grammars_used_last_are_kept() -> None:
    async with compiling(num_cached=2) as compiler:
        first = await compiler.compile(regex("a"))
        await compiler.compile(regex("b"))
        assert await compiler.compile(regex("a")) is first
        await compiler.compile(regex("c"))
        assert await compiler.compile(regex("a")) is first
        assert compiler.num_compiled == 3
        await compiler.compile(regex("b"))
        assert compiler.num_compiled == 4
        compiler.forget(first)
        assert await compiler.compile(regex("a")) is not first


@pytest.mark.user_pain("T6", "T8")
async def test_t6_malformed_grammars_are_refused_by_name() -> None:
    async with compiling() as compiler:
        for name, (kind, source, word) in MALFORMED.items():
            refused = await refusal(compiler, kind, source)
            assert refused.kind is RejectKind.GRAMMAR and word in refused.text, (name, refused.text)
            assert len(refused.text) < 500 and "\n" not in refused.text
        assert await compiler.compile(regex("a"))
        [server] = trial_servers()
        assert not server.children(), "no trial is left behind"


@pytest.mark.user_pain("T6", "T7")
async def test_t7_what_would_end_the_process_ends_its_trial() -> None:
    async with compiling() as compiler:
        for kind, source in (*ENDS_ITS_PROCESS.values(), *TOO_LARGE.values()):
            await refusal(compiler, kind, source)
        assert await compiler.compile(regex("a"))


@pytest.mark.user_pain("T7")
@pytest.mark.parametrize("name", MINUTES_TO_COMPILE)
async def test_t7_what_takes_minutes_is_refused_in_time(name: str) -> None:
    """Meanwhile the loop turns, and others compile."""
    async with compiling(limit_s=3) as compiler:
        await compiler.compile(regex("first"))
        began_s = time.monotonic()
        exploding = asyncio.gather(refusal(compiler, *MINUTES_TO_COMPILE[name]))
        await asyncio.sleep(0.1)
        await compiler.compile(regex("meanwhile"))
        assert not exploding.done()
        [refused] = await exploding
        assert time.monotonic() - began_s < 3.5
        assert refused.kind is RejectKind.GRAMMAR and "compile" in refused.text
        [server] = trial_servers()
        await asyncio.sleep(0.2)
        assert not server.children()


@pytest.mark.user_pain("T7")
async def test_t7_large_is_not_explosive() -> None:
    async with compiling() as compiler:
        for kind, source in LARGE_BUT_FINE.values():
            assert await compiler.compile(Grammar(kind=kind, source=source))


async def test_a_full_house_is_said() -> None:
    async with compiling(limit_s=2) as compiler:
        await compiler.compile(regex("first"))
        kind, source = MINUTES_TO_COMPILE["a multiple of a large number"]
        refused = await asyncio.gather(*(refusal(compiler, kind, source + " " * count) for count in range(6)))
        kinds = {each.kind for each in refused}
        assert kinds <= {RejectKind.GRAMMAR, RejectKind.QUEUE_FULL} and RejectKind.GRAMMAR in kinds
        assert await compiler.compile(regex("a"))


async def test_a_dead_process_of_trials_is_replaced() -> None:
    async with compiling() as compiler:
        await compiler.compile(regex("a"))
        [server] = trial_servers()
        asked = asyncio.gather(refusal(compiler, *MINUTES_TO_COMPILE["a multiple of a large number"]))
        await asyncio.sleep(0.2)
        os.kill(server.pid, signal.SIGKILL)
        [refused] = await asked
        assert refused.kind is RejectKind.UNAVAILABLE
        assert await compiler.compile(regex("b"))


async def test_nothing_is_compiled_before_the_vocabulary_is_known() -> None:
    async with compiling(limit_s=1, knows=False) as compiler:
        assert (await refusal(compiler, "regex", "a")).kind is not RejectKind.GRAMMAR
        waiting = asyncio.gather(compiler.compile(regex("b")))
        await asyncio.sleep(0.05)
        compiler.know(VOCABULARY, prepares=False)
        assert await waiting
