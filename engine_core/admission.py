"""The door: turns a Submit into a Request, or says why not."""

import itertools
from collections.abc import Callable

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ..ipc.facts import PoolingFacts
from ..ipc.frontend_messages import Rejected, RejectKind, Submit
from ..ipc.sampling import Sampling
from .request import Request


class Door(Struct, frozen=True, kw_only=True):
    """What the running engine can take."""

    max_model_len: int
    vocab_size: int
    pooling: PoolingFacts | None = None
    max_queued_requests: int | None
    max_queued_tokens: int | None


def admit(
    submit: Submit,
    frame: bytes,
    door: Door,
    *,
    owner: int,
    order: int,
    num_queued: int,
    num_queued_tokens: int,
    root: Callable[[str | None, str | None], bytes],
    retry_after_s: float,
    default_seed: int,
) -> Request | Rejected:
    """A request ready to wait, or the reason for no. The frontend has validated; this guards the engine itself."""

    def reject(kind: RejectKind, text: str, retry: float | None = None) -> Rejected:
        return Rejected(submit.request_id, kind, text, retry)

    if len(frame) % 4:
        return reject(RejectKind.INVALID, f"a prompt frame of {len(frame)} bytes holds no int32 token ids")
    prompt = np.frombuffer(frame, np.int32)
    if not len(prompt):
        return reject(RejectKind.INVALID, "the prompt is empty; send at least one token")
    if int(prompt.min()) < 0 or int(prompt.max()) >= door.vocab_size:
        return reject(
            RejectKind.INVALID, f"a prompt token id is outside the vocabulary of {door.vocab_size}; ids start at 0"
        )
    if submit.num_sequences < 1 or submit.sampling.max_tokens < 1:
        return reject(RejectKind.INVALID, "n and max_tokens must be at least 1")
    ids = [*submit.sampling.end_token_ids, *submit.sampling.stop_token_ids]
    ids += [token_id for token_id, _ in submit.sampling.logit_bias]
    ids += [*submit.sampling.allowed_token_ids, *itertools.chain.from_iterable(submit.sampling.bad_token_ids)]
    ids += [] if submit.sampling.thought is None else [submit.sampling.thought.end_id]
    if any(not 0 <= token_id < door.vocab_size for token_id in ids):
        return reject(RejectKind.INVALID, f"a token id of the sampling is outside the vocabulary of {door.vocab_size}")
    if not all(submit.sampling.bad_token_ids):
        return reject(RejectKind.INVALID, "a run of bad token ids is empty; leave it out")
    if (wrong := _out_of_range(submit.sampling)) is not None:
        return reject(RejectKind.INVALID, wrong)
    if submit.pools and door.pooling is None:
        return reject(RejectKind.INVALID, "this model makes tokens, and no vectors; serve an embedding model")
    if not submit.pools and door.pooling is not None and not door.pooling.generates:
        return reject(RejectKind.INVALID, "this model makes vectors, and no tokens; ask /v1/embeddings")
    if submit.pools and (submit.num_sequences > 1 or submit.grammar is not None):
        return reject(RejectKind.INVALID, "a vector has no choices and no grammar; leave n and the grammar out")
    if submit.pools and len(prompt) > door.max_model_len:
        return reject(
            RejectKind.TOO_LONG,
            f"the text has {len(prompt)} tokens and this model takes {door.max_model_len}; shorten it, or ask for "
            "truncate_prompt_tokens",
        )
    if not submit.pools and len(prompt) >= door.max_model_len:
        return reject(
            RejectKind.TOO_LONG,
            f"the prompt has {len(prompt)} tokens and the context is {door.max_model_len}, which must also hold the "
            "answer; shorten the prompt",
        )
    if door.max_queued_requests is not None and num_queued >= door.max_queued_requests:
        return reject(
            RejectKind.QUEUE_FULL,
            f"{num_queued} requests wait already (--max-queued-requests {door.max_queued_requests}); try again later",
            retry_after_s,
        )
    if door.max_queued_tokens is not None and num_queued_tokens + len(prompt) > door.max_queued_tokens and num_queued:
        return reject(
            RejectKind.QUEUE_FULL,
            f"{num_queued_tokens} prompt tokens wait already (--max-queued-tokens {door.max_queued_tokens}); "
            "try again later",
            retry_after_s,
        )
    sampling = submit.sampling
    if sampling.seed is None:
        # an unseeded request still draws by counter: its key is its place in line, mixed with the engine's seed
        sampling = _with_seed(sampling, order, default_seed)
    return Request(
        request_id=submit.request_id,
        owner=owner,
        order=order,
        prompt=prompt,
        sampling=sampling,
        num_sequences=submit.num_sequences,
        priority=submit.priority,
        arrival_s=submit.arrival_s,
        root=root(submit.cache_salt, submit.adapter),
        pools=submit.pools,
        grammar=submit.grammar,
    )


def _out_of_range(sampling: Sampling) -> str | None:
    """A number that the plan's columns cannot hold. It would end the engine, and with it everybody else's requests."""
    bounds = {"seed": 2**64, "top_k": 2**31, "min_tokens": min(sampling.max_tokens + 1, 2**30)}
    bounds |= dict.fromkeys(("num_logprobs", "num_prompt_logprobs"), 2**31)
    for name, bound in bounds.items():
        if not 0 <= (getattr(sampling, name) or 0) < bound:
            return f"{name} must be at least 0 and below {bound}"
    return None


def _with_seed(sampling: Sampling, order: int, default_seed: int) -> Sampling:
    mixed = (order + 1) * 0x9E3779B97F4A7C15 ^ default_seed * 0xBF58476D1CE4E5B9
    return replace(sampling, seed=mixed & (1 << 63) - 1)
