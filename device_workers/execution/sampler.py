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
from .penalty_table import PenaltyTable
from .row_table import RowTable

Array = np.ndarray[Any, np.dtype[Any]]


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


EMPTY_LOGPROBS = Logprobs(
    np.empty(0, np.float32),
    np.empty(0, np.int32),
    np.empty(0, np.int32),
    np.empty(0, np.int32),
    np.empty(0, np.float32),
)


@dataclass(frozen=True)
class Sampled:
    """Tokens `[S]` int64 on the device (negative: broken row), and logprobs of the rows that ask, in order."""

    tokens: torch.Tensor
    logprob_rows: Array
    logprobs: Logprobs


class Sampler:
    """Stateless but for the penalty table."""

    def __init__(
        self, kernels: SamplerKernels, penalties: PenaltyTable, vocab_size: int, *, draws_on_device: bool
    ) -> None:
        """What is kept is defined in float64; where the device has none (`draws_on_device` False) the host draws."""
        self._draws_on_device = draws_on_device
        self._kernels = kernels
        self._penalties = penalties
        self._vocab_size = vocab_size

    def sample(
        self, logits_SV: torch.Tensor, rows: Array, lengths: Array, table: RowTable, masks: TokenMasks | None
    ) -> Sampled:
        """`lengths` counts each sequence's tokens so far: the position of the one drawn now. Changes the logits."""
        flags = table.columns["flags"][rows]
        wants_logprobs = np.nonzero(flags & RowFlag.LOGPROBS)[0]
        device = logits_SV.device
        raw = logits_SV[_index(wants_logprobs, device)] if len(wants_logprobs) else None
        self._shape(logits_SV, rows, lengths, flags, table, masks)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
        if (flags & RowFlag.GREEDY).all():
            self._kernels.greedy_sample(tokens, logits_SV, self._vocab_size)
        else:
            self._draw(tokens, logits_SV, rows, lengths, table)
        self._count(rows, flags, tokens)
        if raw is None:
            return Sampled(tokens, wants_logprobs, EMPTY_LOGPROBS)
        own = tokens[_index(wants_logprobs, device)]
        return Sampled(
            tokens, rows[wants_logprobs], self.logprobs(raw, own, table.columns["num_logprobs"][rows[wants_logprobs]])
        )

    def logprobs(self, logits_LV: torch.Tensor, tokens_L: torch.Tensor, num_top: Array) -> Logprobs:
        """Of one token per row, with `num_top[i]` alternatives."""
        num_rows, widest, device = len(tokens_L), min(int(num_top.max()), self._vocab_size), logits_LV.device
        values = torch.empty(num_rows, device=device)
        ranks = torch.empty(num_rows, dtype=torch.int32, device=device)
        top_values = torch.empty(num_rows, widest, device=device)
        top_ids = torch.empty(num_rows, widest, dtype=torch.int32, device=device)
        self._kernels.token_logprobs(values, ranks, top_values, top_ids, logits_LV, tokens_L, self._vocab_size)
        counts = np.minimum(num_top, widest).astype(np.int32)
        kept = np.arange(widest) < counts[:, None]
        return Logprobs(
            values.numpy(force=True),
            ranks.numpy(force=True),
            counts,
            top_ids.numpy(force=True)[kept],
            top_values.numpy(force=True)[kept],
        )

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
        parameters = (
            torch.from_numpy(table.columns[f"{name}_penalties"][penalised]).to(logits_SV.device)
            for name in ("presence", "frequency", "repetition")
        )
        counts, in_prompt = self._penalties.output_counts_PV[entries], self._penalties.in_prompt_PV[entries]
        valid_SV = logits_SV[:, : self._vocab_size]
        self._kernels.apply_penalties(valid_SV, _index(places, logits_SV.device), counts, in_prompt, *parameters)

    def _bias(self, logits_SV: torch.Tensor, rows: Array, lengths: Array, flags: Array, table: RowTable) -> None:
        for place, row in enumerate(rows.tolist()):
            if flags[place] & RowFlag.BIAS and row in table.biases:
                bias = table.biases[row]
                values = torch.from_numpy(bias.values).to(logits_SV.device)
                logits_SV[place, _index(bias.ids, logits_SV.device)] += values
            too_short = lengths[place] < table.columns["min_lengths"][row]
            if flags[place] & RowFlag.MIN_TOKENS and too_short and row in table.banned:
                logits_SV[place, _index(table.banned[row], logits_SV.device)] = float("-inf")

    def _mask(self, logits_SV: torch.Tensor, rows: Array, masks: TokenMasks) -> None:
        words = masks.words.reshape(len(masks.rows), -1)
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").astype(bool)
        place_of = {row: place for place, row in enumerate(rows.tolist())}
        width = min(bits.shape[1], logits_SV.shape[1])
        for row, allowed in zip(masks.rows.tolist(), bits, strict=True):
            logits = logits_SV[place_of[row]]
            logits[:width].masked_fill_(torch.from_numpy(~allowed[:width]).to(logits.device), float("-inf"))
            logits[width:] = float("-inf")

    def _draw(
        self, tokens: torch.Tensor, logits_SV: torch.Tensor, rows: Array, lengths: Array, table: RowTable
    ) -> None:
        columns = table.columns
        greedy = (columns["flags"][rows] & RowFlag.GREEDY) != 0
        parameters: tuple[Array, ...] = (
            np.where(greedy, np.float32(0), columns["temperatures"][rows]),
            columns["top_ks"][rows],
            columns["top_ps"][rows],
            columns["min_ps"][rows],
            columns["seeds"][rows].view(np.int64),
            columns["choices"][rows],
            lengths.astype(np.int32),
        )
        if not self._draws_on_device:
            drawn = torch.empty(len(rows), dtype=torch.int64)
            on_host = (torch.from_numpy(parameter) for parameter in parameters)
            self._kernels.sample(drawn, logits_SV.cpu(), *on_host, self._vocab_size)
            tokens.copy_(drawn)
            return
        on_device = (torch.from_numpy(parameter).to(logits_SV.device) for parameter in parameters)
        self._kernels.sample(tokens, logits_SV, *on_device, self._vocab_size)

    def _count(self, rows: Array, flags: Array, tokens: torch.Tensor) -> None:
        places = np.nonzero(flags & RowFlag.PENALTIES)[0]
        if len(places):
            self._penalties.count(rows[places].tolist(), tokens[_index(places, tokens.device)])


def _index(places: Array, device: torch.device) -> torch.Tensor:
    """Places as the device's own index tensor: int64, which every device indexes with."""
    return torch.from_numpy(places.astype(np.int64)).to(device)
