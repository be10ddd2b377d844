"""Which implementations a platform is judged on, and the problems generated for them. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from ...ipc.facts import DeviceProfile, Feature, Problem
from ...kernels.catalog import CATALOG
from ...kernels.implementation import Implementation
from ...kernels.registry import Registry
from ..platforms.contract import Found, Platform, Refused
from ..platforms.plugins import plugin_kernels
from ..profiles.settling import settle_profile

_NEEDS = {"bfloat16": Feature.BF16, "float16": Feature.FP16}
_NEED_FP8 = frozenset({"quantize_fp8"})
_NEED_FP64 = frozenset({"sample"})
# (head size, query heads per group, key/value heads, block size, intermediate size, rotary size or 0 for all)
_SHAPES = ((64, 3, 2, 16, 200, 0), (128, 1, 2, 32, 352, 0), (40, 4, 1, 8, 96, 0))
_MORE_SHAPES = (
    (80, 7, 1, 16, 130, 0),
    (96, 2, 2, 64, 256, 48),
    (256, 1, 1, 16, 512, 0),
    (32, 8, 2, 4, 64, 16),
    (112, 5, 1, 128, 224, 0),
    (192, 2, 1, 16, 1000, 0),
)


def reference(kernel: str) -> Implementation:
    """The last link of its chain: plain PyTorch, which defines what is right."""
    return Registry(CATALOG).chain(kernel)[-1]


def implementations(platform: Platform, outcome: Found | Refused) -> list[Implementation]:
    """All that the platform may be offered, of the vendor's package and ours, fitting its first device."""
    if isinstance(outcome, Refused) or not platform.computes:
        return []
    profile = judged_profile(platform, outcome)
    known = Registry(CATALOG).kernels
    theirs = [entry for entry in plugin_kernels(known, _ignore) if _is_meant_for(entry, profile)]
    ours = [entry for entry in CATALOG if any(True for _ in fitting(entry, profile, is_thorough=True))]
    return [*theirs, *ours]


def _is_meant_for(entry: Implementation, profile: DeviceProfile) -> bool:
    """Another package's kernel is listed even if it fits no problem, so that nobody believes it was judged."""
    return not entry.metadata.platforms or profile.platform in entry.metadata.platforms


def _ignore(text: str) -> None:
    """A clause of its own judges what packages offer."""


def judged_profile(platform: Platform, found: Found) -> DeviceProfile:
    """As the engine would have it: declared and detected values."""
    return settle_profile(platform.profile(found.devices[0].index), None, False)[0]


def fitting(implementation: Implementation, profile: DeviceProfile, *, is_thorough: bool) -> Iterator[Problem]:
    """The problems that it takes, on a device that has the dtypes."""
    features = profile.capability.features
    if implementation.kernel in _NEED_FP8 and Feature.FP8_E4M3 not in features:
        return
    if implementation.kernel in _NEED_FP64 and Feature.FP64 not in features:
        return  # the engine draws on the host there
    for problem in problems(is_thorough=is_thorough):
        needed = _NEEDS.get(problem.dtype)
        if (needed is None or needed in features) and implementation.misfit(profile, problem) is None:
            yield problem


def problems(*, is_thorough: bool) -> Iterator[Problem]:
    shapes = (*_SHAPES, *_MORE_SHAPES) if is_thorough else _SHAPES
    for head_dim, group, num_kv_heads, block_size, intermediate_size, rotary_dim in shapes:
        for dtype in ("float32", "bfloat16", "float16"):
            yield Problem(
                dtype=dtype,
                kv_dtype=dtype,
                head_dim=head_dim,
                num_heads=group * num_kv_heads,
                num_kv_heads=num_kv_heads,
                block_size=block_size,
                hidden_size=group * num_kv_heads * head_dim,
                intermediate_size=intermediate_size,
                vocab_size=777,
                rotary_dim=rotary_dim,
            )
