"""Every implementation by name, in order of preference within its kernel. The only file that names them.

Importing this file imports no torch: each loader does its imports when called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..ipc.facts import DeviceProfile, Feature, Problem
from .implementation import (
    DeclaredImplementation,
    FunctionKernel,
    Implementation,
    Kernel,
    KernelMetadata,
    Loader,
    Services,
)

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

    return CppLinear(_library(services))


def _cpp_paged_attention(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_cpp.launches import CppPagedAttention

    return CppPagedAttention(_library(services))


def _cpp_greedy_sample(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_cpp.launches import CppGreedySample

    return CppGreedySample(_library(services))


def _cpp_sample(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    from .in_cpp.launches import CppSample

    return CppSample(_library(services))


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

    return ReferenceLinear()


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


_CPU_FLOATS = frozenset({"float32", "bfloat16", "float16"})


@dataclass(frozen=True, kw_only=True)
class _CppMetadata(KernelMetadata):
    """What the C++ kernels ask beyond the usual: an even number of inputs of every weight, a cache of the model's
    dtype.
    """

    even_inputs: bool = False
    same_kv_dtype: bool = False

    def misfit(self, profile: DeviceProfile, problem: Problem) -> str | None:
        general = KernelMetadata.misfit(self, profile, problem)
        if general is not None:
            return general
        if self.even_inputs and any(size % 2 for size in _weight_inputs(problem)):
            return f"needs even numbers of inputs, weights have {sorted(_weight_inputs(problem))}"
        if self.same_kv_dtype and problem.kv_dtype not in (None, problem.dtype):
            return f"needs a cache of the model's dtype {problem.dtype}, not {problem.kv_dtype}"
        return None


def _weight_inputs(problem: Problem) -> set[int]:
    return {problem.hidden_size, problem.intermediate_size, problem.num_heads * problem.head_dim}


def _cpp(
    name: str, loader: Loader, *, even_inputs: bool = False, same_kv_dtype: bool = False
) -> DeclaredImplementation:
    metadata = _CppMetadata(
        platforms=frozenset({"cpu"}),
        features=frozenset({Feature.CPP_COMPILER}),
        dtypes=_CPU_FLOATS,
        even_inputs=even_inputs,
        same_kv_dtype=same_kv_dtype,
    )
    return DeclaredImplementation(name=f"cpp_{name}", kernel=name, loader=loader, metadata=metadata)


def _plain(name: str, loader: Loader) -> DeclaredImplementation:
    return DeclaredImplementation(name=f"plain_{name}", kernel=name, loader=loader)


CATALOG: tuple[Implementation, ...] = (
    _cpp("embed", _cpp_embed),
    _plain("embed", _plain_embed),
    _cpp("rms_norm", _cpp_rms_norm),
    _plain("rms_norm", _plain_rms_norm),
    _cpp("fused_add_rms_norm", _cpp_fused_add_rms_norm),
    _plain("fused_add_rms_norm", _plain_fused_add_rms_norm),
    _cpp("linear", _cpp_linear, even_inputs=True),
    _plain("linear", _plain_linear),
    _cpp("rotary_and_kv_write", _cpp_rotary_and_kv_write, same_kv_dtype=True),
    _plain("rotary_and_kv_write", _plain_rotary_and_kv_write),
    _cpp("silu_and_mul", _cpp_silu_and_mul),
    _plain("silu_and_mul", _plain_silu_and_mul),
    _cpp("paged_attention", _cpp_paged_attention, same_kv_dtype=True),
    DeclaredImplementation(name="gathered_attention", kernel="paged_attention", loader=_gathered_attention),
    _plain("paged_attention", _plain_paged_attention),
    _cpp("greedy_sample", _cpp_greedy_sample),
    _plain("greedy_sample", _plain_greedy_sample),
    _cpp("sample", _cpp_sample),
    _plain("sample", _plain_sample),
    _plain("apply_penalties", _plain_apply_penalties),
    _plain("token_logprobs", _plain_token_logprobs),
)
