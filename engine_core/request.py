"""The client's ask, and its sequences: one token stream each (n asks n)."""

from enum import Enum

import numpy as np

from ..ipc.sampling import Grammar, Sampling
from .constraint import Constraint, constraint_of
from .grammar_compiler import CompiledGrammar


class State(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # not seated: new, preempted, or a follower of a sequence that still computes the prompt
    PREFILL = "prefill"  # seated, some known tokens not yet planned
    DECODE = "decode"  # seated, one token per step
    POOLING = "pooling"  # seated, all tokens planned: it waits for its vector
    PREEMPTING = "preempting"  # chosen to give its blocks back once the plans that name it have returned
    ENDED = "ended"


Key = tuple[int, int, int]


class Request:
    """What a frontend submitted. `owner` names the frontend to the core; `order` is its place in line."""

    __slots__ = (
        "adapter",
        "arrival_s",
        "cached_tokens",
        "compiled",
        "first_scheduled_s",
        "grammar",
        "order",
        "owner",
        "pools",
        "priority",
        "prompt",
        "request_id",
        "root",
        "sampling",
        "sequences",
        "shared_blocks",
    )

    def __init__(
        self,
        *,
        request_id: int,
        owner: int,
        order: int,
        prompt: np.ndarray,
        sampling: Sampling,
        num_sequences: int = 1,
        priority: int = 0,
        arrival_s: float = 0.0,
        root: bytes = b"",
        pools: bool = False,
        grammar: Grammar | None = None,
    ) -> None:
        self.request_id = request_id
        self.owner = owner
        self.order = order
        self.prompt = prompt
        self.sampling = sampling
        self.priority = priority
        self.arrival_s = arrival_s
        self.root = root
        self.pools = pools
        self.grammar = grammar
        self.compiled: CompiledGrammar | None = None  # set before the request stands in line
        self.cached_tokens: int | None = None
        self.first_scheduled_s: float | None = None
        self.shared_blocks: list[int] = []  # the prompt's full blocks, held for followers that are not seated yet
        self.sequences = [Sequence(self, choice) for choice in range(num_sequences)]

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def is_over(self) -> bool:
        """No sequence of it lives any more."""
        return all(sequence.state is State.ENDED for sequence in self.sequences)

    @property
    def is_masked(self) -> bool:
        """Whether its tokens are chosen under masks."""
        sampling = self.sampling
        has_rules = sampling.allowed_token_ids or sampling.bad_token_ids
        return bool(has_rules or self.grammar is not None or sampling.thought is not None)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Those that end it; where a grammar is complete its end tokens do, though the user asked to ignore them."""
        return self.sampling.end_token_ids if self.compiled is None else self.compiled.end_ids

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens were asked for."""
        return self.sampling.num_prompt_logprobs is not None


class Sequence:
    """One token stream. While seated, its counts live in the sequence table's columns at `row`."""

    __slots__ = (
        "_constraint",
        "blocks",
        "bypassed",
        "choice",
        "hashes",
        "is_queued",
        "key",
        "last_token_s",
        "num_preemptions",
        "prompt_logprobs_sent",
        "request",
        "reserved",
        "row",
        "saved",
        "state",
    )

    def __init__(self, request: Request, choice: int) -> None:
        self.request = request
        self.choice = choice
        self.key: Key = (request.priority, request.order, choice)
        self.state = State.WAITING
        self.row = -1
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []
        self.saved: np.ndarray | None = None  # committed tokens of a preempted sequence
        self.last_token_s = 0.0  # when a preempted sequence had its last token
        self.num_preemptions = 0
        self.prompt_logprobs_sent = 0
        self.bypassed = 0  # later arrivals that were seated before it because it did not fit
        self.is_queued = False
        self.reserved = False  # blocks for its whole possible length are set aside
        self._constraint: Constraint | None = None

    @property
    def tokens(self) -> np.ndarray:
        """The committed tokens of a sequence that is not seated, int32."""
        return self.request.prompt if self.saved is None else self.saved

    def constraint(self, num_tokens: int) -> Constraint:
        """Its own, kept over preemptions. `num_tokens` of the vocabulary."""
        if self._constraint is None:
            request = self.request
            assert request.is_masked and (request.grammar is None or request.compiled is not None)
            self._constraint = constraint_of(request.sampling, request.compiled, request.grammar, num_tokens)
        return self._constraint

    def __repr__(self) -> str:
        return f"<Sequence {self.request.request_id}:{self.choice} {self.state.value} row {self.row}>"
