"""Recorded passes: one for every size where a recording allows that, else one for each of some sizes.

Most sizes are buckets of decodes, in which every sequence has one token; the others hold prompts beside decodes. A
smaller step is padded: tokens that touch no slot of the cache, sequences without tokens. A recording goes on to the
likeliest token of each sequence that samples, which is all that most requests ask. Recording stops where measuring says
that it does not pay: from there on the device is busy for longer than the launches take.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial

from ...ipc.facts import Decision
from ..models.decoder import StepTensors
from ..platforms.contract import Backend, Graph, NotSupported
from .batch import BatchBuilder, StepSize

_MIB = 1 << 20
_MIXED_TOKENS = (32, 64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192)
"""Tokens of the steps that hold prompts too: a step is padded by a third at most, from 256 tokens on."""
_MIXED_SHARE = 2  # such a step has room for one sequence for so many of its tokens
_LEAST_GAIN = 1.1  # of a replay over launching the same work


class Graphs:
    """What can be replayed. `forward` computes a step's hidden states from its inputs, with no progress told;
    `to_tokens` goes on from the inputs of that size to the likeliest token of each sequence.
    """

    def __init__(
        self,
        backend: Backend,
        builder: BatchBuilder,
        max_rows: int,
        forward: Callable[[StepTensors], None],
        to_tokens: Callable[[StepSize], None],
    ) -> None:
        self._backend = backend
        self._builder = builder
        self._max_rows = max_rows
        self._forward = forward
        self._to_tokens = to_tokens
        self.hold_tokens = not backend.graphs_take_any_size
        self._whole: Graph | None = None
        self._graphs: dict[StepSize, Graph] = {}
        self._decodes: list[int] = []
        self._mixed: list[StepSize] = []
        self.num_bytes = 0

    @property
    def are_captured(self) -> bool:
        return self._whole is not None or bool(self._graphs)

    def drop(self) -> None:
        """Nothing is replayed from now on: the kernels that were recorded no longer serve."""
        self._whole = None
        self._graphs, self._decodes, self._mixed = {}, [], []

    def padded(self, size: StepSize) -> StepSize:
        """The size that a step is padded to: that of a recording, or its own."""
        if size.is_decode:
            place = bisect_left(self._decodes, size.num_sequences)
            if place < len(self._decodes):
                return StepSize(self._decodes[place], self._decodes[place])
        for recorded in self._mixed:
            if size.num_tokens <= recorded.num_tokens and size.num_sequences <= recorded.num_sequences:
                return recorded
        return size

    def find(self, size: StepSize) -> Graph | None:
        """The recording of a step of this (padded) size."""
        return self._graphs.get(size) if self._whole is None else self._whole

    def capture(self, buckets: tuple[int, ...], max_tokens: int) -> Decision:
        """Record what serves, and say what that was; a recording that the device refuses leaves it all eager."""
        try:
            if self._backend.graphs_take_any_size:
                return self._capture_whole(max_tokens)
            return self._capture_sizes(sorted(size for size in buckets if size <= self._max_rows), max_tokens)
        except NotSupported as refusal:
            self.drop()
            return Decision(name="graphs", value="eager", reason=str(refusal))

    def _capture_whole(self, max_tokens: int) -> Decision:
        tensors = self._builder.tensors(self._builder.whole(max_tokens))
        self._whole = self._backend.capture_graph(lambda: self._forward(tensors))
        value = f"one recording of {self._whole.num_launches} launches"
        return Decision(name="graphs", value=value, reason="all kernels of the forward pass can be recorded")

    def _capture_sizes(self, decodes: list[int], max_tokens: int) -> Decision:
        if not decodes:
            return Decision(name="graphs", value="eager", reason="no sizes were negotiated to be captured")
        began, before = time.monotonic(), self._backend.memory_facts().free_bytes
        captured: dict[StepSize, Graph] = {}
        for sequences in reversed(decodes):  # the largest first: smaller ones find its memory in the pool
            size = StepSize(sequences, sequences)
            captured[size] = self._captured(size)
        gain = self._gain(size, captured[size])
        if gain < _LEAST_GAIN:
            reason = f"replaying a decode gains {gain - 1:.0%} over launching it, less than {_LEAST_GAIN - 1:.0%}"
            return Decision(name="graphs", value="eager", reason=reason)
        limit = "the step's limit of tokens"
        for size in self._mixed_sizes(max_tokens):
            captured[size] = self._captured(size)
            if (gain := self._gain(size, captured[size])) < _LEAST_GAIN:
                limit = f"at {size.num_tokens} tokens a replay gains {max(0.0, gain - 1):.0%}"
                break
        self._graphs, self._decodes = captured, decodes
        self._mixed = [size for size in captured if not size.is_decode]
        self.num_bytes = max(0, before - self._backend.memory_facts().free_bytes)
        mixed = f", {len(self._mixed)} with prompts of up to {self._mixed[-1].num_tokens} tokens" if self._mixed else ""
        took_s = time.monotonic() - began
        return Decision(
            name="graphs",
            value=f"{len(decodes)} of decodes of up to {decodes[-1]} sequences{mixed}",
            reason=f"captured in {took_s:.1f} s, {self.num_bytes / _MIB:.0f} MiB; other steps run eagerly ({limit})",
        )

    def _mixed_sizes(self, max_tokens: int) -> Iterator[StepSize]:
        for num_tokens in _MIXED_TOKENS:
            if num_tokens <= max_tokens:
                yield StepSize(num_tokens, min(num_tokens // _MIXED_SHARE, self._max_rows))

    def _captured(self, size: StepSize) -> Graph:
        idle = self._builder.idle(size)
        self._to_tokens(idle)  # compiles what is not compiled yet, which a recording could not
        return self._backend.capture_graph(partial(self._to_tokens, idle))

    def _gain(self, size: StepSize, graph: Graph) -> float:
        """How many times longer a step of this size takes when its work is launched than when it is replayed."""
        launched = self._seconds(lambda: self._to_tokens(size))
        replayed = self._seconds(lambda: graph.replay(size.num_tokens, size.num_sequences, None))
        return launched / max(replayed, 1e-9)

    def _seconds(self, run: Callable[[], None]) -> float:
        """The shorter of two runs, from an idle device to an idle one."""
        taken = []
        for _ in range(2):
            self._backend.synchronize()
            began = time.perf_counter()
            run()
            self._backend.synchronize()
            taken.append(time.perf_counter() - began)
        return min(taken)
