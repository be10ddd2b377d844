"""Constrained sequences without processes: the real engine, real grammars, and the null model, which obeys masks.

The order is the one of service: a step is computed while the one before is committed, and its masks follow from that
commit. Plans and masks travel packed.
"""

import json
from collections import deque
from typing import Any

import numpy as np

from trimaran.device_workers.platforms.null_model import NullModel, NullScript
from trimaran.engine_core.engine import Engine
from trimaran.engine_core.grammar_compiler import CompiledGrammar
from trimaran.engine_core.grammar_limits import compiled
from trimaran.engine_core.grammar_text import grammar_text
from trimaran.engine_core.request import Request
from trimaran.engine_core.statistics import Statistics
from trimaran.engine_core.token_bytes import TokenBytes
from trimaran.ipc.frontend_messages import FailKind, FinishReason
from trimaran.ipc.plan import StepPlan, TokenMasks
from trimaran.ipc.sampling import Grammar, Sampling
from trimaran.ipc.server_info import EngineLimits

WORDS = [b'{"', b'":', b'","', b'"}', b"true", b"false", b"null", b"  ", b"\n  ", "é".encode(), "🙂".encode(), b"yes"]
END, OTHER_END, CONTROL = 300, 301, 302
TOKENS = [*(bytes([byte]) for byte in range(256)), *WORDS]
TOKENS += [b""] * (END - len(TOKENS)) + [b"<end>", b"<turn>", b"<control>"]
VOCABULARY = TokenBytes.of(TOKENS, control_ids=(END, OTHER_END, CONTROL), end_ids=(END, OTHER_END))
TOKENIZER = VOCABULARY.tokenizer()
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "é", 5, None]}, "maxItems": 3},
        "is_new": {"type": "boolean"},
    },
    "required": ["name", "tags", "is_new"],
    "additionalProperties": False,
}


def made(kind: str, source: Any) -> CompiledGrammar:
    """Compiled here and now. `source`: as text, or to be written as JSON."""
    text = source if isinstance(source, str) else json.dumps(source)
    matcher = compiled(TOKENIZER, grammar_text(kind, text))
    assert not matcher.is_error(), matcher.get_error()
    return CompiledGrammar(matcher, VOCABULARY)


def text_of(tokens: list[int]) -> bytes:
    """The bytes of an answer, without its end token."""
    return b"".join(TOKENS[token] for token in tokens if token not in (END, OTHER_END))


class Driver:
    """An engine over the null model; `answers` and `finishes` by request id and choice."""

    def __init__(
        self, *, num_blocks: int = 400, num_rows: int = 16, budget: int = 64, script: NullScript | None = None
    ) -> None:
        limits = EngineLimits(
            max_model_len=512,
            vocab_size=len(TOKENS),
            max_num_seqs=num_rows,
            num_blocks=num_blocks,
            block_size=4,
            dtype="float32",
        )
        self.engine = Engine(
            limits, max_batched_tokens=budget, prefix_caching=True, statistics=Statistics(), first_horizon=4
        )
        self.model = NullModel(
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=512,
            vocab_size=len(TOKENS),
            script=script or NullScript(low_id=0),
        )
        self.answers: dict[tuple[int, int], list[int]] = {}
        self.finishes: dict[tuple[int, int], FinishReason] = {}
        self.failures: dict[int, str] = {}
        self.num_masked_steps = 0
        self.now = 0.0
        self._num_submitted = 0
        self._plans: deque[bytes] = deque()

    def submit(
        self,
        prompt: list[int],
        grammar: CompiledGrammar | None,
        *,
        n: int = 1,
        starts_after: tuple[int, ...] = (),
        **sampling: Any,
    ) -> Request:
        number = self._num_submitted
        self._num_submitted += 1
        given = {"max_tokens": 200, "seed": number, "end_token_ids": (END, OTHER_END)} | sampling
        request = Request(
            request_id=number,
            owner=1,
            order=number,
            prompt=np.array(prompt, np.int32),
            sampling=Sampling(**given),
            num_sequences=n,
            root=self.engine.cache.root(salt=None, adapter=None),
            grammar=None if grammar is None else Grammar(kind="", source="", starts_after=starts_after),
        )
        request.compiled = grammar
        self.engine.submit(request)
        return request

    def step(self) -> None:
        """Plan what may be in flight; compute the oldest with its masks, and commit it."""
        while self.engine.can_plan() and (plan := self.engine.plan(self.now)) is not None:
            self._plans.append(bytes(plan.SCHEMA.pack(plan.values())))
        if not self._plans:
            return
        plan = StepPlan.unpack(self._plans.popleft())
        self.model.forward(plan)
        result = self.model.sample(self._masks(int(plan.step[0])))
        self.now += 0.01
        self._hear(self.engine.commit(result, self.now))

    def _masks(self, step: int) -> TokenMasks | None:
        work = self.engine.masks_due()
        if work is None:
            return None
        assert work.step == step and self.engine.masks_due() is None, "masks are due once"
        self.num_masked_steps += 1
        masks, failed = work.run()
        for sequence, reason in failed:
            if not sequence.request.is_over:
                self.engine.fail(sequence.request, FailKind.GRAMMAR, reason)
                self.failures[sequence.request.request_id] = reason
        return TokenMasks.unpack(bytes(masks.SCHEMA.pack(masks.values())))

    def _hear(self, news: Any) -> None:
        for _, columns in news.outputs:
            keys = list(zip(columns.request_ids.tolist(), columns.choices.tolist(), strict=True))
            for key, token, finish in zip(keys, columns.token_ids.tolist(), columns.finish.tolist(), strict=True):
                assert key not in self.finishes, "news of a sequence that had ended"
                self.answers.setdefault(key, []).append(token)
                if finish:
                    self.finishes[key] = FinishReason(finish)

    def run(self, max_steps: int = 5000) -> None:
        """Until all is over; then every block is free."""
        for _ in range(max_steps):
            if not self.engine.requests and not self._plans:
                break
            self.step()
        assert not self.engine.requests
        assert self.engine.pool.num_held == 0

    def text(self, number: int, choice: int = 0) -> bytes:
        return text_of(self.answers[number, choice])
