"""Everything that steps may launch, called once while nothing is launched: so that all of it is compiled ahead.

The model here has two layers, without weights worth reading and with a cache of one block: what is launched follows
from sizes, dtypes and addresses' alignment alone. Ops that are no kernels of ours do run, on what the memory holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from ...ipc.worker_messages import Settled
from ...kernels.compilations import rehearsing
from ...kernels.implementation import Kernel
from ..memory.kv_cache import KvCache, KvLayout
from ..models.config import ModelConfig
from ..models.decoder import Activations, Decoder, DecoderKernels, WeightReader
from ..models.fused_decode import FusedKernels
from ..models.parameters import Parameter
from ..models.sharding import Shard
from .batch import BatchBuilder, StepSize
from .guarded_kernels import KernelSet

_EACH = 16
"""Up to so many tokens, and rows of logits, products differ by their number."""
_WIDEST_TOP = 32
"""Of log probabilities: the default limit of alternatives, rounded up to a power of two."""


class _Unread:
    """A `WeightSource` of whatever the memory holds."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device

    def check(self, needed: Mapping[str, Parameter], ignored_prefixes: tuple[str, ...] = ()) -> None:
        """Any will do."""

    def read(
        self, parameter: Parameter, *, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> torch.Tensor:
        shape = list(parameter.shape)
        for dimension, part in ((0, rows), (1, columns)):
            if part is not None:
                shape[dimension] = part[1] - part[0]
        return torch.empty(shape, dtype=self._dtype, device=self._device)


def rehearse(
    config: ModelConfig,
    shard: Shard,
    kernels: KernelSet,
    activations: Activations,
    builder: BatchBuilder,
    layout: KvLayout,
    settled: Settled,
    *,
    num_sampled_ids: int,
    fuses: bool,
    draws_on_device: bool,
    attends_to_decodes: bool,
) -> None:
    """`builder` gets the inputs of idle steps. Raises whatever kernels raise."""
    device = activations.logits_RV.device
    with rehearsing():
        shallow = _shallow(config)
        weights = WeightReader(
            shallow,
            shard,
            _Unread(activations.dtype, device),
            kernels.unguarded("linear"),  # type: ignore[arg-type]
            activations.dtype,
            device,
        ).read()
        decoder = Decoder(
            shallow,
            shard,
            weights,
            DecoderKernels(**{name: kernels.unguarded(name) for name in DecoderKernels.__dataclass_fields__}),  # type: ignore[arg-type]
            activations,
            1,
            None,
            device,
            FusedKernels(**{name: kernels.unguarded(name) for name in FusedKernels.__dataclass_fields__})
            if fuses
            else None,
            kernels.unguarded("decode_attention") if attends_to_decodes else None,
        )
        cache = KvCache(replace(layout, num_layers=shallow.num_layers), 1, device)
        for size in step_sizes(settled, activations.max_rows):
            _pass(decoder, cache, builder, size)
        logits_SV = torch.zeros(2, config.vocab_size, device=device)
        _sample(kernels, logits_SV, num_sampled_ids, draws_on_device=draws_on_device)
        for num_top in _tops(num_sampled_ids):
            _tell_logprobs(kernels.unguarded("token_logprobs"), logits_SV, num_sampled_ids, num_top)


def _shallow(config: ModelConfig) -> ModelConfig:
    """A first layer and another one, and layers with a window and without as far as the model has them."""
    kinds = [next((window for window in config.windows if (window > 0) is has), None) for has in (False, True)]
    windows = [window for window in kinds if window is not None]
    if len(windows) == 1 and config.num_layers > 1:
        windows *= 2
    elif len(windows) == 2:
        windows += reversed(windows)  # either may come first
    return replace(config, num_layers=len(windows), windows=tuple(windows))


def step_sizes(settled: Settled, max_rows: int) -> list[StepSize]:
    """Sizes that stand for all: kernels tell small ones apart, and larger ones by powers of two."""
    numbers = {*range(1, _EACH + 2), *settled.graph_buckets, max_rows, *_around_powers(max_rows)}
    sequences = sorted(number for number in numbers if number <= max_rows)
    decodes = [StepSize(number, number) for number in sequences]
    chunks = [StepSize(number, 1) for number in range(2, _EACH + 1)]
    mixed = [StepSize(max(2 * number, _EACH + 1), number) for number in sequences]
    return [size for size in (*decodes, *chunks, *mixed) if size.num_tokens <= settled.max_batched_tokens]


def _around_powers(most: int) -> Iterator[int]:
    power = 2 * _EACH
    while power <= most:
        yield from (power - 1, power, power + 1)
        power *= 2


def _pass(decoder: Decoder, cache: KvCache, builder: BatchBuilder, size: StepSize) -> None:
    """A forward pass, and logits: of each sequence's last token, and of one alone."""
    for only_last in (True,) if size.is_decode else (True, False):
        inputs = builder.tensors(builder.idle(size), only_last=only_last)
        residual, delta = decoder.forward(inputs, cache.layers, lambda: None)
    num_rows = min(size.num_sequences, _EACH + 1)
    for rows in {1, num_rows}:
        decoder.logits(residual[:rows].clone(), None if delta is None else delta[:rows].clone())


def _sample(kernels: KernelSet, logits_SV: torch.Tensor, num_sampled_ids: int, *, draws_on_device: bool) -> None:
    def zeros(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(len(logits_SV), dtype=dtype, device=logits_SV.device)

    tokens = zeros(torch.int64)
    kernels.unguarded("greedy_sample")(tokens, logits_SV, num_sampled_ids)
    if draws_on_device:
        kinds = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int32, torch.int32)
        kernels.unguarded("sample")(tokens, logits_SV, *map(zeros, kinds), num_sampled_ids)
    counts = torch.zeros(len(logits_SV), num_sampled_ids, dtype=torch.int32, device=logits_SV.device)
    penalties = (zeros(torch.float32), zeros(torch.float32), zeros(torch.float32) + 1)
    kernels.unguarded("apply_penalties")(
        logits_SV[:, :num_sampled_ids], zeros(torch.int64), counts, counts.to(torch.uint8), *penalties
    )


def _tops(num_sampled_ids: int) -> list[int]:
    """Numbers of alternatives, one for each power of two that they are rounded up to."""
    numbers, power = [0, 1], 2
    while power <= min(_WIDEST_TOP, num_sampled_ids):
        numbers.append(power)
        power *= 2
    return numbers


def _tell_logprobs(token_logprobs: Kernel, logits_SV: torch.Tensor, num_sampled_ids: int, num_top: int) -> None:
    num_rows, device = len(logits_SV), logits_SV.device
    values = torch.empty(num_rows, device=device)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=device)
    top_values = torch.empty(num_rows, num_top, device=device)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int32, device=device)
    tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
    token_logprobs(values, ranks, top_values, top_ids, logits_SV, tokens, num_sampled_ids)
