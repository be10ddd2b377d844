"""What may follow in one sequence: tokens in, the mask of the next one out."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..ipc.conditions import TrimaranError
from ..ipc.sampling import Grammar, Sampling, ThoughtLimit
from .grammar_compiler import CompiledGrammar
from .grammar_limits import mask_bytes

Array = np.ndarray[Any, Any]


class ConstraintFailed(TrimaranError):
    """The grammar grew beyond its limits on the way, or the vocabulary cannot write it."""


class TokenSet:
    """Some token ids, to be taken out of masks and put into them. No ids: nothing is done."""

    __slots__ = ("_bits", "_others", "_places")

    def __init__(self, ids: Iterable[int]) -> None:
        bits: dict[int, int] = {}
        for id in ids:
            bits[id >> 5] = bits.get(id >> 5, 0) | 1 << (id & 31)
        self._places = np.array(list(bits), np.int64)
        self._bits = np.array(list(bits.values()), np.uint32)
        self._others = ~self._bits

    def take_from(self, words: Array) -> None:
        if len(self._places):
            words[self._places] &= self._others

    def add_to(self, words: Array) -> None:
        if len(self._places):
            words[self._places] |= self._bits


class GrammarWalk:
    """A sequence's place in its grammar.

    While the answer is still free (before `starts_after`) it may not end. Afterwards it may end where the grammar says
    so: not before `min_tokens`, and with the end token ignored not at all, as long as the grammar can go on.
    """

    __slots__ = (
        "_end_id",
        "_ends",
        "_free",
        "_holds_back",
        "_matcher",
        "_min_tokens",
        "_num_outputs",
        "_num_tokens",
        "_opener",
        "_stops",
        "_tail",
        "num_words",
    )

    def __init__(
        self,
        grammar: CompiledGrammar,
        sampling: Sampling,
        starts_after: tuple[int, ...] = (),
        opened_by: int | None = None,
    ) -> None:
        self.num_words = num_words(grammar.num_tokens)
        self._matcher = grammar.matcher.deep_copy()
        self._end_id = grammar.end_ids[0]
        self._ends = TokenSet(grammar.end_ids)
        self._stops = TokenSet(id for id in sampling.stop_token_ids if id < grammar.num_tokens)
        self._min_tokens = sampling.min_tokens
        self._holds_back = not sampling.end_token_ids  # the user asked to ignore them
        self._free = starts_after
        self._opener = opened_by  # None once the first token has decided
        self._tail: list[int] = []
        self._num_outputs = 0
        self._num_tokens = grammar.num_tokens

    def advance(self, tokens: list[int]) -> None:
        """These were sampled. Raises ConstraintFailed."""
        self._num_outputs += len(tokens)
        if self._opener is not None and tokens:
            if tokens[0] != self._opener:
                self._free = ()
            self._opener = None
        if self._free:
            tokens = self._after_free(tokens)
        if tokens and not self._matcher.consume_tokens(tokens):
            raise ConstraintFailed(_reason(self._matcher.get_error()))

    def fill(self, words: Array) -> None:
        """Set the bits of the tokens that may come next. Raises ConstraintFailed."""
        words = words[: self.num_words]
        if self._opener is not None:
            self._fill_bound(words)
            TokenSet((self._opener,)).add_to(words)
        elif self._free:
            self._fill_free(words)
        else:
            self._fill_bound(words)

    def _fill_bound(self, words: Array) -> None:
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise ConstraintFailed(_reason(self._matcher.get_error()))
        may_end = int(words[self._end_id >> 5]) >> (self._end_id & 31) & 1
        is_short = self._num_outputs < self._min_tokens
        self._ends.take_from(words)
        can_go_on = bool(words.any())
        if is_short and can_go_on:
            self._drop_stops(words)
        if may_end and not is_short:
            self._stops.add_to(words)
        if may_end and not (can_go_on and (is_short or self._holds_back)):
            self._ends.add_to(words)
        elif not can_go_on:
            raise ConstraintFailed("no token of this model's vocabulary goes on as the grammar wants")

    def _drop_stops(self, words: Array) -> None:
        """Clear the user's stop tokens, unless the grammar leaves nothing else."""
        kept = words.copy()
        self._stops.take_from(words)
        if not words.any():
            words[:] = kept

    def _after_free(self, tokens: list[int]) -> list[int]:
        """Those behind the mark; none while it has not come."""
        mark = list(self._free)
        seen = self._tail + tokens
        for end in range(len(mark), len(seen) + 1):
            if seen[end - len(mark) : end] == mark:
                self._free, self._tail = (), []
                return seen[end:]
        self._tail = seen[max(len(seen) - len(mark) + 1, 0) :]
        return []

    def _fill_free(self, words: Array) -> None:
        allow_all(words, self._num_tokens)
        self._ends.take_from(words)
        if self._num_outputs < self._min_tokens:
            self._stops.take_from(words)


class TokenRules:
    """Which tokens a request allows, and which runs of them it does not."""

    __slots__ = ("_allowed", "_bad", "_longest", "_runs", "_tail")

    def __init__(self, sampling: Sampling, num_tokens: int) -> None:
        self._allowed: Array | None = None
        if sampling.allowed_token_ids:
            self._allowed = np.zeros(num_words(num_tokens), np.uint32)
            TokenSet(sampling.allowed_token_ids).add_to(self._allowed)
        self._bad = TokenSet(run[0] for run in sampling.bad_token_ids if len(run) == 1)
        self._runs = [(list(run[:-1]), TokenSet(run[-1:])) for run in sampling.bad_token_ids if len(run) > 1]
        self._longest = max((len(before) for before, _ in self._runs), default=0)
        self._tail: list[int] = []

    def advance(self, tokens: list[int]) -> None:
        """These were sampled."""
        if self._longest:
            self._tail = (self._tail + tokens)[-self._longest :]

    def narrow(self, words: Array) -> None:
        """Clear the bits of what is not allowed now. Raises ConstraintFailed."""
        if self._allowed is not None:
            words[: len(self._allowed)] &= self._allowed
            words[len(self._allowed) :] = 0
        self._bad.take_from(words)
        for before, last in self._runs:
            if self._tail[-len(before) :] == before:
                last.take_from(words)
        if not words.any():
            raise ConstraintFailed("allowed_token_ids and bad_words leave no token that may come next")


class Thought:
    """How far a sequence is in its reasoning."""

    __slots__ = ("_end", "_end_id", "_is_over", "_num_left", "_start_id")

    def __init__(self, limit: ThoughtLimit) -> None:
        self._num_left = limit.max_tokens
        self._start_id = limit.start_id  # None once it has begun
        self._end_id = limit.end_id
        self._end = TokenSet((limit.end_id,))
        self._is_over = False

    @property
    def must_end(self) -> bool:
        """Nothing but its end may come now."""
        return self._num_left <= 0 and self._start_id is None and not self._is_over

    def advance(self, tokens: list[int]) -> None:
        """These were sampled."""
        for token in tokens:
            if self._is_over:
                return
            if self._start_id is not None:
                self._is_over, self._start_id = token != self._start_id, None
            else:
                self._is_over = token == self._end_id
                self._num_left -= 1

    def fill(self, words: Array) -> None:
        """The end alone."""
        self._end.add_to(words)


class Constraint:
    """All that says which tokens one sequence may take. Touched by the mask thread alone, but for `num_given`, the
    outputs that were given to it, which is the loop's.
    """

    __slots__ = ("_num_tokens", "_rules", "_thought", "_walk", "num_given", "num_words")

    def __init__(
        self, walk: GrammarWalk | None, rules: TokenRules | None, thought: Thought | None, num_tokens: int
    ) -> None:
        """`num_tokens` of the model's vocabulary, of which a grammar may know fewer."""
        self.num_given = 0
        self.num_words = num_words(num_tokens) if walk is None else max(num_words(num_tokens), walk.num_words)
        self._walk = walk
        self._rules = rules
        self._thought = thought
        self._num_tokens = num_tokens

    def advance(self, tokens: list[int]) -> None:
        """These were sampled. Raises ConstraintFailed."""
        if self._walk is not None:
            self._walk.advance(tokens)
        if self._rules is not None:
            self._rules.advance(tokens)
        if self._thought is not None:
            self._thought.advance(tokens)

    def fill(self, words: Array) -> None:
        """Set the bits of the tokens that may come next; `words` is one row of zeros. Raises ConstraintFailed."""
        if self._thought is not None and self._thought.must_end:
            self._thought.fill(words)
            return
        if self._walk is not None:
            self._walk.fill(words)
        else:
            allow_all(words, self._num_tokens)
        if self._rules is not None:
            self._rules.narrow(words)


def constraint_of(
    sampling: Sampling, compiled: CompiledGrammar | None, grammar: Grammar | None, num_tokens: int
) -> Constraint:
    """Of a new sequence."""
    walk = None
    if compiled is not None:
        assert grammar is not None
        walk = GrammarWalk(compiled, sampling, grammar.starts_after, grammar.opened_by)
    has_rules = sampling.allowed_token_ids or sampling.bad_token_ids
    rules = TokenRules(sampling, num_tokens) if has_rules else None
    thought = None if sampling.thought is None else Thought(sampling.thought)
    return Constraint(walk, rules, thought, num_tokens)


def allow_all(words: Array, num_tokens: int) -> None:
    """Set the bit of every token, and none beyond."""
    whole, used = divmod(num_tokens, 32)
    words[:whole] = 0xFFFFFFFF
    words[whole:] = 0
    if used:
        words[whole] = (1 << used) - 1


def num_words(num_tokens: int) -> int:
    """uint32 words of one mask."""
    return mask_bytes(num_tokens) // 4


def _reason(error: str) -> str:
    return " ".join(error.split())[:400] or "the grammar allows nothing more"
