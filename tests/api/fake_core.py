"""An engine core of the tests: answers Submit from a script, over the real sockets, in a thread of its own."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from trimaran.ipc.channel import RouterChannel, ipc_address
from trimaran.ipc.frontend_messages import (
    TO_CORE,
    Abort,
    EngineState,
    Failed,
    FailKind,
    FinishReason,
    FinishSequence,
    Hello,
    InfoReply,
    InfoRequest,
    MetricsReply,
    MetricsRequest,
    OutputColumns,
    Outputs,
    Rejected,
    RejectKind,
    Report,
    Submit,
    ToCore,
)
from trimaran.ipc.metrics import MetricFamily, MetricKind, Sample
from trimaran.ipc.server_info import EngineLimits, ServerInfo

Script = Callable[[Submit, list[int], int], list[int]]


def echo(submit: Submit, prompt: list[int], choice: int) -> list[int]:
    """The prompt again, then the model's end."""
    return [*prompt, *submit.sampling.end_token_ids[:1]]


@dataclass
class Sequence:
    """One choice being answered."""

    tokens: list[int]
    position: int = 0
    live: bool = True


@dataclass
class Live:
    """One request being answered."""

    peer: bytes
    submit: Submit
    prompt: list[int]
    sequences: list[Sequence]
    is_new: bool = True


@dataclass
class FakeCore:
    """Set the fields from the test at any time; all traffic is in the core's own thread."""

    run_directory: Path
    limits: EngineLimits
    script: Script = echo
    step_s: float = 0.001
    ready: bool = True
    reason: str = "loading weights"
    draining: bool = False
    cached_tokens: int = 0
    fail_after: int | None = None
    reject: tuple[RejectKind, str, float | None] | None = None
    max_queued: int | None = None
    paused: bool = False
    silent: bool = False
    incarnation: int = 1
    submits: list[Submit] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    finishes: list[FinishSequence] = field(default_factory=list)
    reports: dict[tuple[int, int], tuple[MetricFamily, ...]] = field(default_factory=dict)
    terminals: list[int] = field(default_factory=list)
    hellos: list[Hello] = field(default_factory=list)
    live: dict[int, Live] = field(default_factory=dict)
    num_tokens: int = 0

    def start(self) -> "FakeCore":
        """Bind and run."""
        self.address = ipc_address(str(self.run_directory), "core-frontends")
        self._stopping = threading.Event()
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(started)), daemon=True)
        self._thread.start()
        assert started.wait(5)
        return self

    def stop(self) -> None:
        """End the thread; what is live gets nothing more."""
        self._stopping.set()
        self._thread.join(5)

    async def _run(self, started: threading.Event) -> None:
        context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._peers: set[bytes] = set()
        self._channel = RouterChannel(context, self.address, TO_CORE, self._receive)
        self._channel.open()
        started.set()
        last_state_s = 0.0
        while not self._stopping.is_set():
            if time.monotonic() - last_state_s > 0.2 and not self.silent:
                last_state_s = time.monotonic()
                for peer in self._peers:
                    self._channel.send(peer, self.state())
            if not self.paused:
                self._step()
            await asyncio.sleep(self.step_s)
        self._channel.close()
        context.term()

    def state(self) -> EngineState:
        """What the heartbeat says."""
        return EngineState(
            self.incarnation, 0, self.ready, "" if self.ready else self.reason, self.limits, draining=self.draining
        )

    def _receive(self, peer: bytes, message: ToCore, frames: list[bytes]) -> None:
        match message:
            case Hello():
                self._peers.add(peer)
                self.hellos.append(message)
                if not self.silent:
                    self._channel.send(peer, self.state())
            case Submit():
                self._submit(peer, message, np.frombuffer(frames[0], np.int32).tolist())
            case Abort():
                self.aborts.append(message.request_id)
                self._end_choices(message.request_id, None)
            case FinishSequence():
                self.finishes.append(message)
                self._end_choices(message.request_id, message.choice)
            case Report():
                self.reports[message.index, message.incarnation] = message.families
            case MetricsRequest():
                self._channel.send(peer, MetricsReply(message.query_id, self._families()))
            case InfoRequest():
                self._channel.send(peer, InfoReply(message.query_id, ServerInfo(generation=0, limits=self.limits)))

    def _submit(self, peer: bytes, submit: Submit, prompt: list[int]) -> None:
        if submit.core_incarnation != self.incarnation:
            return
        self.submits.append(submit)
        self.prompts.append(prompt)
        reject = self.reject
        if self.max_queued is not None and len(self.live) >= self.max_queued:
            reject = (RejectKind.QUEUE_FULL, f"the queue holds {self.max_queued} requests", 2.0)
        if reject is not None:
            self.terminals.append(submit.request_id)
            self._channel.send(peer, Rejected(submit.request_id, *reject))
            return
        sequences = [Sequence(self.script(submit, prompt, choice)) for choice in range(submit.num_sequences)]
        self.live[submit.request_id] = Live(peer, submit, prompt, sequences)

    def _end_choices(self, request_id: int, choice: int | None) -> None:
        live = self.live.get(request_id)
        if live is None:
            return
        rows = [
            (request_id, index, None, FinishReason.ABORTED)
            for index, sequence in enumerate(live.sequences)
            if sequence.live and choice in (None, index)
        ]
        for _, index, _, _ in rows:
            live.sequences[index].live = False
        self._send(live.peer, [(live, *row[1:]) for row in rows])

    def _step(self) -> None:
        by_peer: dict[bytes, list[Any]] = {}
        for live in list(self.live.values()):
            for choice, sequence in enumerate(live.sequences):
                if sequence.live:
                    token, reason = self._advance(live, sequence)
                    by_peer.setdefault(live.peer, []).append((live, choice, token, reason))
        for peer, rows in by_peer.items():
            self._send(peer, rows)
        if self.fail_after is not None:
            self._fail_old()

    def _fail_old(self) -> None:
        for id, live in list(self.live.items()):
            if max(sequence.position for sequence in live.sequences) >= (self.fail_after or 0):
                del self.live[id]
                self.terminals.append(id)
                self._channel.send(live.peer, Failed((id,), FailKind.STEP_FAILED, "the step ran out of memory"))

    def _advance(self, live: Live, sequence: Sequence) -> tuple[int, FinishReason]:
        sampling = live.submit.sampling
        token = sequence.tokens[min(sequence.position, len(sequence.tokens) - 1)]
        sequence.position += 1
        self.num_tokens += 1
        reason = FinishReason.NONE
        if sequence.position > sampling.min_tokens:
            if token in sampling.end_token_ids:
                reason = FinishReason.END_TOKEN
            elif token in sampling.stop_token_ids:
                reason = FinishReason.STOP_TOKEN
        if reason is FinishReason.NONE and sequence.position >= sampling.max_tokens:
            reason = FinishReason.LENGTH
        sequence.live = reason is FinishReason.NONE
        return token, reason

    def _send(self, peer: bytes, rows: list[Any]) -> None:
        if not rows:
            return
        columns: dict[str, list[Any]] = {name: [] for name in OutputColumns.SCHEMA.names}
        last_row = {row[0].submit.request_id: position for position, row in enumerate(rows)}
        for position, (live, choice, token, reason) in enumerate(rows):
            id = live.submit.request_id
            done = last_row[id] == position and not any(sequence.live for sequence in live.sequences)
            columns["request_ids"].append(id)
            columns["choices"].append(choice)
            columns["token_counts"].append(0 if token is None else 1)
            columns["finish"].append(reason)
            columns["done"].append(done)
            columns["cached_tokens"].append(self.cached_tokens if live.is_new else 0)
            self._add_logprobs(columns, live, token)
            live.is_new = False
            if token is not None:
                columns["token_ids"].append(token)
            if done:
                self.live.pop(id, None)
                self.terminals.append(id)
        if not any(columns["logprob_counts"]):
            columns["logprob_counts"] = []
        if not any(columns["prompt_counts"]):
            columns["prompt_counts"] = columns["prompt_top_counts"] = []
        dtypes = dict(zip(OutputColumns.SCHEMA.names, OutputColumns.SCHEMA.dtypes, strict=True))
        packed = OutputColumns(**{name: np.array(values, dtypes[name]) for name, values in columns.items()})
        self._channel.send(peer, Outputs(), OutputColumns.SCHEMA.pack(packed.values()))

    def _add_logprobs(self, columns: dict[str, list[Any]], live: Live, token: int | None) -> None:
        sampling = live.submit.sampling
        wants = sampling.num_logprobs is not None and token is not None
        columns["logprob_counts"].append(1 if wants else 0)
        if wants:
            columns["logprobs"].append(-0.25)
            columns["ranks"].append(1)
            columns["top_counts"].append(sampling.num_logprobs)
            columns["top_ids"] += [token, *range(10, 9 + (sampling.num_logprobs or 0))][: sampling.num_logprobs]
            columns["top_logprobs"] += [-0.25, *[float("-inf")] * 32][: sampling.num_logprobs]
        wants_prompt = live.is_new and sampling.num_prompt_logprobs is not None
        positions = len(live.prompt) - 1 if wants_prompt else 0
        num_top = sampling.num_prompt_logprobs or 0
        columns["prompt_counts"].append(positions)
        columns["prompt_top_counts"].append(num_top if wants_prompt else 0)
        columns["prompt_logprobs"] += [-1.5] * positions
        columns["prompt_ranks"] += [2] * positions
        columns["prompt_top_ids"] += list(range(10, 10 + num_top)) * positions
        columns["prompt_top_logprobs"] += [-0.5] * num_top * positions

    def _families(self) -> tuple[MetricFamily, ...]:
        own = (
            MetricFamily(
                "generation_tokens_total", MetricKind.COUNTER, "Tokens.", (Sample({}, float(self.num_tokens)),)
            ),
            MetricFamily("num_requests_running", MetricKind.GAUGE, "Running.", (Sample({}, float(len(self.live))),)),
            MetricFamily(
                "time_to_first_token_seconds",
                MetricKind.HISTOGRAM,
                "TTFT.",
                (Sample({}, 1.5, (1, 2, 3)),),
                (0.1, 1.0),
            ),
        )
        return (*own, *(family for families in self.reports.values() for family in families))
