"""An encoder that is a module of transformers: whole texts in, one vector each out.

T tokens of a step, S texts, D hidden size. Texts of one length go through the module together, so nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .encoder import POOLS, EncoderInputs
from .module_config import ModuleConfig
from .module_decoder import load, num_bytes_of
from .module_trace import freeze_rotary


class ModuleEncoder:
    """From tokens to vectors."""

    def __init__(self, config: ModuleConfig, model: Any) -> None:
        assert config.pooling is not None
        self._model = model
        self._hidden_size = config.hidden_size
        self._pool = POOLS[config.pooling.kind]
        self.num_bytes = num_bytes_of(model)

    def forward(self, inputs: EncoderInputs, on_layer: Callable[[], None]) -> torch.Tensor:
        """`[T, D]`, the last hidden states. `on_layer` is called after each group of texts."""
        parts, places = [], []
        for group in inputs.groups:
            every = inputs.token_ids
            ids = every.view(group.num_texts, -1) if group.places is None else every[group.places]
            made: torch.Tensor = self._model(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
            if group.places is None:
                return made.flatten(0, 1)
            parts.append(made.flatten(0, 1))
            places.append(group.places.flatten())
            on_layer()
        hidden_TD = parts[0].new_empty(len(inputs.token_ids), self._hidden_size)
        hidden_TD[torch.cat(places)] = torch.cat(parts)
        return hidden_TD

    def pool(self, hidden_TD: torch.Tensor, inputs: EncoderInputs) -> torch.Tensor:
        """Float32 `[S, D]`, not normalised."""
        return self._pool(hidden_TD, inputs.counts)


def load_encoder(directory: Path, dummy_seed: int | None, dtype: torch.dtype, device: torch.device) -> Any:
    """The model with its weights, attending as transformers does by itself. Raises Refusal."""
    from transformers import AutoModel

    model = load(AutoModel, directory, dummy_seed, None, dtype, device, ignored=("pooler.",))
    freeze_rotary(model, model.config)
    return model
