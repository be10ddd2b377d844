"""The masks of a step: collected on the loop, computed in a thread while the device computes what they are for."""

from typing import Any, NamedTuple

import numpy as np

from ..ipc.plan import TokenMasks
from .constraint import Constraint, ConstraintFailed
from .request import Sequence
from .sequence_table import SequenceTable

Array = np.ndarray[Any, Any]


class MaskedRow(NamedTuple):
    """A row that waits for its mask, and the tokens that were committed since its last one."""

    row: int
    sequence: Sequence
    constraint: Constraint
    tokens: list[int]


class Masks(NamedTuple):
    """What a MaskWork gives: masks for the worker, and the sequences whose constraint failed, with the reason."""

    masks: TokenMasks
    failed: list[tuple[Sequence, str]]


class MaskWork:
    """One step's masks, to be computed once and in the order of the steps: `run` takes the sequences' grammars on."""

    def __init__(self, step: int, rows: list[MaskedRow]) -> None:
        self.step = step
        self._rows = rows

    @classmethod
    def collect(cls, step: int, rows: Array, table: SequenceTable, num_tokens: int) -> "MaskWork":
        """For those of `rows`, masked in this step, whose sequences still live. All tokens before it are committed.
        `num_tokens` of the model's vocabulary.
        """
        found = []
        for row in rows[table.alive[rows]].tolist():
            sequence = table.sequences[row]
            assert sequence is not None
            constraint = sequence.constraint(num_tokens)
            begin = int(table.prompt_length[row]) + constraint.num_given
            tokens = table.history[row, begin : table.known[row]].tolist()
            constraint.num_given += len(tokens)
            found.append(MaskedRow(row, sequence, constraint, tokens))
        return cls(step, found)

    def run(self) -> Masks:
        """Masks by row. A row whose constraint failed has none: its request fails before its token counts."""
        width = max((masked.constraint.num_words for masked in self._rows), default=0)
        words = np.zeros((len(self._rows), width), np.uint32)
        failed: list[tuple[Sequence, str]] = []
        rows: list[int] = []
        for masked in self._rows:
            try:
                masked.constraint.advance(masked.tokens)
                masked.constraint.fill(words[len(rows)])
                rows.append(masked.row)
            except ConstraintFailed as failure:
                words[len(rows)] = 0
                failed.append((masked.sequence, str(failure)))
        masks = TokenMasks(
            step=np.array([self.step], np.int64), rows=np.array(rows, np.int32), words=words[: len(rows)].reshape(-1)
        )
        return Masks(masks, failed)
