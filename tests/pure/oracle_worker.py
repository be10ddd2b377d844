"""A worker that is right by construction and suspicious of every plan: the judge of the engine core's tests.

Its "model" is a running hash of the tokens it reads through the block table, so a block shared wrongly, reused too
early or not yet computed gives a wrong token, and a plan that breaks the protocol fails at once.
"""

import numpy as np

from trimaran.ipc.plan import ResultFlag, StepPlan, StepResult, WorkFlag, hash_tokens

_MASK = (1 << 61) - 1


def mix(state: int, token: int) -> int:
    """The content hash after one more token."""
    return ((state ^ (token + 0x9E3779B9)) * 0x100000001B3 + 0x2545F491) & _MASK


def next_token(state: int, choice: int, vocab_size: int) -> int:
    """The token that follows content `state`."""
    return (state ^ (choice * 0x51ED2701)) % vocab_size


def expected_tokens(prompt: list[int], choice: int, vocab_size: int, num: int) -> list[int]:
    """What a request must be answered with when nothing ends it earlier."""
    state = 0
    for token in prompt:
        state = mix(state, token)
    outputs = []
    for _ in range(num):
        token = next_token(state, choice, vocab_size)
        outputs.append(token)
        state = mix(state, token)
    return outputs


class Row:
    """What a worker keeps of one row."""

    def __init__(self, request_id: int, choice: int) -> None:
        self.request_id = request_id
        self.choice = choice
        self.table: list[int] = []
        self.last_token: int | None = None


class OracleWorker:
    """Runs plans one after another."""

    def __init__(self, *, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.rows: dict[int, Row] = {}
        self.states = np.zeros(num_blocks * block_size, np.int64)
        self.last_step = 0
        self.invalid_request_ids: set[int] = set()

    def run(self, plan: StepPlan) -> StepResult:
        """Apply the plan and answer it."""
        step = int(plan.step[0])
        assert step == self.last_step + 1, f"step {step} came after {self.last_step}"
        self.last_step = step
        self._change_rows(plan)
        return self._work(plan, step)

    def _change_rows(self, plan: StepPlan) -> None:
        for row in plan.freed_rows.tolist():
            assert row in self.rows, f"row {row} was freed and is not in use"
            del self.rows[row]
        for row, request_id, choice in zip(
            plan.new_rows.tolist(), plan.request_ids.tolist(), plan.choices.tolist(), strict=True
        ):
            assert row not in self.rows, f"row {row} was given away while in use"
            self.rows[row] = Row(request_id, choice)
        taken = 0
        for row, first, count in zip(
            plan.block_rows.tolist(), plan.block_firsts.tolist(), plan.block_counts.tolist(), strict=True
        ):
            table = self.rows[row].table
            assert len(table) == first, f"row {row} has {len(table)} blocks and was granted more from {first}"
            table.extend(plan.block_ids[taken : taken + count].tolist())
            taken += count
        assert taken == len(plan.block_ids)

    def _work(self, plan: StepPlan, step: int) -> StepResult:
        rows, tokens, flags = [], [], []
        cursor = 0
        assert len(set(plan.rows.tolist())) == len(plan.rows), "a row appears twice in one plan"
        for row_id, start, count, flag in zip(
            plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), plan.flags.tolist(), strict=True
        ):
            row = self.rows[row_id]
            if flag & WorkFlag.FROM_DEVICE:
                assert count == 1 and row.last_token is not None
                inputs = [row.last_token]
            else:
                inputs = plan.token_ids[cursor : cursor + count].tolist()
                cursor += count
                assert len(inputs) == count > 0
            state = int(self.states[self._slot(row, start - 1)]) if start else 0
            for offset, token in enumerate(inputs):
                state = mix(state, token)
                self.states[self._slot(row, start + offset)] = state
            if flag & WorkFlag.SAMPLES:
                row.last_token = next_token(state, row.choice, self.vocab_size)
                rows.append(row_id)
                tokens.append(row.last_token)
                flags.append(ResultFlag.INVALID if row.request_id in self.invalid_request_ids else 0)
        assert cursor == len(plan.token_ids)
        row_column, token_column = np.array(rows, np.int32), np.array(tokens, np.int32)
        return StepResult(
            step=np.array([step], np.int64),
            rows=row_column,
            token_ids=token_column,
            flags=np.array(flags, np.uint8),
            tokens_hash=hash_tokens(row_column, token_column),
            seconds=np.zeros(4),
        )

    def _slot(self, row: Row, position: int) -> int:
        block = position // self.block_size
        assert block < len(row.table), f"position {position} lies beyond the row's {len(row.table)} blocks"
        return row.table[block] * self.block_size + position % self.block_size
