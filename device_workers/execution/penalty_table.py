"""Token counts of the rows that ask for penalties: a pooled table on the device, grown by need.

P entries, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from ..memory.staging import HostLink
from .row_table import History


class PenaltyTable:
    """Entries are taken when a penalised row starts and released when it is freed."""

    def __init__(self, vocab_size: int, device: torch.device, link: HostLink) -> None:
        self._vocab_size = vocab_size
        self._link = link
        self._entry_of: dict[int, int] = {}
        self._free: list[int] = []
        self.output_counts_PV = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.in_prompt_PV = torch.zeros(0, vocab_size, dtype=torch.uint8, device=device)

    def release(self, rows: list[int]) -> None:
        for row in rows:
            entry = self._entry_of.pop(row, None)
            if entry is not None:
                self._free.append(entry)

    def clear(self) -> None:
        self.release(list(self._entry_of))

    def take(self, history: History) -> None:
        """Start counting for a row, from what it has seen already."""
        self.release([history.row])
        if not self._free:
            self._grow()
        entry = self._free.pop()
        self._entry_of[history.row] = entry
        output_ids = history.output_ids[history.output_ids < self._vocab_size]
        prompt_ids = history.prompt_ids[history.prompt_ids < self._vocab_size]
        counts = np.bincount(output_ids, minlength=self._vocab_size).astype(np.int32)
        self.output_counts_PV[entry] = self._link.send(counts)
        self.in_prompt_PV[entry] = 0
        self.in_prompt_PV[entry, self._link.send(prompt_ids.astype(np.int64))] = 1

    def entries(self, rows: list[int]) -> torch.Tensor:
        return self._link.send(np.array([self._entry_of[row] for row in rows], np.int64))

    def count(self, rows: list[int], tokens: torch.Tensor) -> None:
        """Add one sampled token per row (broken rows, negative, count nothing)."""
        ones = (tokens >= 0).to(torch.int32)
        self.output_counts_PV.index_put_((self.entries(rows), tokens.clamp(min=0)), ones, accumulate=True)

    def _grow(self) -> None:
        begin, added = len(self.output_counts_PV), max(4, len(self.output_counts_PV))
        more = torch.zeros(added, self._vocab_size, dtype=torch.int32, device=self.output_counts_PV.device)
        self.output_counts_PV = torch.cat((self.output_counts_PV, more))
        self.in_prompt_PV = torch.cat((self.in_prompt_PV, more.to(torch.uint8)))
        self._free.extend(range(begin, begin + added))
