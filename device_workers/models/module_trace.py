"""What a module of transformers does, found by running it on the meta device: tensors with shapes and no memory.

Every attention of the run is written down: heads, window, soft cap, sinks, and the mask that transformers itself would
have made of it. What our paged attention would compute otherwise is refused here, by name.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...ipc.conditions import Refusal
from .embedding_files import read_embedding_files
from .module_attention import register
from .module_config import LayerAttention, ModuleConfig

TRACED = "trimaran_traced"
_NUM_TRACED = 2
_HARMLESS = frozenset(
    {
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "use_cache",
    }
)
"""What modules hand down to their attention though it changes nothing there."""
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
_ENCODER_ENDINGS = ("Model", "ForMaskedLM", "ForPreTraining")
_CHANGING_ROPE = ("longrope", "dynamic")
"""Rotary positions that transformers changes by the longest sequence of a batch."""


class Mask:
    """What stands for a mask in a traced run: the window that the mask shows, 0 for all positions."""

    def __init__(self, window: int) -> None:
        self.window = window


class UnknownAttention(Exception):
    """Something a paged attention would compute otherwise; the text says what."""


class Trace:
    """The attention modules of one run, in the order of their calls."""

    def __init__(self, body: torch.nn.Module) -> None:
        self._names = {id(module): name for name, module in body.named_modules()}
        self.layers: list[LayerAttention] = []

    def note(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        options: Mapping[str, Any],
    ) -> None:
        """One call of the attention function. Raises UnknownAttention."""
        if query.shape[:3:2] != (1, _NUM_TRACED) or key.shape[2] != _NUM_TRACED:
            raise UnknownAttention(
                f"attention of {tuple(query.shape)} over {tuple(key.shape)} is not of a text over itself"
            )
        if not query.shape[-1] == key.shape[-1] == value.shape[-1] or key.shape[1] != value.shape[1]:
            raise UnknownAttention(
                f"keys of {key.shape[1]} heads of {key.shape[-1]} and values of {value.shape[1]} heads of "
                f"{value.shape[-1]} do not fit one cache (v_head_dim)"
            )
        name = self._names[id(module)]
        if any(layer.name == name for layer in self.layers):
            raise UnknownAttention(f"{name} is used by several layers, whose caches would be one")
        cap, sinks = options.get("softcap"), options.get("s_aux")
        self.layers.append(
            LayerAttention(
                name=name,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=query.shape[-1],
                window=_window(mask, options.get("sliding_window")),
                soft_cap=float(cap or 0.0),
                has_sinks=sinks is not None,
            )
        )
        if options.get("is_causal", True) is False or getattr(module, "is_causal", True) is False:
            raise UnknownAttention(f"{name} is not causal (is_causal, use_bidirectional_attention)")
        known = _HARMLESS | {"softcap", "s_aux", "sliding_window", "is_causal"}
        for option, given in options.items():
            if option not in known and given is not None and given is not False:
                raise UnknownAttention(f"{name} gives {option} to its attention, which has no such thing here")


def _window(mask: object, named: object) -> int:
    """The mask is what counts in transformers; what the module says must be the same."""
    if not isinstance(mask, Mask):
        raise UnknownAttention("a layer attends without a causal mask, or with one of its own making")
    if named is not None and mask.window != named:
        raise UnknownAttention(
            f"a layer says sliding_window {named}, and its mask shows {mask.window or 'all'} positions"
        )
    return mask.window


_traces: dict[int, Trace] = {}
"""By thread: the run that a traced attention belongs to."""


def _traced_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    _traces[threading.get_ident()].note(module, query, key, value, attention_mask, options)
    return query.transpose(1, 2).contiguous(), None


def traced_mask(*, mask_function: Callable[..., Any], local_size: int | None = None, **rest: Any) -> Mask:
    """The window of a mask, by asking it for a query far behind: it must be of the nearest positions, or of all."""
    far = 3 * (local_size or 0) + 67
    seen = [bool(mask_function(0, 0, torch.tensor(far), torch.tensor(position))) for position in range(far + 2)]
    count = sum(seen)
    if seen != [far - count < position <= far for position in range(far + 2)]:
        raise UnknownAttention(
            "the mask of a layer is neither causal nor a sliding window (attention_chunk_size, is_causal)"
        )
    if count == far + 1:
        return Mask(0)
    # Chunks look like a window from one place: from others they do not.
    near = [bool(mask_function(0, 0, torch.tensor(far + 1), torch.tensor(position))) for position in range(far + 2)]
    if sum(near) != count:
        raise UnknownAttention("the mask of a layer is of chunks (attention_chunk_size)")
    return Mask(count)


def trace_module(directory: Path, values: Mapping[str, Any], reason: str) -> ModuleConfig:
    """Raises Refusal."""
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface

    quiet()
    AttentionInterface.register(TRACED, _traced_attention)
    AttentionMaskInterface.register(TRACED, traced_mask)
    register()
    config = _auto_config(directory)
    named = next(iter(values.get("architectures") or []), None)
    files = read_embedding_files(directory)
    decodes = _is_causal(config, named) and files is None
    if not decodes and files is None and not str(named).endswith(_ENCODER_ENDINGS):
        raise Refusal(
            f"the model's architecture {named or 'is not named and'} is not supported: transformers "
            f"{transformers.__version__} has no causal language model of it; take a decoder or an encoder"
        )
    architecture = str(named or type(config).__name__)
    try:
        if decodes:
            return _trace_decoder(config, architecture, transformers.__version__, reason)
        return _trace_encoder(config, architecture, transformers.__version__, reason, files)
    except UnknownAttention as unknown:
        raise Refusal(
            f"{architecture} cannot be served by transformers' modelling code: {unknown}; choose another model"
        ) from None


def quiet() -> None:
    """Warnings of transformers are about training, or are errors here."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _auto_config(directory: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises whatever its configuration classes do
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Refusal(
            f"transformers cannot read {directory / 'config.json'}: {first}. Code that comes with a model is never "
            "run: choose a model whose family transformers has, or a newer transformers"
        ) from None


def _is_causal(config: Any, named: str | None) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    known: object = NAMES.get(config.model_type)  # a name, or several
    return named is not None and named in (known if isinstance(known, tuple | list) else (known,))


def _trace_decoder(config: Any, architecture: str, version: str, reason: str) -> ModuleConfig:
    from transformers import AutoModelForCausalLM

    odd = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if odd:
        raise UnknownAttention(f"config.json has layer_types {', '.join(odd)}, whose states no paged cache holds")
    model = built(AutoModelForCausalLM, config, TRACED, torch.float32, torch.device("meta"))
    if not getattr(model, "_supports_attention_backend", False):
        raise UnknownAttention(f"{type(model).__name__} of transformers {version} takes no attention function")
    if getattr(model, "_is_stateful", False):
        raise UnknownAttention("it keeps states other than keys and values")
    limit, why = freeze_rotary(model, config)
    body = body_of(model)
    with _counting(body) as counts:
        layers = _run(body)
    num_layers = int(config.num_hidden_layers)
    if len(layers) != num_layers:
        raise UnknownAttention(f"{len(layers)} of its {num_layers} layers attend by transformers' attention interface")
    shapes = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
    if len(shapes) > 1:
        raise UnknownAttention("its layers have keys and values of different shapes")
    heads, kv_heads, head_dim = shapes.pop()
    chosen = getattr(config, "num_experts_per_tok", 0) or 0
    experts = (
        chosen * (3 * (getattr(config, "moe_intermediate_size", None) or config.intermediate_size)) if chosen else 0
    )
    hidden_size = model.get_output_embeddings().weight.shape[1]
    return ModuleConfig(
        architecture=architecture,
        version=version,
        reason=reason,
        dtype=_dtype(config),
        vocab_size=int(config.vocab_size),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=heads,
        max_tokens=limit,
        limit_reason=why,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        channels=sum(counts) // num_layers + experts + 4 * hidden_size + (3 * heads + 2 * kv_heads) * head_dim,
        layers=tuple(layers),
    )


def _trace_encoder(config: Any, architecture: str, version: str, reason: str, files: Any) -> ModuleConfig:
    from transformers import AutoModel

    model = built(AutoModel, config, None, torch.float32, torch.device("meta"))
    limit, why = freeze_rotary(model, config)
    limit -= _padding_positions(model)
    if files is not None and files.max_tokens is not None and files.max_tokens < limit:
        limit, why = files.max_tokens, files.source
    hidden, num_heads = int(config.hidden_size), int(config.num_attention_heads)
    intermediate = int(getattr(config, "intermediate_size", None) or getattr(config, "hidden_dim", None) or 4 * hidden)
    return ModuleConfig(
        architecture=architecture,
        version=version,
        reason=reason,
        dtype=_dtype(config),
        vocab_size=int(config.vocab_size),
        hidden_size=hidden,
        num_layers=int(config.num_hidden_layers),
        num_heads=num_heads,
        max_tokens=limit,
        limit_reason=why,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        channels=12 * hidden + 3 * intermediate,
        files=files,
    )


def built(auto: Any, config: Any, attention: str | None, dtype: torch.dtype, device: torch.device) -> Any:
    """The module with weights that nobody read, for evaluation. Raises Refusal."""
    chosen = {} if attention is None else {"attn_implementation": attention}
    try:
        with device:
            return auto.from_config(config, dtype=dtype, trust_remote_code=False, **chosen).eval()
    except Exception as error:  # a model's constructor may raise anything
        raise _unusable(config, error) from error


def _unusable(config: Any, error: Exception) -> Refusal:
    text = (str(error).strip() or "no reason given").splitlines()[0]
    return Refusal(
        f"transformers' model of type {config.model_type} cannot be used: {type(error).__name__}: {text}; "
        "choose another model"
    )


def body_of(model: Any) -> Any:
    """What makes hidden states: all but the head."""
    body = getattr(model, model.base_model_prefix, None)
    if body is None:
        body = getattr(model, "model", None)
    if body is None or body is model:
        raise UnknownAttention(f"{type(model).__name__} has no body apart from its head")
    return body


def freeze_rotary(model: Any, config: Any) -> tuple[int, str | None]:
    """Positions that a model has, and why they are fewer than it says: rotary positions that change with the longest
    sequence of a batch would give texts that depend on their neighbours, so they stay as they are for short ones.
    """
    limit = int(getattr(config, "max_position_embeddings", None) or 2048)
    why = None
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        named = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        if "longrope" in named:
            original = _original_positions(config)
            if original < limit:
                limit = original
                why = f"longrope changes all positions of a batch beyond original_max_position_embeddings, {original}"
        if isinstance(kinds, dict):
            module.rope_type = {layer: "default" if kind in _CHANGING_ROPE else kind for layer, kind in kinds.items()}
        elif kinds in _CHANGING_ROPE:
            module.rope_type = "default"
    return limit, why


def _original_positions(config: Any) -> int:
    parameters = getattr(config, "rope_parameters", None) or {}
    original = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return int(original or config.max_position_embeddings)


def _padding_positions(model: Any) -> int:
    """Positions that come before a text's first token, where they begin after that of the padding."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


def _run(body: Any) -> list[LayerAttention]:
    trace, thread = Trace(body), threading.get_ident()
    _traces[thread] = trace
    if getattr(body, "_can_set_experts_implementation", bool)():
        body.set_experts_implementation("batched_mm")  # the others look at values
    numbers = torch.zeros(1, _NUM_TRACED, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode():
            body(input_ids=numbers, position_ids=numbers, attention_mask=numbers + 1, use_cache=False)
    except (UnknownAttention, Refusal):
        raise
    except Exception as error:  # a model's code may raise anything
        raise _unusable(body.config, error) from error
    finally:
        del _traces[thread]
    return trace.layers


@contextmanager
def _counting(body: Any) -> Iterator[list[int]]:
    """Elements per token that each innermost module makes."""
    counts: list[int] = []

    def count(module: torch.nn.Module, given: object, made: object) -> None:
        if isinstance(made, torch.Tensor):
            counts.append(made.numel() // _NUM_TRACED)

    hooks = [module.register_forward_hook(count) for module in body.modules() if not list(module.children())]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def _dtype(config: Any) -> str:
    return str(config.dtype or "float32").removeprefix("torch.")
