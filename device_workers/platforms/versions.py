"""Versions of drivers, runtimes and systems below which a platform is refused, each with the vendor's document.

A minimum that no vendor document states is not here.
"""

from __future__ import annotations

import re

CUDA_DRIVER_MINIMA = {11: "450.80.02", 12: "525.60.13", 13: "580"}
"""Oldest Linux driver by the major version of the CUDA toolkit. CUDA Compatibility, "Minor Version Compatibility",
table 1 (docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html)."""

ROCM_DRIVER_MINIMA = {
    "6.0": "5.6",
    "6.1": "5.7",
    "6.2": "6.0",
    "6.3": "6.1",
}
"""Oldest amdgpu kernel driver that a ROCm user space was tested with. "User and kernel-space support matrix" of ROCm
6.3 (rocm.docs.amd.com/projects/install-on-linux). Releases that are not in it are not checked."""

INTEL_KERNEL_MINIMUM = "5.15"
"""Oldest Linux kernel. "Getting Started on Intel GPU", hardware prerequisite (docs.pytorch.org)."""

CANN_MINIMA = {"2.6": "8.2", "2.8": "8.3", "2.12": "8.5"}
"""CANN release by torch-npu release: the matching table of torch-npu's own package description. Others are not
checked."""

MACOS_MINIMUM = "14.0"
"""Oldest macOS. "Accelerated PyTorch training on Mac", requirements for PyTorch 2.11 (developer.apple.com/metal)."""

OLDEST_TRITON_CAPABILITY = (8, 0)
"""Older NVIDIA devices run in basic mode: our Triton kernels are neither tuned nor tested for them."""


def parts(version: str) -> tuple[int, ...]:
    """The numbers of a version, as many as it begins with: "580.159.04" is (580, 159, 4), "8.0.RC3" is (8, 0)."""
    found = re.match(r"\d+(\.\d+)*", version.strip())
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def is_older(installed: str, minimum: str) -> bool:
    """Whether the installed version is below the minimum; one that holds no number is not judged."""
    have, want = parts(installed), parts(minimum)
    if not have:
        return False
    width = max(len(have), len(want))
    return have + (0,) * (width - len(have)) < want + (0,) * (width - len(want))
