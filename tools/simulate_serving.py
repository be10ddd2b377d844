#!/usr/bin/env python3
"""Closed-loop clients against the real engine, on a device that is only a model: what a policy of scheduling does to
time to first token and throughput, in seconds and without hardware.

    python tools/simulate_serving.py --shape m2 --clients 256 --prompt-step 0.035

Time is the simulation's own: arrivals, plans and results are events. A decode takes what was measured on an H200
(docs/performance/h200.md), prompt tokens a fixed time each on top, the way in and out of HTTP a few milliseconds. So
figures compare policies; they are not a machine's. M1 has the shape of Qwen3-0.6B, M2 that of Llama-3.1-8B.
"""

import argparse
import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from trimaran.engine_core.engine import Engine
from trimaran.engine_core.request import Request
from trimaran.engine_core.statistics import Statistics
from trimaran.ipc.facts import QueueOrdering
from trimaran.ipc.plan import StepPlan, StepResult, WorkFlag, hash_tokens
from trimaran.ipc.sampling import Sampling
from trimaran.ipc.server_info import EngineLimits

VOCAB, BLOCK_SIZE = 32_000, 64
HTTP_IN_S, HTTP_EACH_S, HTTP_OUT_S = 0.003, 0.0003, 0.001
"""From a client to the core, at least and for each of many at once; and back."""
HOST_S, RESULT_S = 0.0005, 0.0004
"""From a plan to the device's work where it was idle; from its end to the core."""


@dataclass(frozen=True)
class Device:
    """Seconds of a step: decodes by their number, and each token of a prompt."""

    decodes: dict[int, float]
    mixed_s: float
    token_s: float

    def step_s(self, num_decodes: int, num_prompt_tokens: int) -> float:
        decodes_s = (
            float(np.interp(num_decodes, list(self.decodes), list(self.decodes.values()))) if num_decodes else 0.0
        )
        if not num_prompt_tokens:
            return decodes_s
        return 1.1 * max(self.mixed_s, decodes_s) + self.token_s * num_prompt_tokens


DEVICES = {
    "m1": Device({1: 0.62e-3, 32: 1.2e-3, 256: 3.2e-3, 512: 5.6e-3}, 1.4e-3, 3.4e-6),
    "m2": Device({1: 4.06e-3, 32: 4.75e-3, 256: 9.7e-3, 512: 17e-3}, 5e-3, 27e-6),
}


@dataclass
class Simulation:
    """One run. A client asks again when its answer ends, until `num_left` is used up."""

    engine: Engine
    device: Device
    num_prompt_tokens: int
    num_output_tokens: int
    num_left: int
    asked_s: list[float] = field(default_factory=list)
    first_s: dict[int, float] = field(default_factory=dict)
    last_s: dict[int, float] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self._events: list[tuple[float, int, Any]] = []
        self._numbers = count()
        self._frontend_free_s = self._device_free_s = 0.0

    def run(self, num_clients: int) -> None:
        for _ in range(num_clients):
            self._ask(0.0)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            if isinstance(event, int):
                self._submit(event, now)
            else:
                self._return(*event, now)
            while self.engine.can_plan() and (plan := self.engine.plan(now)) is not None:
                self._start(plan, now)

    @property
    def waits_s(self) -> np.ndarray:
        """Time to first token of each request."""
        return np.array([self.first_s[number] - asked_s for number, asked_s in enumerate(self.asked_s)])

    @property
    def tokens_per_s(self) -> float:
        return len(self.asked_s) * self.num_output_tokens / max(self.last_s.values())

    def _at(self, when: float, event: Any) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def _ask(self, now: float) -> None:
        if len(self.asked_s) == self.num_left:
            return
        self._frontend_free_s = max(self._frontend_free_s, now) + HTTP_EACH_S
        self._at(max(now + HTTP_IN_S, self._frontend_free_s), len(self.asked_s))
        self.asked_s.append(now)

    def _submit(self, number: int, now: float) -> None:
        prompt = np.random.default_rng(number).integers(1, VOCAB - 1, self.num_prompt_tokens).astype(np.int32)
        sampling = Sampling(max_tokens=self.num_output_tokens, seed=number)
        root = self.engine.cache.root(salt=None, adapter=None)
        request = Request(
            request_id=number, owner=1, order=number, prompt=prompt, sampling=sampling, arrival_s=now, root=root
        )
        self.engine.submit(request)

    def _start(self, plan: StepPlan, now: float) -> None:
        num_decodes = int((plan.counts == 1).sum())
        took_s = self.device.step_s(num_decodes, int(plan.counts.sum()) - num_decodes)
        self._device_free_s = max(now + HOST_S, self._device_free_s) + took_s
        self._at(self._device_free_s + RESULT_S, (plan, took_s))

    def _return(self, plan: StepPlan, took_s: float, now: float) -> None:
        self.num_steps += 1
        rows = plan.rows[(plan.flags & WorkFlag.SAMPLES) != 0]
        tokens = (rows % (VOCAB - 2) + 1).astype(np.int32)
        result = StepResult(
            step=plan.step,
            rows=rows,
            token_ids=tokens,
            flags=np.zeros(len(rows), np.uint8),
            tokens_hash=hash_tokens(rows, tokens),
            seconds=np.array([HOST_S / 4, HOST_S / 2, HOST_S / 4, max(took_s - HOST_S, 0.0)]),
        )
        for _, columns in self.engine.commit(result, now).outputs:
            for number, num_tokens, is_done in zip(
                columns.request_ids, columns.token_counts, columns.done, strict=True
            ):
                self._hear(int(number), int(num_tokens), now + HTTP_OUT_S)
                if is_done:
                    self._ask(now + HTTP_OUT_S)

    def _hear(self, number: int, num_tokens: int, now: float) -> None:
        if num_tokens and number in self.first_s:
            self.gaps_s.append(now - self.last_s[number])
        elif num_tokens:
            self.first_s[number] = now
        self.last_s[number] = now


def simulate(
    shape: str,
    *,
    clients: int,
    requests: int,
    prompt_tokens: int = 512,
    output_tokens: int = 128,
    prompt_step_s: float,
    max_batched_tokens: int = 16_384,
    ordering: QueueOrdering = QueueOrdering.LONG_FIRST,
) -> Simulation:
    """A run to its end, with a KV cache that holds every client's request."""
    length = prompt_tokens + output_tokens
    limits = EngineLimits(
        max_model_len=length,
        vocab_size=VOCAB,
        max_num_seqs=max(256, clients),
        num_blocks=(clients + 1) * -(-length // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        dtype="bfloat16",
    )
    engine = Engine(
        limits,
        max_batched_tokens=max_batched_tokens,
        prefix_caching=False,
        statistics=Statistics(),
        prompt_step_s=prompt_step_s,
        is_asynchronous=True,
        ordering=ordering,
    )
    simulation = Simulation(engine, DEVICES[shape], prompt_tokens, output_tokens, requests)
    simulation.run(clients)
    return simulation


def main() -> None:
    """Print one line of figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(DEVICES), default="m1")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--prompt-step", type=float, default=0.05, help="seconds; see `trimaran explain`")
    parser.add_argument("--max-batched-tokens", type=int, default=16_384)
    parser.add_argument("--queue-ordering", choices=[*QueueOrdering], default=QueueOrdering.LONG_FIRST)
    asked = parser.parse_args()
    run = simulate(
        asked.shape,
        clients=asked.clients,
        requests=asked.requests,
        prompt_tokens=asked.prompt_tokens,
        output_tokens=asked.output_tokens,
        prompt_step_s=asked.prompt_step,
        max_batched_tokens=asked.max_batched_tokens,
        ordering=QueueOrdering(asked.queue_ordering),
    )
    waits_ms, gaps_ms = run.waits_s * 1e3, np.array(run.gaps_s) * 1e3
    print(
        f"{run.tokens_per_s:.0f} tok/s in {run.num_steps} steps; "
        f"TTFT median {np.median(waits_ms):.0f}, p99 {np.percentile(waits_ms, 99):.0f} ms; "
        f"ITL median {np.median(gaps_ms):.2f}, p99 {np.percentile(gaps_ms, 99):.1f} ms"
    )


if __name__ == "__main__":
    main()
