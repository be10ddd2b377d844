"""A tiny model with random weights, made on the spot, and a driver of steps over it: what the clause on tokens runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...ipc.configuration import WorkerConfiguration
from ...ipc.plan import RowFlag, StepPlan, StepResult, WorkFlag
from ...ipc.worker_messages import Settled
from ..boot import describe, open_engine
from ..execution.contract import StepEngine

BLOCK_SIZE = 16
NUM_BLOCKS = 40
VOCAB_SIZE = 300
SETTLED = Settled(block_size=BLOCK_SIZE, max_num_seqs=8, max_batched_tokens=64, max_model_len=128)
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_SEED = 5


def start(platform: str, folder: Path) -> StepEngine:
    """The engine of a worker on this platform, as it starts to serve. Weights are drawn from a seed, in float32."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    configuration = WorkerConfiguration(
        rank=0,
        num_ranks=1,
        generation=1,
        core_address="",
        run_directory=str(folder),
        cache_directory=str(folder),
        model=str(folder),
        platform=platform,
        dtype="float32",
        load_format="dummy",
        seed=_SEED,
        num_threads=1,
        kv_memory_bytes=16 << 20,
    )
    engine = open_engine(configuration, describe(configuration, _ignore), _ignore, _ignore)
    engine.load(SETTLED, lambda name, fraction: None)
    engine.allocate(NUM_BLOCKS)
    engine.warm_up()
    return engine


def _ignore(text: str) -> None:
    return None


@dataclass
class Continuation:
    """Tokens so far, and how many of them the cache holds."""

    row: int
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    num_computed: int = 0
    num_blocks: int = 0
    is_new: bool = True
    has_sampled: bool = False


class Driver:
    """Plans steps as the engine core would: prompts in chunks, mixed with decodes, blocks in a shuffled order."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._free = np.random.default_rng(_SEED).permutation(NUM_BLOCKS).tolist()
        self._step = 0

    def step(self, work: Sequence[tuple[Continuation, int]]) -> StepResult:
        """Each sequence computes so many more tokens, and samples when none is left."""
        self._step += 1
        columns: dict[str, list[Any]] = {name: [] for name in StepPlan.SCHEMA.names}
        columns["step"] = [self._step]
        for sequence, count in work:
            self._add(columns, sequence, count)
        typed = zip(columns.items(), StepPlan.SCHEMA.dtypes, strict=True)
        self._engine.forward(StepPlan(**{name: np.array(values, dtype) for (name, values), dtype in typed}))
        result = self._engine.sample(None).result()
        by_row = {sequence.row: sequence for sequence, _ in work}
        told = zip(result.rows.tolist(), result.token_ids.tolist(), result.logprobs.tolist(), strict=True)
        for row, token, logprob in told:
            by_row[row].tokens.append(token)
            by_row[row].logprobs.append(logprob)
            by_row[row].has_sampled = True
        return result

    def _add(self, columns: dict[str, list[Any]], sequence: Continuation, count: int) -> None:
        begin, end = sequence.num_computed, sequence.num_computed + count
        flags = WorkFlag.SAMPLES if end == len(sequence.tokens) else WorkFlag(0)
        if sequence.has_sampled:
            flags |= WorkFlag.FROM_DEVICE
        else:
            columns["token_ids"] += sequence.tokens[begin:end]
        if sequence.is_new:
            self._add_row(columns, sequence)
        missing = -(-end // BLOCK_SIZE) - sequence.num_blocks
        if missing > 0:
            columns["block_rows"].append(sequence.row)
            columns["block_firsts"].append(sequence.num_blocks)
            columns["block_counts"].append(missing)
            columns["block_ids"] += [self._free.pop() for _ in range(missing)]
            sequence.num_blocks += missing
        for name, value in (("rows", sequence.row), ("starts", begin), ("counts", count), ("flags", flags)):
            columns[name].append(value)
        sequence.num_computed = end

    def _add_row(self, columns: dict[str, list[Any]], sequence: Continuation) -> None:
        """A greedy row that tells the log-probability of each token."""
        sequence.is_new = False
        values = {
            "new_rows": sequence.row,
            "request_ids": sequence.row,
            "choices": 0,
            "row_flags": RowFlag.GREEDY | RowFlag.LOGPROBS,
            "temperatures": 0.0,
            "top_ps": 1.0,
            "top_ks": 0,
            "min_ps": 0.0,
            "presence_penalties": 0.0,
            "frequency_penalties": 0.0,
            "repetition_penalties": 1.0,
            "seeds": 0,
            "num_logprobs": 0,
            "num_prompt_logprobs": 0,
            "prompt_lengths": len(sequence.tokens),
            "min_lengths": 0,
            "bias_counts": 0,
            "banned_counts": 0,
        }
        for name, value in values.items():
            columns[name].append(value)


def generate(engine: StepEngine, num_tokens: int) -> list[Continuation]:
    """Greedy continuations of three prompts that start one after the other, the longest in chunks."""
    draws = np.random.default_rng(_SEED)
    sequences = [Continuation(row, draws.integers(3, VOCAB_SIZE, size).tolist()) for row, size in enumerate((7, 45, 1))]
    wanted = [len(sequence.tokens) + num_tokens for sequence in sequences]
    driver, number = Driver(engine), 0
    while any(len(sequence.tokens) < end for sequence, end in zip(sequences, wanted, strict=True)):
        driver.step(
            [
                (sequence, min(20, len(sequence.tokens) - sequence.num_computed))
                for sequence, end in zip(sequences, wanted, strict=True)
                if sequence.row <= number and len(sequence.tokens) < end
            ]
        )
        number += 1
    return sequences
