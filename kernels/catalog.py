"""Every implementation by name, in order of preference within its kernel. The only file that names them.

Importing this file imports no torch: each loader does its imports when called.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..ipc.facts import AttentionStrategy, DeviceProfile, Feature, Problem
from .implementation import (
    DeclaredImplementation,
    FunctionKernel,
    Implementation,
    Kernel,
    KernelMetadata,
    Loader,
    Services,
)
from .in_triton.configurations import configuration

if TYPE_CHECKING:
    from .in_cpp.library import Library


def _library(services: Services) -> Library:
    from .in_cpp.library import open_library

    return open_library(services.cache_dir, services.num_threads, services.warn)


def _cpp_embed(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_cpp.launches import CppEmbed

    return CppEmbed(_library(services))


def _cpp_rms_norm(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_cpp.launches import CppRmsNorm

    return CppRmsNorm(_library(services))


def _cpp_fused_add_rms_norm(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_cpp.launches import CppFusedAddRmsNorm

    return CppFusedAddRmsNorm(_library(services))


def _cpp_rotary_and_kv_write(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_cpp.launches import CppRotaryAndKvWrite

    return CppRotaryAndKvWrite(_library(services))


def _cpp_silu_and_mul(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_cpp.launches import CppSiluAndMul

    return CppSiluAndMul(_library(services))


def _cpp_linear(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_cpp.launches import CppLinear

    return CppLinear(_library(services), problem.batch_invariant)


def _cpp_paged_attention(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_cpp.launches import CppPagedAttention

    return CppPagedAttention(_library(services), problem.batch_invariant)


def _cpp_greedy_sample(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_cpp.launches import CppGreedySample

    return CppGreedySample(_library(services))


def _cpp_sample(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_cpp.launches import CppSample

    return CppSample(_library(services))


def _triton_embed(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_triton.embed import TritonEmbed

    return TritonEmbed(configuration("embed", profile.capability))


def _triton_rms_norm(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_triton.norms import TritonRmsNorm

    return TritonRmsNorm(configuration("rms_norm", profile.capability), profile.capability.architecture)


def _triton_fused_add_rms_norm(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_triton.norms import TritonFusedAddRmsNorm

    return TritonFusedAddRmsNorm(configuration("rms_norm", profile.capability), profile.capability.architecture)


def _triton_linear(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_triton.linear import TritonLinear

    return TritonLinear(profile.capability, services.device)


def _triton_rotary_and_kv_write(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_triton.rotary import TritonRotaryAndKvWrite

    return TritonRotaryAndKvWrite(configuration("rotary_and_kv_write", profile.capability))


def _triton_silu_and_mul(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_triton.activation import TritonSiluAndMul

    return TritonSiluAndMul(configuration("silu_and_mul", profile.capability), profile.capability.architecture)


def _triton_paged_attention_tiled(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_triton.paged_attention import TritonPagedAttentionTiled

    chosen = configuration("paged_attention_tiled", profile.capability)
    return TritonPagedAttentionTiled(chosen, profile, problem, services.device)


def _triton_paged_attention_bulk(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_triton.paged_attention import TritonPagedAttentionBulk

    chosen = configuration("paged_attention_bulk", profile.capability)
    return TritonPagedAttentionBulk(chosen, profile, problem, services.device)


def _triton_paged_attention_lean(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_triton.paged_attention import TritonPagedAttentionLean

    chosen = configuration("paged_attention_lean", profile.capability)
    return TritonPagedAttentionLean(chosen, profile, problem, services.device)


def _triton_greedy_sample(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_triton.sampling import TritonGreedySample

    return TritonGreedySample(configuration("greedy_sample", profile.capability), problem, services.device)


def _triton_sample(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_triton.sampling import TritonSample

    chosen = configuration("sample", profile.capability)
    return TritonSample(chosen, profile.capability, problem, services.device)


def _triton_apply_penalties(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_triton.penalties import TritonApplyPenalties

    return TritonApplyPenalties(configuration("apply_penalties", profile.capability))


def _triton_token_logprobs(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_triton.logprobs import TritonTokenLogprobs

    return TritonTokenLogprobs(configuration("token_logprobs", profile.capability))


def _triton_quantize_fp8(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_triton.quantize_fp8 import TritonQuantizeFp8

    return TritonQuantizeFp8(configuration("quantize_fp8", profile.capability))


def _triton_norm_linear(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_triton.fused_linears import TritonNormLinear

    return TritonNormLinear(configuration("norm_linear", profile.capability), profile.capability.architecture)


def _triton_norm_gate_up(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_triton.fused_linears import TritonNormGateUp

    return TritonNormGateUp(configuration("norm_gate_up", profile.capability), profile.capability.architecture)


def _triton_linear_add(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_triton.fused_linears import TritonLinearAdd

    return TritonLinearAdd(configuration("linear_add", profile.capability), profile.capability.architecture)


def _triton_decode_attention(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_triton.decode_attention import TritonDecodeAttention

    chosen = configuration("decode_attention", profile.capability)
    return TritonDecodeAttention(chosen, profile, problem, services.device)


def _gathered_attention(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_torch.gathered_attention import gathered_attention

    return FunctionKernel(gathered_attention)


def _plain_embed(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .reference.embed import embed

    return FunctionKernel(embed)


def _plain_rms_norm(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .reference.rms_norm import rms_norm

    return FunctionKernel(rms_norm)


def _plain_fused_add_rms_norm(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .reference.rms_norm import fused_add_rms_norm

    return FunctionKernel(fused_add_rms_norm)


def _plain_rotary_and_kv_write(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .reference.rotary import rotary_and_kv_write

    return FunctionKernel(rotary_and_kv_write)


def _plain_silu_and_mul(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .reference.activation import silu_and_mul

    return FunctionKernel(silu_and_mul)


def _plain_linear(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .reference.linear import ReferenceLinear

    return ReferenceLinear(services.device)


def _plain_paged_attention(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .reference.attention import paged_attention

    return FunctionKernel(paged_attention)


def _plain_greedy_sample(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .reference.sample import greedy_sample

    return FunctionKernel(greedy_sample)


def _plain_sample(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .reference.sample import sample

    return FunctionKernel(sample)


def _plain_apply_penalties(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .reference.penalties import apply_penalties

    return FunctionKernel(apply_penalties)


def _plain_token_logprobs(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .reference.logprobs import token_logprobs

    return FunctionKernel(token_logprobs)


def _plain_quantize_fp8(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .reference.quantize_fp8 import quantize_fp8

    return FunctionKernel(quantize_fp8)


def _plain_norm_linear(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .reference.fused_linears import norm_linear

    return FunctionKernel(norm_linear)


def _plain_norm_gate_up(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .reference.fused_linears import norm_gate_up

    return FunctionKernel(norm_gate_up)


def _plain_linear_add(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .reference.fused_linears import linear_add

    return FunctionKernel(linear_add)


def _plain_decode_attention(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .reference.decode_attention import decode_attention

    return FunctionKernel(decode_attention)


_FLOATS = frozenset({"float32", "bfloat16", "float16"})


@dataclass(frozen=True, kw_only=True)
class _CppMetadata(KernelMetadata):
    """What the C++ kernels ask beyond the usual: an even number of inputs of every weight."""

    even_inputs: bool = False

    def misfit(self, profile: DeviceProfile, problem: Problem) -> str | None:
        general = KernelMetadata.misfit(self, profile, problem)
        if general is not None:
            return general
        if self.even_inputs and any(size % 2 for size in _weight_inputs(problem)):
            return f"needs even numbers of inputs, weights have {sorted(_weight_inputs(problem))}"
        return None


def _weight_inputs(problem: Problem) -> set[int]:
    return {problem.hidden_size, problem.intermediate_size, problem.num_heads * problem.head_dim}


def _cpp(name: str, loader: Loader, **more: Any) -> DeclaredImplementation:
    metadata = _CppMetadata(
        platforms=frozenset({"cpu"}), features=frozenset({Feature.CPP_COMPILER}), dtypes=_FLOATS, **more
    )
    return DeclaredImplementation(name=f"cpp_{name}", kernel=name, loader=loader, metadata=metadata)


_NEVER_ON = frozenset({"cpu", "null"})
"""Triton has no compiler for processors."""


def _triton(
    name: str, loader: Loader, *, suffix: str = "", features: frozenset[Feature] = frozenset(), **more: Any
) -> DeclaredImplementation:
    metadata = KernelMetadata(
        not_platforms=_NEVER_ON, features=frozenset({Feature.TRITON}) | features, dtypes=_FLOATS, **more
    )
    return DeclaredImplementation(name=f"triton_{name}{suffix}", kernel=name, loader=loader, metadata=metadata)


def _triton_attention(loader: Loader, suffix: str, strategy: AttentionStrategy, **more: Any) -> DeclaredImplementation:
    return _triton(
        "paged_attention",
        loader,
        suffix=suffix,
        strategy=strategy,
        max_head_dim=256,
        same_kv_dtype=True,
        depends_on_batch=True,
        **more,
    )


def _plain(name: str, loader: Loader, **more: Any) -> DeclaredImplementation:
    metadata = KernelMetadata(**more)
    return DeclaredImplementation(name=f"plain_{name}", kernel=name, loader=loader, metadata=metadata)


_TRITON_ATTENTION_BULK = _triton_attention(
    _triton_paged_attention_bulk,
    "_bulk",
    AttentionStrategy.BULK_COPY,
    features=frozenset({Feature.BULK_TENSOR_COPY}),
    block_sizes=frozenset({16, 32, 64, 128}),
    head_dim_multiple=8,
    min_shared_memory_bytes=112 << 10,
    not_offered={"sm_120": "the assembler makes each bulk copy a call through the stack there"},
)
_TRITON_ATTENTION_TILED = _triton_attention(
    _triton_paged_attention_tiled, "_tiled", AttentionStrategy.TILED, min_shared_memory_bytes=56 << 10
)


def _cudnn_attention(rest: DeclaredImplementation, suffix: str) -> DeclaredImplementation:
    """Long first chunks by cuDNN, all else by another, whose strategy it follows and whose demands it has too."""

    def load(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
        from .in_torch.first_chunk_attention import FirstChunkAttention

        least_tokens = configuration("first_chunk_attention", profile.capability)["least_tokens"]
        return FirstChunkAttention(rest.load(profile, problem, services), least_tokens)

    metadata = replace(
        rest.metadata,
        platforms=frozenset({"cuda"}),
        min_compute_capability="8.0",
        dtypes=frozenset({"bfloat16", "float16"}),
        head_dim_multiple=8,
        max_head_dim=128,
        uses=frozenset({rest.name}),
    )
    return DeclaredImplementation(
        name=f"cudnn_paged_attention{suffix}", kernel="paged_attention", loader=load, metadata=metadata
    )


_GATHERED_ATTENTION = DeclaredImplementation(
    name="gathered_attention",
    kernel="paged_attention",
    loader=_gathered_attention,
    metadata=KernelMetadata(strategy=AttentionStrategy.PLAIN, depends_on_batch=True, takes_caps_and_sinks=True),
)

CATALOG: tuple[Implementation, ...] = (
    _cpp("embed", _cpp_embed),
    _triton("embed", _triton_embed),
    _plain("embed", _plain_embed),
    _cpp("rms_norm", _cpp_rms_norm),
    _triton("rms_norm", _triton_rms_norm),
    _plain("rms_norm", _plain_rms_norm),
    _cpp("fused_add_rms_norm", _cpp_fused_add_rms_norm),
    _triton("fused_add_rms_norm", _triton_fused_add_rms_norm),
    _plain("fused_add_rms_norm", _plain_fused_add_rms_norm),
    _cpp("linear", _cpp_linear, even_inputs=True),
    _triton("linear", _triton_linear, depends_on_batch=True),
    _plain("linear", _plain_linear, depends_on_batch=True),
    _cpp("rotary_and_kv_write", _cpp_rotary_and_kv_write, same_kv_dtype=True),
    _triton("rotary_and_kv_write", _triton_rotary_and_kv_write, kv_dtypes=_FLOATS, max_head_dim=512),
    _plain("rotary_and_kv_write", _plain_rotary_and_kv_write),
    _cpp("silu_and_mul", _cpp_silu_and_mul),
    _triton("silu_and_mul", _triton_silu_and_mul),
    _plain("silu_and_mul", _plain_silu_and_mul),
    _cpp("paged_attention", _cpp_paged_attention, same_kv_dtype=True, strategy=AttentionStrategy.PLAIN),
    _cudnn_attention(_TRITON_ATTENTION_BULK, "_bulk"),
    _TRITON_ATTENTION_BULK,
    _cudnn_attention(_TRITON_ATTENTION_TILED, "_tiled"),
    _TRITON_ATTENTION_TILED,
    _triton_attention(
        _triton_paged_attention_lean, "_lean", AttentionStrategy.LOW_OCCUPANCY, min_shared_memory_bytes=32 << 10
    ),
    _GATHERED_ATTENTION,
    _plain("paged_attention", _plain_paged_attention, depends_on_batch=True, takes_caps_and_sinks=True),
    _cpp("greedy_sample", _cpp_greedy_sample),
    _triton("greedy_sample", _triton_greedy_sample),
    _plain("greedy_sample", _plain_greedy_sample),
    _cpp("sample", _cpp_sample),
    _triton("sample", _triton_sample, features=frozenset({Feature.FP64})),
    _plain("sample", _plain_sample),
    _triton("apply_penalties", _triton_apply_penalties),
    _plain("apply_penalties", _plain_apply_penalties),
    _triton("token_logprobs", _triton_token_logprobs),
    _plain("token_logprobs", _plain_token_logprobs),
    _triton("quantize_fp8", _triton_quantize_fp8, features=frozenset({Feature.FP8_E4M3})),
    _plain("quantize_fp8", _plain_quantize_fp8),
    _triton("norm_linear", _triton_norm_linear, depends_on_batch=True),
    _plain("norm_linear", _plain_norm_linear),
    _triton("norm_gate_up", _triton_norm_gate_up, depends_on_batch=True),
    _plain("norm_gate_up", _plain_norm_gate_up),
    _triton("linear_add", _triton_linear_add, depends_on_batch=True),
    _plain("linear_add", _plain_linear_add),
    _triton(
        "decode_attention",
        _triton_decode_attention,
        max_head_dim=256,
        max_head_bytes=512,
        same_kv_dtype=True,
        depends_on_batch=True,
        not_offered=dict.fromkeys(
            ("gfx1100", "gfx1201"), "keys and values asked for early take more registers than it has"
        ),
    ),
    _plain("decode_attention", _plain_decode_attention),
)
