"""AMD devices: the kernel's compute driver first, then torch.cuda of a HIP build."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ...ipc.facts import DeviceHealth, DeviceProfile, Feature
from .contract import Clause, FoundDevice, Look
from .cuda import launch_limits, pci_bus_id
from .drm_health import drm_health
from .host import Host
from .torch_accelerator import (
    TorchAccelerator,
    capability,
    detected,
    torch_version,
    uuid_text,
    without_suffix,
)
from .versions import ROCM_DRIVER_MINIMA, is_older, parts

_AMD = "0x1002"
_KFD = "/dev/kfd"
_GENERIC = {
    "gfx9-generic": r"gfx90[0469]|gfx90c",
    "gfx9-4-generic": r"gfx94[0-2]|gfx950",
    "gfx10-1-generic": r"gfx101[0-3]",
    "gfx10-3-generic": r"gfx103[0-6]",
    "gfx11-generic": r"gfx110[0-3]|gfx115[0-3]",
    "gfx12-generic": r"gfx120[01]",
}
"""Processors that code for a generic target runs on. LLVM, "User Guide for AMDGPU Backend", generic processors."""

_DATA_CENTRE = ("gfx90a", "gfx942", "gfx950")
_FP8 = {
    "gfx942": {Feature.FP8_E4M3, Feature.FP8_E5M2},
    "gfx950": {Feature.FP8_E4M3, Feature.FP8_E5M2},
    "gfx1200": {Feature.FP8_E4M3, Feature.FP8_E5M2},
    "gfx1201": {Feature.FP8_E4M3, Feature.FP8_E5M2},
}
"""With matrix instructions for it. AMD, instruction set documents of CDNA 3, CDNA 4 and RDNA 4."""


class RocmPlatform(TorchAccelerator):
    """AMD."""

    name = "rocm"
    vendor = "AMD"
    device_type = "cuda"  # torch's HIP build answers to this name
    collectives = "nccl"  # and RCCL to this one
    graph_classes = ("CUDAGraph",)
    visibility = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    declines = {Clause.MEMORY_HOLDERS: "the kernel shows no memory by process that another process may read"}

    def look(self) -> Look:
        names = _gpu_nodes(self.host)
        cards = [card for card in self.host.cards() if card.vendor == _AMD]
        if not names and not cards:
            if self.host.is_wsl and self.host.exists("/dev/dxg") and self.host.exists("/opt/rocm"):
                return Look(hardware="a device by way of Windows may be there")
            return Look(hardware=None, obstacle="no AMD device: no GPU under /sys/class/kfd and no AMD card on the bus")
        seen = f"{len(names) or len(cards)} x AMD {', '.join(dict.fromkeys(names)) or 'device'}"
        if not self.host.exists(_KFD):
            return Look(
                hardware=seen,
                obstacle=f"{seen}, but {_KFD} is not there: install AMD's amdgpu driver with ROCm; in a container, "
                f"start it with --device {_KFD} --device /dev/dri",
            )
        if not self.host.may_use(_KFD):
            return Look(
                hardware=seen,
                obstacle=f"{seen}, but this user may not open {_KFD}: add the user to the groups render and video",
            )
        return Look(hardware=seen)

    def module(self) -> Any:
        import torch

        return torch.cuda

    def misbuilt(self) -> str | None:
        import torch

        if torch.version.hip is not None:
            return None
        built = "CUDA" if torch.version.cuda else "CPUs"
        return f"PyTorch {torch.__version__} is built for {built}, not for ROCm: install its ROCm build (pytorch.org)"

    def outdated(self) -> str | None:
        import torch

        runtime = str(torch.version.hip)
        installed = driver_version(self.host)
        minimum = ROCM_DRIVER_MINIMA.get(".".join(map(str, parts(runtime)[:2])))
        if installed is None or minimum is None or not is_older(installed, minimum):
            return None
        return (
            f"the amdgpu driver {installed} is too old: PyTorch {torch.__version__} uses ROCm {runtime}, which needs "
            f"driver {minimum} or newer; update the driver, or install a PyTorch for an older ROCm"
        )

    def unsupported(self, index: int) -> str | None:
        properties = self.module().get_device_properties(index)
        architecture = without_suffix(properties.gcnArchName)
        built = [without_suffix(name) for name in self.module().get_arch_list()]
        if has_code(built, architecture):
            return None
        return (
            f"{properties.name} is {architecture}, and PyTorch {torch_version()} holds code for "
            f"{', '.join(built) or 'nothing'}: install a PyTorch build for {architecture}"
        )

    def describe(self, index: int) -> FoundDevice:
        properties = self.module().get_device_properties(index)
        architecture = without_suffix(properties.gcnArchName)
        is_integrated = bool(getattr(properties, "is_integrated", False))
        return FoundDevice(
            index=index,
            name=properties.name,
            uuid=uuid_text(getattr(properties, "uuid", None), "GPU-"),
            memory_bytes=int(properties.total_memory),
            is_integrated=is_integrated and architecture not in _DATA_CENTRE,  # MI300A shares memory by design
            note=architecture,
        )

    def profile(self, index: int) -> DeviceProfile:
        import torch

        properties = self.module().get_device_properties(index)
        device, bus = self.describe(index), pci_bus_id(properties)
        is_shared = bool(getattr(properties, "is_integrated", False))
        profile = DeviceProfile(
            platform=self.name,
            vendor=self.vendor,
            name=device.name,
            index=index,
            uuid=device.uuid,
            pci_bus_id=bus,
            driver=driver_version(self.host),
            runtime=torch.version.hip,
            memory_bytes=device.memory_bytes,
            memory_is_shared=is_shared,
            is_integrated=device.is_integrated,
            libraries=self.libraries() | {"rocm": str(torch.version.hip)},
            capability=self._capability(properties, device),
            **self.host.pcie(bus),
        )
        return detected(profile)

    def _capability(self, properties: Any, device: FoundDevice) -> Any:
        architecture = without_suffix(properties.gcnArchName)
        features = {Feature.FP64, Feature.FP16, Feature.INT8, Feature.ASYNC_ALLOCATION}
        if self.module().is_bf16_supported(including_emulation=False):
            features.add(Feature.BF16)
        features |= _FP8.get(architecture, set()) | self.common_features((device,))
        return capability(architecture, features=frozenset(features), **launch_limits(properties))

    def health_reader(self, index: int) -> Callable[[], DeviceHealth]:
        bus = pci_bus_id(self.module().get_device_properties(index))
        return lambda: drm_health(self.host, bus)


def _gpu_nodes(host: Host) -> list[str]:
    """Architectures of the GPUs among the compute driver's nodes; processors have no SIMD units there."""
    found = []
    for folder in host.glob("/sys/class/kfd/kfd/topology/nodes/*"):
        text = host.read(f"/sys/class/kfd/kfd/topology/nodes/{folder.name}/properties") or ""
        values = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
        if values.get("simd_count", "0") != "0":
            found.append(gfx_name(values.get("gfx_target_version", "")))
    return found


def gfx_name(version: str) -> str:
    """The compiler's name of a target version, such as gfx90a of "90010": major, minor and stepping, two digits each
    but the first, of which the last two are written in hexadecimal.
    """
    if not version.isdigit():
        return "device"
    number = int(version)
    return f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}"


def driver_version(host: Host) -> str | None:
    """Of AMD's packaged driver; the one that comes with the kernel has no version of its own."""
    return host.read("/sys/module/amdgpu/version")


def has_code(built: Sequence[str], architecture: str) -> bool:
    """Whether a build holds code for the architecture itself or for a generic target that covers it."""
    return architecture in built or any(
        re.fullmatch(pattern, architecture) for name, pattern in _GENERIC.items() if name in built
    )
