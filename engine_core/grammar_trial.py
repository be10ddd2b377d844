"""The process in which grammars are tried: `python -m trimaran.engine_core.grammar_trial`, started by the core.

A grammar from a client may take for ever to compile, take all memory, or overflow the stack and so end its process.
Here each is tried in a process of its own, forked from this one, which holds the vocabulary and does nothing else. What
passes is compiled again by the core, for which the trial has shown how long it takes and that it ends.
"""

import argparse
import contextlib
import os
import resource
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from llguidance import LLTokenizer
from msgspec import Struct

from ..ipc.messages import Decoder, MalformedMessage, encode
from ..ipc.process import die_with_forking_thread, die_with_parent
from .grammar_limits import TRIAL_MEMORY_BYTES, TRIAL_STACK_BYTES, compiled
from .grammar_text import grammar_text
from .token_bytes import TokenBytes

_MAX_REASON_CHARACTERS = 400
_HEAD_BYTES = 4


class Ask(Struct, frozen=True, tag="ask"):
    """Try this grammar, for so long at most."""

    number: int
    kind: str
    source: str
    limit_s: float


class Verdict(Struct, frozen=True, tag="verdict"):
    """`grammar` in llguidance's own form, or the reason for no; memory that the trial took."""

    number: int
    grammar: str | None = None
    reason: str = ""
    num_bytes: int = 0


ASK: Decoder[Ask] = Decoder(Ask)
VERDICT: Decoder[Verdict] = Decoder(Verdict)


def framed(message: Struct) -> bytes:
    """A message with its length before it."""
    packed = encode(message)
    return len(packed).to_bytes(_HEAD_BYTES, "little") + packed


def read_exactly(descriptor: int, num_bytes: int) -> bytes:
    """Raises EOFError where the other end is closed before."""
    parts = []
    while num_bytes:
        part = os.read(descriptor, min(num_bytes, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


class _Trial:
    """A running process: its verdict comes through `descriptor`."""

    def __init__(self, ask: Ask, pid: int, descriptor: int) -> None:
        self.ask = ask
        self.pid = pid
        self.descriptor = descriptor
        self.ends_s = time.monotonic() + ask.limit_s
        self.said = b""


class TrialServer:
    """Reads asks from one descriptor and writes verdicts to another, as trials end."""

    def __init__(self, tokenizer: LLTokenizer, asks: int, verdicts: int) -> None:
        self._tokenizer = tokenizer
        self._asks, self._verdicts = asks, verdicts
        self._trials: dict[int, _Trial] = {}

    def run(self) -> None:
        """Until the core closes its end."""
        while True:
            readable, _, _ = select.select([self._asks, *self._trials], [], [], self._wait_s())
            for descriptor in readable:
                if descriptor == self._asks:
                    self._begin()
                else:
                    self._hear(self._trials[descriptor])
            for trial in [trial for trial in self._trials.values() if trial.ends_s <= time.monotonic()]:
                self._end(trial, Verdict(trial.ask.number, reason=_too_slow(trial.ask)))

    def _wait_s(self) -> float | None:
        if not self._trials:
            return None
        return max(min(trial.ends_s for trial in self._trials.values()) - time.monotonic(), 0.0)

    def _begin(self) -> None:
        length = int.from_bytes(read_exactly(self._asks, _HEAD_BYTES), "little")
        ask = ASK.decode(read_exactly(self._asks, length))
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            _try(self._tokenizer, ask, theirs)
        os.close(theirs)
        self._trials[ours] = _Trial(ask, pid, ours)

    def _hear(self, trial: _Trial) -> None:
        part = os.read(trial.descriptor, 1 << 20)
        if part:
            trial.said += part
            return
        try:
            verdict = VERDICT.decode(trial.said)
        except MalformedMessage:  # it died on the way
            reason = "it is nested too deeply, or takes too much memory to compile; make it simpler"
            verdict = Verdict(trial.ask.number, reason=reason)
        self._end(trial, verdict)

    def _end(self, trial: _Trial, verdict: Verdict) -> None:
        del self._trials[trial.descriptor]
        os.close(trial.descriptor)
        with contextlib.suppress(ProcessLookupError):
            os.kill(trial.pid, signal.SIGKILL)
        os.waitpid(trial.pid, 0)
        packed = memoryview(framed(verdict))
        while packed:
            packed = packed[os.write(self._verdicts, packed) :]


def _too_slow(ask: Ask) -> str:
    return f"it takes more than {ask.limit_s:g} s to compile; make it simpler"


def _try(tokenizer: LLTokenizer, ask: Ask, descriptor: int) -> NoReturn:
    """The forked process: it tells its verdict, or dies."""
    die_with_forking_thread()
    if sys.platform == "linux":
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + TRIAL_MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silence = os.open(os.devnull, os.O_RDWR)
    for inherited in (0, 1, 2):  # what a dying library says is not for the log
        os.dup2(silence, inherited)
    verdicts: list[Verdict] = []
    threading.stack_size(TRIAL_STACK_BYTES)
    thread = threading.Thread(target=lambda: verdicts.append(_verdict(tokenizer, ask)))
    thread.start()
    thread.join()
    if verdicts:
        packed = memoryview(encode(verdicts[0]))
        while packed:
            packed = packed[os.write(descriptor, packed) :]
    os._exit(0)


def _verdict(tokenizer: LLTokenizer, ask: Ask) -> Verdict:
    before = _resident_bytes()
    try:
        grammar = grammar_text(ask.kind, ask.source)
    except MemoryError:
        raise
    except Exception as error:  # whatever a library says of a client's text is the client's matter
        return Verdict(ask.number, reason=_short(str(error) or type(error).__name__))
    matcher = compiled(tokenizer, grammar)
    warnings = matcher.get_grammar_warnings() if ask.kind != "lark" else []
    if matcher.is_error() or warnings:
        return Verdict(ask.number, reason=_short(matcher.get_error() or "; ".join(warnings)))
    num_bytes = max(_resident_bytes() - before, 0) + len(grammar)
    del matcher  # taking it apart needs a stack too
    return Verdict(ask.number, grammar, num_bytes=num_bytes)


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _short(reason: str) -> str:
    """One line that names the keyword."""
    line = " ".join(reason.split())
    return line if len(line) <= _MAX_REASON_CHARACTERS else line[: _MAX_REASON_CHARACTERS - 3] + "..."


def arguments(death_pipe: int, vocabulary: int, parent: int) -> list[str]:
    """By which `main` finds its descriptors; the core passes both in `pass_fds`."""
    return ["--death-pipe", str(death_pipe), "--vocabulary", str(vocabulary), "--parent", str(parent)]


def _parsed() -> Any:
    parser = argparse.ArgumentParser()
    for name in ("--death-pipe", "--vocabulary", "--parent"):
        parser.add_argument(name, type=int, required=True)
    return parser.parse_args()


def main() -> None:
    """The process: asks on standard input, verdicts on standard output."""
    given = _parsed()
    die_with_parent(given.death_pipe, given.parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    tokenizer = TokenBytes.read(given.vocabulary).tokenizer()
    with contextlib.suppress(EOFError):
        TrialServer(tokenizer, 0, 1).run()


if __name__ == "__main__":
    main()
