"""Steps of a decoder that transformers' modelling code computes, with attention, cache and sampling of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...ipc.facts import Problem
from ...ipc.worker_messages import Settled
from ...kernels.trials import DTYPES
from ..memory.kv_cache import KvCache, KvLayout
from ..models.module_check import check_module, num_check_blocks
from ..models.module_config import MODULE_KERNELS, NO_GRAPHS, ModuleConfig, activation_bytes, module_problem
from ..models.module_decoder import ModuleActivations, ModuleDecoder
from .contract import OnFraction
from .tensor_engine import StepParts, StepsOnTensors


@dataclass(frozen=True, kw_only=True)
class ModuleParts(StepParts):
    """What boot settled before the engine exists. `load_module` gives the model with its weights on the device."""

    config: ModuleConfig
    load_module: Callable[[torch.dtype, torch.device], Any]


class ModuleEngine(StepsOnTensors):
    """A StepEngine. A module's steps are not recorded: it allocates as it goes."""

    def __init__(self, parts: ModuleParts) -> None:
        super().__init__(parts)
        self._module = parts

    @property
    def _kernel_names(self) -> tuple[str, ...]:
        return MODULE_KERNELS

    def _problem(self, settled: Settled) -> Problem:
        return module_problem(self._module.config, self.model, settled)

    def _make_activations(self, settled: Settled, max_sequences: int) -> ModuleActivations:
        num_bytes = activation_bytes(self.model, settled.max_batched_tokens, max_sequences)
        dtype = DTYPES[self.model.dtype]
        return ModuleActivations(num_bytes, max_sequences, self.model.hidden_size, dtype, self._device)

    def _make_layout(self, settled: Settled) -> KvLayout:
        return KvLayout(
            num_layers=len(self._module.config.layers),
            num_kv_heads=self._module.config.num_kv_heads,
            head_dim=self._module.config.head_dim,
            block_size=settled.block_size,
            dtype=DTYPES[self.model.kv_dtype],
        )

    def _load_decoder(self, settled: Settled, on_fraction: OnFraction) -> ModuleDecoder:
        on_fraction("weights", 0.0)
        with torch.inference_mode(False):
            model = self._module.load_module(DTYPES[self.model.dtype], self._device)
        self._parts.backend.synchronize()
        on_fraction("weights", 1.0)
        decoder = ModuleDecoder(self._module.config, model, self._kernels["paged_attention"])
        self._weight_bytes = decoder.num_bytes
        self._check(decoder)
        return decoder

    def _check(self, decoder: ModuleDecoder) -> None:
        """Raises Refusal."""
        config = self._module.config
        cache = KvCache(self._layout, num_check_blocks(self._layout.block_size), self._device)
        check_module(decoder, cache, config.architecture, config.vocab_size, self._device)

    def _refuse_graph(self) -> str:
        return "asked for by --enforce-eager" if self._parts.enforce_eager else NO_GRAPHS
