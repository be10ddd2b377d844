"""A trial of a loaded module before it serves: texts side by side, in parts and token by token, over a paged cache,
must come to what its own attention makes of each text alone.

The traced run shows what attention is asked for; this shows that nothing else of the module mixes texts: positions
taken from places in the batch, states kept between calls.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ...ipc.conditions import Refusal
from ...kernels.implementation import HostLengths
from ..memory.kv_cache import KvCache
from .decoder import StepTensors
from .module_decoder import ModuleDecoder

_PARTS = ((9, 1, 1), (12, 8, 1))
"""Of two texts: how many tokens each step adds."""
_LEAST_ALIKE, _LEAST_ALIKE_IN_HALF = 0.999, 0.97
"""Cosine of a token's hidden states, of all tokens in float32."""
_ODD_IN_HALF = 0.25
"""Part of the tokens that need not be alike in half precision, where an expert may be chosen otherwise."""


def check_module(decoder: ModuleDecoder, cache: KvCache, name: str, vocab_size: int, device: torch.device) -> None:
    """Overwrites the cache, which has blocks for two texts. Raises Refusal."""
    generator = torch.Generator().manual_seed(17)
    texts = [torch.randint(vocab_size, (sum(parts),), generator=generator) for parts in _PARTS]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for batch, counts in _steps(texts, cache, device):
        hidden, _ = decoder.forward(batch, cache.layers, lambda: None)
        for made, part in zip(found, torch.split(hidden.float().cpu(), counts), strict=True):
            made.append(part)
    alike = torch.cat(
        [
            torch.nn.functional.cosine_similarity(torch.cat(made), decoder.alone(text.to(device)).float().cpu(), dim=-1)
            for text, made in zip(texts, found, strict=True)
        ]
    )
    is_half = cache.layout.dtype is not torch.float32
    worst = float(alike.nan_to_num(-1.0).quantile(_ODD_IN_HALF if is_half else 0.0))
    if worst < (_LEAST_ALIKE_IN_HALF if is_half else _LEAST_ALIKE):
        raise Refusal(
            f"{name} cannot be served by transformers' modelling code: texts side by side come to other hidden states "
            f"than each alone (cosine {worst:.4f}); choose another model"
        )


def _steps(texts: list[torch.Tensor], cache: KvCache, device: torch.device) -> Iterator[tuple[StepTensors, list[int]]]:
    def sent(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, torch.int32)

    block_size = cache.layout.block_size
    num_blocks = cache.num_blocks // len(texts)
    tables = torch.arange(num_blocks * len(texts), dtype=torch.int32).view(len(texts), num_blocks)
    done = [0] * len(texts)
    for counts in zip(*_PARTS, strict=True):
        ends = [before + count for before, count in zip(done, counts, strict=True)]
        positions = [torch.arange(before, end) for before, end in zip(done, ends, strict=True)]
        slots = [
            tables[row, places // block_size] * block_size + places % block_size for row, places in enumerate(positions)
        ]
        starts, lengths = np.cumsum((0, *counts)).astype(np.int32), np.array(ends, np.int32)
        batch = StepTensors(
            token_ids=sent(torch.cat([text[places] for text, places in zip(texts, positions, strict=True)])),
            last_tokens=sent(torch.zeros(len(texts))),
            positions=sent(torch.cat(positions)),
            slots=sent(torch.cat(slots)),
            block_tables=sent(tables),
            rows=sent(torch.arange(len(texts))),
            query_starts=sent(torch.from_numpy(starts)),
            kv_lengths=sent(torch.from_numpy(lengths)),
            host=HostLengths(starts, lengths),
        )
        yield batch, list(counts)
        done = ends


def num_check_blocks(block_size: int) -> int:
    """Blocks that the trial needs."""
    return len(_PARTS) * -(-max(map(sum, _PARTS)) // block_size)
