"""What streaming costs a frontend process: tokens per CPU-second, of all its threads and of its Python thread.

    python tools/bench_streaming.py --model DIRECTORY [--streams 256] [--tokens 400] [--step-ms 10]

Three processes: an engine core that sends one random token per stream and step, a real frontend, and a client on raw
sockets. CPU times are read from /proc between the first step and the last; nothing else is counted.
"""

import argparse
import asyncio
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from trimaran.ipc.channel import RouterChannel, ipc_address
from trimaran.ipc.configuration import FrontendConfiguration
from trimaran.ipc.control import Begin, Listening, ModelKnown
from trimaran.ipc.frontend_messages import (
    TO_CORE,
    EngineLimits,
    EngineState,
    FinishReason,
    Hello,
    OutputColumns,
    Outputs,
    Submit,
    ToCore,
)
from trimaran.ipc.process import child_arguments, create_control_link

_TICKS = os.sysconf("SC_CLK_TCK")


class TokenSource:
    """A core that waits for all streams, then gives each one token per step."""

    def __init__(self, address: str, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._ids: list[int] = []
        self._peer = b""
        self._context: zmq.Context[Any] = zmq.Context()
        self._channel = RouterChannel(self._context, address, TO_CORE, self._receive)

    def _receive(self, peer: bytes, message: ToCore, _: list[bytes]) -> None:
        self._peer = peer
        if isinstance(message, Submit):
            self._ids.append(message.request_id)
        if isinstance(message, Hello):
            self._beat()

    def _beat(self) -> None:
        limits = EngineLimits(
            max_model_len=8192, vocab_size=49152, max_num_seqs=1024, num_blocks=9999, block_size=16, dtype="float32"
        )
        self._channel.send(self._peer, EngineState(1, 0, True, "", limits))

    async def run(self, frontend: int) -> dict[str, float]:
        """Serve the streams once; returns the CPU seconds that the frontend took meanwhile."""
        self._channel.open()
        while len(self._ids) < self._arguments.streams:
            await asyncio.sleep(0.05)
            if self._peer:
                self._beat()
        await asyncio.sleep(0.5)
        random = np.random.default_rng(0)
        before, began_s = cpu_seconds(frontend), time.monotonic()
        for step in range(self._arguments.tokens):
            self._step(random, is_last=step == self._arguments.tokens - 1)
            if step % 50 == 0:
                self._beat()
            due_s = began_s + (step + 1) * self._arguments.step_ms / 1000
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        await asyncio.sleep(0.3)
        after, took_s = cpu_seconds(frontend), time.monotonic() - began_s - 0.3
        self._channel.close()
        self._context.term()
        return {"all_s": after[0] - before[0], "python_s": after[1] - before[1], "took_s": took_s}

    def _step(self, random: np.random.Generator, *, is_last: bool) -> None:
        count = len(self._ids)
        columns = OutputColumns(
            request_ids=np.array(self._ids, np.int64),
            choices=np.zeros(count, np.int32),
            token_counts=np.ones(count, np.int32),
            finish=np.full(count, FinishReason.LENGTH if is_last else FinishReason.NONE, np.uint8),
            done=np.full(count, is_last, np.uint8),
            cached_tokens=np.zeros(count, np.int32),
            token_ids=random.integers(300, 49000, count).astype(np.int32),
        )
        self._channel.send(self._peer, Outputs(), OutputColumns.SCHEMA.pack(columns.values()))


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Of the whole process and of its main thread."""

    def read(path: str) -> float:
        fields = Path(path).read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    return read(f"/proc/{pid}/stat"), read(f"/proc/{pid}/task/{pid}/stat")


def read_streams(arguments: argparse.Namespace) -> None:
    """The client: opens all streams, reads them to the end, prints what it counted."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "ignore_eos": True, "max_tokens": 4000}
    ).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    poll = select.epoll()
    streams: dict[int, socket.socket] = {}
    tails: dict[int, bytes] = {}
    for _ in range(arguments.streams):
        stream = socket.create_connection(("127.0.0.1", arguments.port))
        stream.sendall(request)
        streams[stream.fileno()], tails[stream.fileno()] = stream, b""
        poll.register(stream, select.EPOLLIN)
    num_events = num_done = 0
    last: dict[int, float] = {}
    longest_gap_s = 0.0
    while num_done < arguments.streams:
        for fd, _ in poll.poll():
            data = streams[fd].recv(1 << 18)
            now_s = time.monotonic()
            longest_gap_s = max(longest_gap_s, now_s - last.get(fd, now_s))
            last[fd] = now_s
            num_events += data.count(b'"delta":{"content"')
            ending = tails[fd][-20:] + data
            tails[fd] = data
            if b"[DONE]" in ending or not data:
                assert data, "a stream was closed before its end"
                num_done += 1
                poll.unregister(fd)
    print(json.dumps({"events": num_events, "longest_gap_s": longest_gap_s}))


async def measure(arguments: argparse.Namespace, directory: str) -> None:
    """One run."""
    address = ipc_address(directory, "core")
    source = TokenSource(address, arguments)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    configuration = FrontendConfiguration(
        index=0,
        num_frontends=1,
        incarnation=1,
        core_address=address,
        host="127.0.0.1",
        port=port,
        served_model_name="bench",
    )
    link, theirs = create_control_link()
    death, keep = os.pipe()
    command = [sys.executable, "-m", "trimaran.frontend.http.process", *child_arguments(theirs.fileno(), death)]
    frontend = subprocess.Popen(command, pass_fds=(theirs.fileno(), death))  # noqa: ASYNC220
    theirs.close()
    link.send(Begin(configuration))
    message, _ = link.receive()
    assert isinstance(message, Listening)
    link.send(ModelKnown(arguments.model, arguments.model))
    task = asyncio.get_running_loop().create_task(source.run(frontend.pid))
    await asyncio.sleep(2.0)
    client = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, __file__, "--client", "--port", str(port), "--streams", str(arguments.streams)],
        stdout=subprocess.PIPE,
    )
    cpu = await task
    assert client.stdout is not None
    counted = json.loads(await asyncio.to_thread(client.stdout.read))
    frontend.kill()
    frontend.wait()
    os.close(keep)
    num_tokens = arguments.streams * arguments.tokens
    ideal = 1000 / arguments.step_ms * arguments.streams
    print(
        json.dumps(
            {
                "streams": arguments.streams,
                "tokens": num_tokens,
                "events": counted["events"],
                "tokens_per_second": round(num_tokens / cpu["took_s"]),
                "share_of_ideal": round(num_tokens / cpu["took_s"] / ideal, 3),
                "longest_gap_ms": round(counted["longest_gap_s"] * 1000, 1),
                "tokens_per_cpu_second": round(num_tokens / cpu["all_s"]),
                "tokens_per_python_second": round(num_tokens / cpu["python_s"]),
            }
        )
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model directory; only its tokenizer is read")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="per stream")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        read_streams(arguments)
        return
    assert arguments.model, "--model is needed"
    with tempfile.TemporaryDirectory(prefix="tri") as directory:
        asyncio.run(measure(arguments, directory))


if __name__ == "__main__":
    main()
