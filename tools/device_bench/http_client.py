"""Closed-loop streaming load on /v1/completions over raw asyncio sockets, in several processes so that the client is
not the limit. Knows nothing of who answers: chunked server-sent events of the OpenAI completions route.

    python -m trimaran.tools.device_bench.http_client PORT MODEL CLIENTS REQUESTS PROMPT_TOKENS OUTPUT_TOKENS

Prints one line of JSON; exit code 1 when an answer was bad. TTFT, ITL and TPOT count events that carry text; ITL is the
gap between two of them, TPOT is first to last by the tokens that `usage` names.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from trimaran.tools.device_bench.samples import in_ms, percentile

_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_LONGEST_LINE = 1 << 20


@dataclass
class Answer:
    """One request's. Times of the performance counter; `text_s` has one per event with text."""

    began_s: float
    ended_s: float = 0.0
    text_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_empty: int = 0
    error: str = ""


@dataclass(frozen=True)
class Share:
    """One process's part of a load."""

    port: int
    model: str
    clients: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    ids: tuple[int, int]
    seed: int

    def bodies(self) -> list[bytes]:
        generator = random.Random(self.seed)
        fields = {
            "model": self.model,
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        prompts = ([generator.randrange(*self.ids) for _ in range(self.prompt_tokens)] for _ in range(self.requests))
        return [json.dumps({**fields, "prompt": prompt}).encode() for prompt in prompts]


class _Connection:
    """One client's: kept open from request to request, opened anew after an answer that was bad."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, body: bytes) -> Answer:
        answer = Answer(time.perf_counter())
        try:
            reader, writer = await self._open()
            answer.began_s = time.perf_counter()
            writer.write(_HEAD % len(body) + body)
            await _read(reader, answer)
        except (OSError, EOFError, ValueError, KeyError) as error:
            answer.error = repr(error)
        answer.ended_s = time.perf_counter()
        if answer.error:
            self.close()
        return answer

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=_LONGEST_LINE)
        return self._reader, self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


async def _read(reader: asyncio.StreamReader, answer: Answer) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if head.split(b" ", 2)[1] != b"200" or b"chunked" not in head.lower():
        answer.error = (head[:200] + await reader.read(300)).decode(errors="replace")
        return
    rest = b""
    while size := await _chunk_size(reader):
        data = await reader.readexactly(size + 2)
        now = time.perf_counter()
        *events, rest = (rest + data[:-2]).split(b"\n\n")
        for event in events:
            _take(event.strip(), now, answer)
    await reader.readexactly(2)


async def _chunk_size(reader: asyncio.StreamReader) -> int:
    line = await reader.readline()
    if not line:
        raise EOFError("the connection ended in the middle of an answer")
    return int(line.split(b";")[0], 16)


def _take(event: bytes, now: float, answer: Answer) -> None:
    if not event.startswith(b"data:") or event.endswith(b"[DONE]"):
        return
    bare = event.replace(b" ", b"")
    if bare.startswith(b'data:{"error"'):
        answer.error = event.decode(errors="replace")[:500]
    elif b'"choices":[]' in bare:
        answer.num_tokens = json.loads(event[5:])["usage"]["completion_tokens"]
    elif b'"text":""' in bare:
        answer.num_empty += 1
    else:
        answer.text_s.append(now)


async def _client(port: int, bodies: list[bytes], answers: list[Answer]) -> None:
    connection = _Connection(port)
    while bodies:
        answers.append(await connection.ask(bodies.pop()))
    connection.close()


async def _drive(share: Share, bodies: list[bytes]) -> list[Answer]:
    answers: list[Answer] = []
    await asyncio.gather(*[_client(share.port, bodies, answers) for _ in range(share.clients)])
    return answers


def _process(share: Share, start: Any, told: Any) -> None:
    bodies = share.bodies()
    told.put(None)
    start.wait()
    try:
        answers = asyncio.run(_drive(share, bodies))
    except Exception as error:  # a bug: it must be told, or the parent waits for ever
        now = time.perf_counter()
        answers = [Answer(now, now, error=repr(error))]
    told.put(answers)


def drive(shares: list[Share]) -> list[Answer]:
    """Every answer, from a process for each share; all start together."""
    context = multiprocessing.get_context("fork")
    start, told = context.Event(), context.Queue()
    processes = [context.Process(target=_process, args=(share, start, told)) for share in shares]
    for process in processes:
        process.start()
    for _ in processes:
        told.get()
    start.set()
    answers = [answer for _ in processes for answer in told.get()]
    for process in processes:
        process.join()
    return answers


def figures(answers: list[Answer], output_tokens: int) -> dict[str, Any]:
    """Of the good answers; `num_bad` and `first_bad` tell of the others."""
    bad = [_fault(answer, output_tokens) for answer in answers if _fault(answer, output_tokens)]
    good = [answer for answer in answers if not _fault(answer, output_tokens)]
    found: dict[str, Any] = {"requests": len(good), "num_bad": len(bad), "first_bad": bad[0] if bad else ""}
    if not good:
        return found
    took_s = max(answer.ended_s for answer in good) - min(answer.began_s for answer in good)
    num_tokens = sum(answer.num_tokens for answer in good)
    found |= {
        "s": round(took_s, 3),
        "req_s": round(len(good) / took_s, 2),
        "out_tok_s": round(num_tokens / took_s, 1),
        "tokens": num_tokens,
        "chunks": sum(len(answer.text_s) for answer in good),
        "empty_chunks": sum(answer.num_empty for answer in good),
    }
    times = {
        "ttft": [answer.text_s[0] - answer.began_s for answer in good],
        "itl": [later - one for answer in good for one, later in itertools.pairwise(answer.text_s)],
        "tpot": [(answer.text_s[-1] - answer.text_s[0]) / max(1, answer.num_tokens - 1) for answer in good],
        "e2e": [answer.ended_s - answer.began_s for answer in good],
    }
    for name, values in times.items():
        found[f"{name}_ms_median"] = in_ms(percentile(values, 0.5)) if values else None
        found[f"{name}_ms_p99"] = in_ms(percentile(values, 0.99)) if values else None
    return found


def _fault(answer: Answer, output_tokens: int) -> str:
    if answer.error:
        return answer.error
    if not answer.text_s:
        return "an answer without text"
    if answer.num_tokens != output_tokens:
        return f"{answer.num_tokens} tokens came, {output_tokens} were asked for"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("model")
    for name in ("clients", "requests", "prompt_tokens", "output_tokens"):
        parser.add_argument(name, type=int)
    parser.add_argument("--processes", type=int, help="default: one for 16 clients, 8 at most")
    parser.add_argument("--ids", type=int, nargs=2, default=(1000, 120_000), help="range of the prompts' token ids")
    asked = parser.parse_args()
    num_processes = asked.processes or min(8, max(1, asked.clients // 16))
    seed = int(time.time() * 1e3)
    shares = [
        Share(
            port=asked.port,
            model=asked.model,
            clients=asked.clients // num_processes,
            requests=asked.requests // num_processes,
            prompt_tokens=asked.prompt_tokens,
            output_tokens=asked.output_tokens,
            ids=tuple(asked.ids),
            seed=seed + number,
        )
        for number in range(num_processes)
    ]
    found = figures(drive(shares), asked.output_tokens)
    given = {name: getattr(asked, name) for name in ("clients", "prompt_tokens", "output_tokens")}
    print(json.dumps(given | found))
    return 1 if found["num_bad"] or not found["requests"] else 0


if __name__ == "__main__":
    sys.exit(main())
