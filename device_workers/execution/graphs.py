"""Recorded passes: one for every size where a recording allows that, else one for each bucket of decodes.

A bucket holds steps in which every sequence has one token; a smaller step is padded with sequences that touch no slot
of the cache. Its recording goes on to the logits and the likeliest token of each sequence, which is all that most
requests ask. All other steps run eagerly.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial

from ...ipc.facts import Decision
from ..models.decoder import StepTensors
from ..platforms.contract import Backend, Graph, NotSupported
from .batch import BatchBuilder, StepSize

_MIB = 1 << 20


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
        self._buckets: dict[int, Graph] = {}
        self._sizes: list[int] = []
        self.num_bytes = 0

    @property
    def are_captured(self) -> bool:
        return self._whole is not None or bool(self._buckets)

    def drop(self) -> None:
        """Nothing is replayed from now on: the kernels that were recorded no longer serve."""
        self._whole = None
        self._buckets, self._sizes = {}, []

    def bucket(self, num_tokens: int, num_sequences: int) -> int:
        """The size that a step is padded to: its bucket, or its own."""
        if num_tokens != num_sequences or not self._sizes or num_sequences > self._sizes[-1]:
            return num_sequences
        return self._sizes[bisect_left(self._sizes, num_sequences)]

    def find(self, size: StepSize) -> Graph | None:
        """The recording of a step of this (padded) size."""
        if self._whole is not None:
            return self._whole
        return self._buckets.get(size.num_sequences) if size.is_decode else None

    def capture(self, buckets: tuple[int, ...], max_tokens: int) -> Decision:
        """Record what serves, and say what that was; a recording that the device refuses leaves it all eager."""
        try:
            if self._backend.graphs_take_any_size:
                return self._capture_whole(max_tokens)
            return self._capture_buckets(tuple(size for size in sorted(buckets) if size <= self._max_rows))
        except NotSupported as refusal:
            self.drop()
            return Decision(name="graphs", value="eager", reason=str(refusal))

    def _capture_whole(self, max_tokens: int) -> Decision:
        tensors = self._builder.tensors(self._builder.whole(max_tokens))
        self._whole = self._backend.capture_graph(lambda: self._forward(tensors))
        value = f"one recording of {self._whole.num_launches} launches"
        return Decision(name="graphs", value=value, reason="all kernels of the forward pass can be recorded")

    def _capture_buckets(self, sizes: tuple[int, ...]) -> Decision:
        if not sizes:
            return Decision(name="graphs", value="eager", reason="no sizes were negotiated to be captured")
        began, before = time.monotonic(), self._backend.memory_facts().free_bytes
        captured = {}
        for size in reversed(sizes):  # the largest first: smaller ones find its memory in the pool
            idle = self._builder.idle(size)
            self._to_tokens(idle)  # compiles what is not compiled yet, which a recording could not
            captured[size] = self._backend.capture_graph(partial(self._to_tokens, idle))
        self._buckets, self._sizes = captured, list(sizes)
        self.num_bytes = max(0, before - self._backend.memory_facts().free_bytes)
        took_s = time.monotonic() - began
        return Decision(
            name="graphs",
            value=f"{len(sizes)} of decodes of up to {sizes[-1]} sequences",
            reason=f"captured in {took_s:.1f} s, {self.num_bytes / _MIB:.0f} MiB; other steps run eagerly",
        )
