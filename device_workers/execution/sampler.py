"""From logits to tokens: penalties, biases, bans and masks for the rows that ask, then one sampling kernel.

S sampled rows, V vocabulary. Rows that ask for nothing cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...ipc.plan import RowFlag, TokenMasks
from ...kernels.implementation import Kernel
from ..memory.staging import HostLink, Readback
from .penalty_table import PenaltyTable
from .row_table import RowTable

Array = np.ndarray[Any, np.dtype[Any]]
_ROWS_UNPACKED = 16  # rows whose masks are taken apart at a time
_BITS = (1 << np.arange(8)).astype(np.uint8)


@dataclass(frozen=True, kw_only=True)
class SamplerKernels:
    """The operations of sampling."""

    greedy_sample: Kernel
    sample: Kernel
    apply_penalties: Kernel
    token_logprobs: Kernel


@dataclass(frozen=True)
class Logprobs:
    """Of some tokens: log probability, rank, and the most likely alternatives, `counts[i]` each, flat."""

    values: Array
    ranks: Array
    counts: Array
    top_ids: Array
    top_values: Array


@dataclass(frozen=True)
class PendingLogprobs:
    """Logprobs on their way to the host; `num_top` alternatives of each token are wanted."""

    values: torch.Tensor
    ranks: torch.Tensor
    top_values: torch.Tensor
    top_ids: torch.Tensor
    num_top: Array

    def read(self) -> Logprobs:
        """Once the readback has been waited for."""
        widest = self.top_ids.shape[1]
        counts = np.minimum(self.num_top, widest).astype(np.int32)
        kept = np.arange(widest) < counts[:, None]
        tops = self.top_ids.numpy()[kept], self.top_values.numpy()[kept]
        return Logprobs(self.values.numpy(), self.ranks.numpy(), counts, *tops)


@dataclass(frozen=True)
class Sampled:
    """Tokens `[S]` int64 on the device (negative: broken row), and logprobs of the rows that ask, in order."""

    tokens: torch.Tensor
    logprob_rows: Array
    logprobs: PendingLogprobs | None


class Sampler:
    """Stateless but for the penalty table."""

    def __init__(
        self,
        kernels: SamplerKernels,
        penalties: PenaltyTable,
        vocab_size: int,
        link: HostLink,
        *,
        draws_on_device: bool,
    ) -> None:
        """What is kept is defined in float64; where the device has none (`draws_on_device` False) the host draws."""
        self._link = link
        self._draws_on_device = draws_on_device
        self._kernels = kernels
        self._penalties = penalties
        self._vocab_size = vocab_size

    def sample(
        self,
        logits_SV: torch.Tensor,
        rows: Array,
        lengths: Array,
        draws: tuple[torch.Tensor, ...],
        table: RowTable,
        masks: TokenMasks | None,
        readback: Readback,
    ) -> Sampled:
        """`lengths` counts each sequence's tokens so far: the position of the one drawn now. `draws` are the sampling
        kernel's parameters, or () where all rows are greedy. Changes the logits.
        """
        flags = table.columns["flags"][rows]
        wants_logprobs = np.nonzero(flags & RowFlag.LOGPROBS)[0]
        raw = logits_SV[self._link.send(wants_logprobs)] if len(wants_logprobs) else None
        self._shape(logits_SV, rows, lengths, flags, table, masks)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=logits_SV.device)
        if draws:
            self._draw(tokens, logits_SV, draws)
        else:
            self._kernels.greedy_sample(tokens, logits_SV, self._vocab_size)
        self._count(rows, flags, tokens)
        if raw is None:
            return Sampled(tokens, rows[wants_logprobs], None)
        own, asking = tokens[self._link.send(wants_logprobs)], rows[wants_logprobs]
        num_top = table.columns["num_logprobs"][asking]
        return Sampled(tokens, asking, self.logprobs(raw, own, num_top, readback))

    def logprobs(
        self, logits_LV: torch.Tensor, tokens_L: torch.Tensor, num_top: Array, readback: Readback
    ) -> PendingLogprobs:
        """Of one token per row, with `num_top[i]` alternatives. A broken row's token is negative: it reads as 0."""
        num_rows, widest, device = len(tokens_L), min(int(num_top.max()), self._vocab_size), logits_LV.device
        values = torch.empty(num_rows, device=device)
        ranks = torch.empty(num_rows, dtype=torch.int32, device=device)
        top_values = torch.empty(num_rows, widest, device=device)
        top_ids = torch.empty(num_rows, widest, dtype=torch.int32, device=device)
        self._kernels.token_logprobs(values, ranks, top_values, top_ids, logits_LV, tokens_L, self._vocab_size)
        take = readback.take
        return PendingLogprobs(take(values), take(ranks), take(top_values), take(top_ids), num_top)

    def _shape(
        self,
        logits_SV: torch.Tensor,
        rows: Array,
        lengths: Array,
        flags: Array,
        table: RowTable,
        masks: TokenMasks | None,
    ) -> None:
        """Penalties, biases, bans, masks, in this order and in place."""
        if (flags & RowFlag.PENALTIES).any():
            self._penalise(logits_SV, rows, flags, table)
        if (flags & (RowFlag.BIAS | RowFlag.MIN_TOKENS)).any():
            self._bias(logits_SV, rows, lengths, flags, table)
        if masks is not None and len(masks.rows):
            self._mask(logits_SV, rows, masks)

    def _penalise(self, logits_SV: torch.Tensor, rows: Array, flags: Array, table: RowTable) -> None:
        places = np.nonzero(flags & RowFlag.PENALTIES)[0]
        penalised = rows[places]
        entries = self._penalties.entries(penalised.tolist())
        names = ("presence", "frequency", "repetition")
        parameters = (self._link.send(table.columns[f"{name}_penalties"][penalised]) for name in names)
        counts, in_prompt = self._penalties.output_counts_PV[entries], self._penalties.in_prompt_PV[entries]
        valid_SV = logits_SV[:, : self._vocab_size]
        self._kernels.apply_penalties(valid_SV, self._link.send(places), counts, in_prompt, *parameters)

    def _bias(self, logits_SV: torch.Tensor, rows: Array, lengths: Array, flags: Array, table: RowTable) -> None:
        for place, row in enumerate(rows.tolist()):
            if flags[place] & RowFlag.BIAS and row in table.biases:
                bias = table.biases[row]
                logits_SV[place, self._link.send(bias.ids.astype(np.int64))] += self._link.send(bias.values)
            too_short = lengths[place] < table.columns["min_lengths"][row]
            if flags[place] & RowFlag.MIN_TOKENS and too_short and row in table.banned:
                logits_SV[place, self._link.send(table.banned[row].astype(np.int64))] = float("-inf")

    def _mask(self, logits_SV: torch.Tensor, rows: Array, masks: TokenMasks) -> None:
        """Packed masks go to the device, which takes them apart some rows at a time: unpacked they are large."""
        words = np.require(masks.words, requirements="W")  # those that came over the socket are not torch's to hold
        words_MB = self._link.send(words.reshape(len(masks.rows), -1).view(np.uint8))
        place_of = {row: place for place, row in enumerate(rows.tolist())}
        places_M = self._link.send(np.array([place_of[row] for row in masks.rows.tolist()], np.int64))
        bits_8 = self._link.send(_BITS)
        width = min(8 * words_MB.shape[1], logits_SV.shape[1])
        for begin in range(0, len(masks.rows), _ROWS_UNPACKED):
            part = slice(begin, begin + _ROWS_UNPACKED)
            refused_PV = (words_MB[part, :, None] & bits_8 == 0).flatten(1)[:, :width]
            logits_PV = logits_SV[places_M[part]]
            logits_PV[:, :width].masked_fill_(refused_PV, float("-inf"))
            logits_PV[:, width:] = float("-inf")
            logits_SV.index_copy_(0, places_M[part], logits_PV)

    def _draw(self, tokens: torch.Tensor, logits_SV: torch.Tensor, draws: tuple[torch.Tensor, ...]) -> None:
        if self._draws_on_device:
            self._kernels.sample(tokens, logits_SV, *draws, self._vocab_size)
            return
        drawn = torch.empty(len(tokens), dtype=torch.int64)
        self._kernels.sample(drawn, logits_SV.cpu(), *(parameter.cpu() for parameter in draws), self._vocab_size)
        tokens.copy_(drawn)

    def _count(self, rows: Array, flags: Array, tokens: torch.Tensor) -> None:
        places = np.nonzero(flags & RowFlag.PENALTIES)[0]
        if len(places):
            self._penalties.count(rows[places].tolist(), tokens[self._link.send(places)])
