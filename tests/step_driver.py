"""Drives a step engine in this process with plans, as the engine core would: for tests of the device side alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trimaran.device_workers.boot import describe, open_engine
from trimaran.device_workers.execution.contract import LoadFacts, StepEngine
from trimaran.ipc.configuration import WorkerConfiguration
from trimaran.ipc.plan import RowFlag, StepPlan, StepResult, TokenMasks, WorkFlag
from trimaran.ipc.worker_messages import Settled

SETTLED = Settled(block_size=16, max_num_seqs=40, max_batched_tokens=512, max_model_len=256)
ROW_DEFAULTS: dict[str, Any] = {
    "choices": np.int32(0),
    "row_flags": np.uint32(RowFlag.GREEDY),
    "temperatures": np.float32(0),
    "top_ps": np.float32(1),
    "top_ks": np.int32(0),
    "min_ps": np.float32(0),
    "presence_penalties": np.float32(0),
    "frequency_penalties": np.float32(0),
    "repetition_penalties": np.float32(1),
    "seeds": np.uint64(0),
    "num_logprobs": np.int32(0),
    "num_prompt_logprobs": np.int32(0),
    "min_lengths": np.int32(0),
}


def no_warning(text: str) -> None:
    raise AssertionError(f"unexpected warning: {text}")


def make_configuration(model: Path | str, cache: Path, **options: Any) -> WorkerConfiguration:
    values: dict[str, Any] = {
        "rank": 0,
        "num_ranks": 1,
        "generation": 1,
        "core_address": "",
        "run_directory": str(cache),
        "cache_directory": str(cache),
        "model": str(model),
        "num_threads": 2,
        "kv_memory_bytes": 64 << 20,
    }
    return WorkerConfiguration(**(values | options))


def start_engine(
    model: Path | str, cache: Path, *, settled: Settled = SETTLED, num_blocks: int = 300, **options: Any
) -> tuple[StepEngine, LoadFacts]:
    configuration = make_configuration(model, cache, **options)
    engine = open_engine(configuration, describe(configuration, no_warning), no_warning, lambda name: None)
    facts = engine.load(settled, lambda name, fraction: None)
    engine.allocate(num_blocks)
    engine.warm_up()
    return engine, facts


@dataclass
class Row:
    """One sequence: its tokens so far, how many the cache holds, what it asks for."""

    row: int
    tokens: list[int]
    parameters: dict[str, Any] = field(default_factory=dict)
    banned: Sequence[int] = ()
    bias: dict[int, float] = field(default_factory=dict)
    computed: int = 0
    num_blocks: int = 0
    is_new: bool = True
    pending: bool = False


class StepDriver:
    """Plans steps over sequences, with as many tokens each as told. Blocks are granted in a shuffled order."""

    def __init__(
        self, engine: StepEngine | None = None, *, block_size: int = 16, num_blocks: int = 300, seed: int = 0
    ) -> None:
        self.engine = engine
        self.block_size = block_size
        self.free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self.step = 0

    def run(
        self,
        work: Sequence[tuple[Row, int]],
        *,
        masks: dict[int, list[int]] | None = None,
        prompt_logprobs: bool = False,
    ) -> StepResult:
        """One step: each sequence computes so many more of its tokens; it samples when none is left."""
        plan = self.plan(work, masks=masks, prompt_logprobs=prompt_logprobs)
        assert self.engine is not None
        self.engine.forward(plan)
        result = self.engine.sample(self.masks(masks, self.engine.model.vocab_size) if masks else None).result()
        self.commit(work, result)
        return result

    def plan(
        self,
        work: Sequence[tuple[Row, int]],
        *,
        masks: dict[int, list[int]] | None = None,
        prompt_logprobs: bool = False,
        freed: Sequence[int] = (),
    ) -> StepPlan:
        self.step += 1
        columns: dict[str, list[Any]] = {name: [] for name in StepPlan.SCHEMA.names}
        columns["step"] = [self.step]
        columns["freed_rows"] = list(freed)
        for sequence, count in work:
            self._add(columns, sequence, count, masks or {}, prompt_logprobs)
        return StepPlan(
            **{
                name: np.array(values, dtype)
                for (name, values), dtype in zip(columns.items(), StepPlan.SCHEMA.dtypes, strict=True)
            }
        )

    def commit(self, work: Sequence[tuple[Row, int]], result: StepResult) -> None:
        by_row = {sequence.row: sequence for sequence, _ in work}
        for row, token in zip(result.rows.tolist(), result.token_ids.tolist(), strict=True):
            by_row[row].tokens.append(token)
            by_row[row].pending = True

    def _add(
        self, columns: dict[str, list[Any]], sequence: Row, count: int, masks: dict[int, list[int]], scored: bool
    ) -> None:
        begin, end = sequence.computed, sequence.computed + count
        samples = end == len(sequence.tokens)
        from_device = sequence.pending and count == 1 and samples
        flags = WorkFlag.SAMPLES if samples else WorkFlag(0)
        if from_device:
            flags |= WorkFlag.FROM_DEVICE
        else:
            columns["token_ids"] += sequence.tokens[begin:end]
        if sequence.row in masks:
            flags |= WorkFlag.MASKED
        if scored and not sequence.pending:
            flags |= WorkFlag.PROMPT_LOGPROBS
            targets = sequence.tokens[begin + 1 : end + 1]
            columns["targets"] += targets
            columns["target_counts"].append(len(targets))
        if sequence.is_new:
            self._add_row(columns, sequence)
        self._grant(columns, sequence, end)
        for name, value in (("rows", sequence.row), ("starts", begin), ("counts", count), ("flags", flags)):
            columns[name].append(value)
        sequence.computed = end

    def _add_row(self, columns: dict[str, list[Any]], sequence: Row) -> None:
        sequence.is_new = False
        columns["new_rows"].append(sequence.row)
        columns["request_ids"].append(sequence.row)
        prompt_length = sequence.parameters.get("prompt_lengths", len(sequence.tokens))
        for name, default in (ROW_DEFAULTS | {"prompt_lengths": prompt_length}).items():
            columns[name].append(sequence.parameters.get(name, default))
        columns["bias_counts"].append(len(sequence.bias))
        columns["bias_ids"] += list(sequence.bias)
        columns["bias_values"] += list(sequence.bias.values())
        columns["banned_counts"].append(len(sequence.banned))
        columns["banned_ids"] += list(sequence.banned)
        if int(columns["row_flags"][-1]) & RowFlag.PENALTIES:
            columns["history_prompt_counts"].append(prompt_length)
            columns["history_output_counts"].append(len(sequence.tokens) - prompt_length)
            columns["history_ids"] += sequence.tokens

    def _grant(self, columns: dict[str, list[Any]], sequence: Row, end: int) -> None:
        missing = -(-end // self.block_size) - sequence.num_blocks
        if missing > 0:
            columns["block_rows"].append(sequence.row)
            columns["block_firsts"].append(sequence.num_blocks)
            columns["block_counts"].append(missing)
            columns["block_ids"] += [self.free.pop() for _ in range(missing)]
            sequence.num_blocks += missing

    def masks(self, masks: dict[int, list[int]], vocab_size: int) -> TokenMasks:
        num_words = -(-vocab_size // 32)
        words = np.zeros((len(masks), num_words), np.uint32)
        for index, allowed in enumerate(masks.values()):
            for token in allowed:
                words[index, token // 32] |= np.uint32(1 << (token % 32))
        return TokenMasks(step=np.array([self.step]), rows=np.array(list(masks), np.int32), words=words.reshape(-1))

    def generate(self, sequences: Sequence[Row], num_tokens: int, chunk: int = 512) -> None:
        """Prefill in chunks, then decode together."""
        lengths = {sequence.row: len(sequence.tokens) + num_tokens for sequence in sequences}
        while any(len(sequence.tokens) < lengths[sequence.row] for sequence in sequences):
            work = [
                (sequence, min(chunk, len(sequence.tokens) - sequence.computed))
                for sequence in sequences
                if len(sequence.tokens) < lengths[sequence.row]
            ]
            self.run(work)
