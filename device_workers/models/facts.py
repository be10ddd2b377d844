"""What the engine must know of a model, from its config alone. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from ...ipc.conditions import Refusal
from ...ipc.facts import ModelFacts, Problem
from ...ipc.worker_messages import Settled
from .config import ModelConfig
from .embedding_files import EmbeddingFiles, pooling_of
from .parameters import num_parameters, num_rank_parameters
from .sharding import Shard, sizes_that_divide

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def make_facts(
    config: ModelConfig,
    shard: Shard,
    *,
    dtype: str,
    kv_dtype: str,
    max_model_len: int | None,
    files: EmbeddingFiles | None = None,
) -> ModelFacts:
    """KV bytes are this rank's; `files` say that it makes vectors. Raises Refusal for a length beyond the model's or a
    cache dtype that does not exist yet.
    """
    if kv_dtype not in ("auto", dtype):
        raise Refusal(f"--kv-dtype {kv_dtype} is not supported with {dtype} yet; take auto")
    limit = config.max_position_embeddings
    if files is not None and files.max_tokens is not None:
        limit = min(limit, files.max_tokens)
    if max_model_len is not None and max_model_len > limit:
        raise Refusal(
            f"--max-model-len {max_model_len} is more than the model's {limit} positions; take at most {limit}"
        )
    item_bytes = ITEM_BYTES[dtype]
    return ModelFacts(
        architecture=config.architecture,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len or limit,
        dtype=dtype,
        kv_dtype=dtype,
        num_parameters=num_parameters(config),
        tensor_parallel_sizes=sizes_that_divide(config),
        weight_bytes=num_rank_parameters(config, shard) * item_bytes,
        kv_bytes_per_token=2 * config.num_layers * shard.num_kv_heads * config.head_dim * item_bytes,
        step_bytes_per_token=_step_bytes_per_token(config, shard, item_bytes),
        pooling=pooling_of(files, config.hidden_size),
        step_bytes_per_row=4 * (shard.vocab_end - shard.vocab_begin) + 4 * _NUM_ROW_INPUTS,
    )


_NUM_TOKEN_INPUTS, _NUM_ROW_INPUTS = 3, 17
"""Of 4 bytes, with the last token that each row keeps."""


def _step_bytes_per_token(config: ModelConfig, shard: Shard, item_bytes: int) -> int:
    """Of the decoder's `Activations` and of a step's int32 inputs; a test holds both against this."""
    heads, kv_heads = shard.num_heads, shard.num_kv_heads
    channels = 3 * config.hidden_size + (3 * heads + 2 * kv_heads) * config.head_dim + 3 * shard.intermediate_size
    return channels * item_bytes + 4 * _NUM_TOKEN_INPUTS


KERNELS = (
    "embed",
    "rms_norm",
    "fused_add_rms_norm",
    "linear",
    "rotary_and_kv_write",
    "paged_attention",
    "silu_and_mul",
    "norm_linear",
    "norm_gate_up",
    "linear_add",
    "decode_attention",
    "greedy_sample",
    "sample",
    "apply_penalties",
    "token_logprobs",
)
"""What serving a decoder needs."""


def kernel_problem(config: ModelConfig, shard: Shard, model: ModelFacts, settled: Settled) -> Problem:
    """What this rank asks of every kernel."""
    return Problem(
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        head_dim=config.head_dim,
        num_heads=shard.num_heads,
        num_kv_heads=shard.num_kv_heads,
        block_size=settled.block_size,
        hidden_size=config.hidden_size,
        intermediate_size=shard.intermediate_size,
        vocab_size=config.vocab_size,
        max_tokens=settled.max_batched_tokens,
        max_rows=settled.max_num_seqs,
        rotary_dim=config.rotary.rotary_dim,
        attention_strategy=settled.attention_strategy,
        batch_invariant=settled.batch_invariant,
    )


class HasVocabulary(Protocol):
    """A configuration that says how many ids there are."""

    @property
    def vocab_size(self) -> int: ...


class _Added(msgspec.Struct):
    id: int


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[object] = {}


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


def num_sampled_ids(directory: Path, config: HasVocabulary) -> int:
    """Ids below this have a token; those above pad the weights and must never be sampled. Read from tokenizer.json,
    where there is one that says so; else the config's vocabulary counts."""
    try:
        tokenizer = msgspec.json.decode((directory / "tokenizer.json").read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.MsgspecError):
        return config.vocab_size
    vocab = tokenizer.model.vocab
    known = max(vocab.values(), default=-1) + 1 if isinstance(vocab, dict) else len(vocab)
    added = max((token.id for token in tokenizer.added_tokens), default=-1) + 1
    return min(max(known, added), config.vocab_size) or config.vocab_size
