"""The C++ kernels as callables with the signatures of their references. Tensors are contiguous in their last
dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .library import DTYPE_CODES, Library

EMBED, NORM, SILU_AND_MUL, ROTARY, LINEAR, ATTENTION, GREEDY, SAMPLE = range(8)


class _CppKernel:
    """What all of them share: the library, no scratch memory of their own, and calls that a recording can keep."""

    workspace_bytes = 0
    capturable = True

    def __init__(self, library: Library) -> None:
        self.library = library


_SMALL_ELEMENTS = 1 << 14


def _code(kernel: int, dtype: torch.dtype) -> int:
    return kernel * 4 + DTYPE_CODES[dtype]


class CppEmbed(_CppKernel):
    def __call__(self, *arguments: Any) -> None:
        out, token_ids, last_tokens, table, first_id = arguments
        numbers = (table.shape[1], first_id, table.shape[0])
        small = out.numel() < _SMALL_ELEMENTS
        self.library.launch(
            _code(EMBED, out.dtype), (out, token_ids, table, last_tokens), numbers, out.shape[0], is_small=small
        )


class CppRmsNorm(_CppKernel):
    def __call__(self, *arguments: Any) -> None:
        out, x, weight, eps = arguments
        channels = x.shape[-1]
        numbers = (channels, channels if x.dim() != 2 else x.stride(0))
        small, num_rows = x.numel() < _SMALL_ELEMENTS, x.numel() // channels
        self.library.launch(_code(NORM, x.dtype), (out, None, x, weight), numbers, num_rows, real=eps, is_small=small)


class CppFusedAddRmsNorm(_CppKernel):
    def __call__(self, *arguments: Any) -> None:
        out, residual, x, weight, eps = arguments
        numbers = (x.shape[-1], x.stride(0))
        tensors, small = (out, residual, x, weight), x.numel() < _SMALL_ELEMENTS
        self.library.launch(_code(NORM, x.dtype), tensors, numbers, x.shape[0], real=eps, is_small=small)


class CppSiluAndMul(_CppKernel):
    def __call__(self, *arguments: Any) -> None:
        out, gate_up = arguments
        small, num_rows = out.numel() < _SMALL_ELEMENTS, out.shape[0]
        self.library.launch(_code(SILU_AND_MUL, out.dtype), (out, gate_up), (out.shape[-1],), num_rows, is_small=small)


class CppRotaryAndKvWrite(_CppKernel):
    def __call__(self, *arguments: Any) -> None:
        q, qkv, positions, slots, cos_sin, k_cache, v_cache, q_norm, k_norm, eps = arguments
        tensors = (q, qkv, positions, slots, cos_sin, k_cache, v_cache, q_norm, k_norm)
        numbers = (q.shape[1], k_cache.shape[2], q.shape[2], cos_sin.shape[1])
        small = qkv.numel() < _SMALL_ELEMENTS
        self.library.launch(_code(ROTARY, q.dtype), tensors, numbers, q.shape[0], real=eps, is_small=small)


class CppPagedAttention(_CppKernel):
    def __init__(self, library: Library, batch_invariant: bool) -> None:
        super().__init__(library)
        self._batch_invariant = batch_invariant

    def __call__(self, *arguments: Any) -> None:
        out, q, k_cache, v_cache, block_tables, rows, query_starts, kv_lengths, scale, window, *_ = arguments
        tensors = (out, q, k_cache, v_cache, block_tables, query_starts, kv_lengths, rows)
        sizes = (q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[1], block_tables.stride(0))
        numbers = (*sizes, window, self._batch_invariant)
        self.library.launch(_code(ATTENTION, q.dtype), tensors, numbers, q.shape[0], kv_lengths.shape[0], real=scale)


class PackedWeight(NamedTuple):
    """A weight in panels, its bias, its sizes, and the dtype its panels have."""

    panels: torch.Tensor
    bias_N: torch.Tensor | None
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.panels.nbytes + (0 if self.bias_N is None else self.bias_N.nbytes)


class CppLinear(_CppKernel):
    def __init__(self, library: Library, batch_invariant: bool) -> None:
        super().__init__(library)
        self._batch_invariant = batch_invariant

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        kept = weight.to(torch.bfloat16) if _is_exact_in_bfloat16(weight) else weight
        num_outputs, num_inputs = weight.shape
        return PackedWeight(self.library.pack(kept), bias, num_outputs, num_inputs, kept.dtype)

    def __call__(self, *arguments: Any) -> None:
        out, x, packed = arguments
        tensors = (out, x, packed.panels, packed.bias_N)
        codes = DTYPE_CODES[out.dtype], DTYPE_CODES[packed.dtype]
        numbers = (packed.num_inputs, packed.num_outputs, x.stride(0), *codes, self._batch_invariant)
        self.library.launch(_code(LINEAR, x.dtype), tensors, numbers, x.shape[0])


def _is_exact_in_bfloat16(weight: torch.Tensor) -> bool:
    """Whether a float32 weight was widened from bfloat16: half the bytes then hold all of it."""
    return weight.dtype is torch.float32 and not bool((weight.view(torch.int32) & 0xFFFF).any())


class CppGreedySample(_CppKernel):
    def __call__(self, *arguments: Any) -> None:
        tokens, logits, vocab_size = arguments
        num_rows = logits.shape[0]
        numbers = (logits.stride(0), vocab_size)
        self.library.launch(GREEDY * 4, (tokens, logits), numbers, num_rows, is_small=num_rows == 1)


class CppSample(_CppKernel):
    def __call__(self, *arguments: Any) -> None:
        tokens, logits, *parameters, vocab_size = arguments
        self.library.launch(SAMPLE * 4, (tokens, logits, *parameters), (logits.stride(0), vocab_size), logits.shape[0])
