"""A decoder that is a module of transformers, as `execution` knows decoders.

T tokens of a step, R rows whose logits are asked, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...ipc.conditions import Refusal
from ...kernels.implementation import Kernel
from .decoder import StepTensors
from .module_attention import PAGED, Cache, PagedLayer, Step, carry, register
from .module_config import ModuleConfig
from .module_trace import body_of, built, freeze_rotary, quiet


class ModuleActivations:
    """Stands for the buffers of a forward pass, which a module allocates as it goes: `num_bytes` is an estimate,
    all of it still to be had."""

    def __init__(
        self, num_bytes: int, max_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_bytes = self.reserved_bytes = num_bytes
        self.max_rows = max_rows
        self._nothing = torch.empty(0, hidden_size, dtype=dtype, device=device)

    def hidden(self, num_tokens: int) -> tuple[torch.Tensor, None]:
        """Of a step without tokens."""
        assert num_tokens == 0, "hidden states of a module are where it left them"
        return self._nothing, None


class _Made:
    """What a body returns, as heads read it: hidden states, and nothing of all else that the families have."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class _Given(torch.nn.Module):
    """Takes the place of a model's body: its hidden states are those that were given. So the head computes logits of
    chosen tokens with all that the model does to them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    @property
    def decoder(self) -> _Given:
        """Some heads call their body's inner part."""
        return self

    def forward(self, *given: object, **named: object) -> _Made:
        assert self.hidden is not None
        return _Made(self.hidden)


class ModuleDecoder:
    """The model on its device."""

    fuses_decodes = False
    decode_attention: Kernel | None = None

    def __init__(self, config: ModuleConfig, model: Any, attention: Kernel) -> None:
        self._body = body_of(model)
        self._step = Step()
        modules = dict(self._body.named_modules())
        for index, layer in enumerate(config.layers):
            carry(modules[layer.name], PagedLayer(self._step, attention, index, layer))
        self.num_bytes = num_bytes_of(model)
        self._given = _Given()
        prefix = next(name for name, module in model.named_children() if module is self._body)
        setattr(model, prefix, self._given)
        self._head = model

    def forward(
        self, batch: StepTensors, cache: Cache, on_layer: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states `[T, D]` after the last norm. The step's tokens are one text to the module, but for attention
        and positions.
        """
        given = batch.token_ids.long()
        ids = torch.where(given < 0, batch.last_tokens[(-1 - given).clamp(0)].long(), given)
        self._step.begin(batch, cache, on_layer)
        try:
            made = self._body(input_ids=ids[None], position_ids=batch.positions.long()[None], use_cache=False)
        finally:
            self._step.end()
        return made[0][0], None

    def alone(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Hidden states `[T, D]` of one whole text by the module's own attention, without a cache."""
        ids = token_ids_T.long()[None]
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        self._body.set_attn_implementation("eager")
        try:
            mask = torch.ones_like(ids)
            made = self._body(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)
        finally:
            self._body.set_attn_implementation(PAGED)
        return made[0][0]  # type: ignore[no-any-return]

    def hidden(self, num_tokens: int, *, is_decode: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise AssertionError("nothing of a module is recorded")

    def logits(self, residual_RD: torch.Tensor, delta_RD: torch.Tensor | None) -> torch.Tensor:
        """Float32 `[R, V]`."""
        assert delta_RD is None
        self._given.hidden = residual_RD[None]
        try:
            logits: torch.Tensor = self._head(inputs_embeds=residual_RD[None], use_cache=False).logits[0]
        finally:
            self._given.hidden = None
        return logits.float()

    def last_hidden(self, residual_RD: torch.Tensor, delta_RD: torch.Tensor | None) -> torch.Tensor:
        """Float32 `[R, D]`."""
        assert delta_RD is None
        return residual_RD.float()


def load_decoder(directory: Path, dummy_seed: int | None, dtype: torch.dtype, device: torch.device) -> Any:
    """The causal language model with its weights, whose attention is ours. `dummy_seed` None: weights are read.

    Raises Refusal.
    """
    from transformers import AutoModelForCausalLM

    register()
    model = load(AutoModelForCausalLM, directory, dummy_seed, PAGED, dtype, device)
    freeze_rotary(model, model.config)
    return model


def load(
    auto: Any,
    directory: Path,
    dummy_seed: int | None,
    attention: str | None,
    dtype: torch.dtype,
    device: torch.device,
    ignored: tuple[str, ...] = (),
) -> Any:
    """A model by transformers' own loading, from safetensors alone. Raises Refusal for weights that are not the
    model's; without those that begin as `ignored` says it does.
    """
    from transformers import AutoConfig

    quiet()
    if dummy_seed is not None:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(dummy_seed)
            return built(auto, config, attention, dtype, torch.device("cpu")).to(device)
    chosen = {} if attention is None else {"attn_implementation": attention}
    try:
        model, told = auto.from_pretrained(
            directory,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            **chosen,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise Refusal(
            f"transformers cannot load {directory}: {str(error).strip().splitlines()[0]}; download the model again"
        ) from error
    missing = [name for name in told["missing_keys"] if not name.startswith(ignored)]
    wrong = sorted(map(str, {*missing, *(entry[0] for entry in told["mismatched_keys"])}))
    if wrong:
        raise Refusal(
            f"{directory} lacks weights of the model, or they are misshapen: {', '.join(wrong[:8])}; download it again"
        )
    return model.to(device).eval()


def num_bytes_of(model: torch.nn.Module) -> int:
    """Of weights and constants; tied ones count once."""
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())
