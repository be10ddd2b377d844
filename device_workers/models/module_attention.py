"""The attention function that transformers' modules call where we decode: our paged attention.

Each attention module of a served model carries its own `PagedLayer`; so engines of one process share nothing.
T tokens of a step, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...kernels.implementation import Kernel
from .decoder import StepTensors
from .module_config import LayerAttention

PAGED = "trimaran_paged"
_CARRIED = "trimaran_attention"

Cache = tuple[tuple[torch.Tensor, torch.Tensor], ...]


class Step:
    """The batch that a forward pass is about, for its attention layers."""

    def __init__(self) -> None:
        self._now: tuple[StepTensors, Cache, torch.Tensor | None, torch.Tensor, Callable[[], None]] | None = None

    def begin(self, batch: StepTensors, cache: Cache, on_layer: Callable[[], None]) -> None:
        # A step that the host knows has no padding; to ask the device would be to wait for it.
        places = None if batch.host is not None else (batch.slots >= 0).nonzero().flatten()
        slots = batch.slots if places is None else batch.slots[places]
        self._now = (batch, cache, places, slots.long(), on_layer)

    def end(self) -> None:
        self._now = None

    def attend(
        self,
        kernel: Kernel,
        index: int,
        layer: LayerAttention,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        scale: float,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write keys and values, and attend over the cache."""
        assert self._now is not None, "attention outside a step"
        batch, cache, places, slots, on_layer = self._now
        for cached, new in zip(cache[index], (k_TGD, v_TGD), strict=True):
            cached.flatten(0, 1)[slots] = (new if places is None else new[places]).to(cached.dtype)
        out_THD = torch.empty_like(q_THD)
        lengths = (batch.block_tables, batch.rows, batch.query_starts, batch.kv_lengths)
        more = (layer.soft_cap, sinks_H) if layer.soft_cap or sinks_H is not None else ()
        own = kernel(out_THD, q_THD, *cache[index], *lengths, scale, layer.window, batch.host, *more)
        on_layer()
        return out_THD if own is None else own


class PagedLayer:
    """What one attention module calls."""

    def __init__(self, step: Step, kernel: Kernel, index: int, layer: LayerAttention) -> None:
        self._step = step
        self._kernel = kernel
        self._index = index
        self._layer = layer

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """`[1, T, H, D]` of `[1, H, T, D]` queries and `[1, G, T, D]` keys and values."""
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        attended = self._step.attend(self._kernel, self._index, self._layer, q.contiguous(), k, v, scale, sinks)
        return attended.unsqueeze(0)


def carry(module: torch.nn.Module, layer: PagedLayer) -> None:
    """From now on `module` attends by `layer`."""
    setattr(module, _CARRIED, layer)


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Window, soft cap and all else were read off a traced run of the same module."""
    assert attention_mask is None, "a mask for paged attention"
    layer: PagedLayer = getattr(module, _CARRIED)
    return layer(query, key, value, scaling, s_aux), None


def register() -> None:
    """Make the function known to transformers. No mask function goes with it: it then makes no masks."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, _paged_attention)
