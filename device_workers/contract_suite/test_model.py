"""A tiny model, through the engine of a worker: the same tokens as on the processor, in float32."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from ..platforms.contract import Clause, Platform
from .judgement import clause, demand, told, violated
from .subject import Subject
from .tiny_model import Continuation, generate, start

_NUM_TOKENS = 24
_LOGPROB_LIMIT = 2e-4
"""Float32 on two devices, three layers deep."""
_TIE = 1e-4
_LEFT_BYTES = 1 << 20


@clause("model.tokens")
def test_token_for_token(platform: Platform, subject: Subject, tmp_path: Path) -> None:
    """Prompts in chunks, decodes beside them, blocks in no order; log-probabilities are compared too."""
    subject.backend.synchronize()
    try:
        ours = generate(start(platform.name, tmp_path / "device"), _NUM_TOKENS)
    except Exception as error:
        violated(f"the engine failed on this device: {told(error)}")
    expected = generate(start("cpu", tmp_path / "processor"), _NUM_TOKENS)
    for got, right in zip(ours, expected, strict=True):
        _compare(got, right)


def _compare(got: Continuation, right: Continuation) -> None:
    """Up to a tie, where either token is right and what follows is another text."""
    begin = len(right.tokens) - _NUM_TOKENS
    for place in range(_NUM_TOKENS):
        apart = abs(got.logprobs[place] - right.logprobs[place])
        if got.tokens[begin + place] != right.tokens[begin + place]:
            is_tie = apart <= _TIE
            where = f"sequence {right.row}, token {place} of {_NUM_TOKENS}"
            says = f"{got.tokens[begin + place]} instead of {right.tokens[begin + place]}"
            demand(is_tie, f"{where}: the device says {says}, as the processor has it")
            return
        demand(apart <= _LOGPROB_LIMIT, f"sequence {right.row}, token {place}: log-probabilities differ by {apart:.2g}")


@clause("model.memory_returned", Clause.MEMORY_ACCOUNTING)
def test_an_engine_that_is_gone_holds_nothing(platform: Platform, subject: Subject, tmp_path: Path) -> None:
    """Judged on the second one: the first leaves what the vendor's libraries keep for good."""
    held = []
    for _ in range(2):
        engine = start(platform.name, tmp_path / "device")
        del engine
        gc.collect()
        held.append(subject.held_bytes())
    left = held[1] - held[0]
    demand(
        left <= _LEFT_BYTES, f"an engine was made and dropped, and {left} bytes more are held than after the last one"
    )
    demand(bool((subject.read(subject.put(torch.ones(3))) == 1).all()), "after it the device is not usable")
