"""NVIDIA devices: NVML and the driver's libraries first, then torch.cuda of a CUDA build."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from ...ipc.facts import DeviceHealth, DeviceProfile, Feature
from .contract import FoundDevice, Look
from .host import Host
from .nvml import Nvml, open_nvml
from .torch_accelerator import TorchAccelerator, capability, detected, torch_version, uuid_text
from .versions import CUDA_DRIVER_MINIMA, OLDEST_TRITON_CAPABILITY, is_older

_NVIDIA = "0x10de"
_BOARDS = ("Tegra", "Orin", "Thor", "GB10")
"""Names of NVIDIA's own boards, whose integrated GPU is the machine's accelerator."""

_FEATURES = {
    Feature.FP16: (5, 3),
    Feature.INT8: (6, 1),
    Feature.FP16_ATOMICS: (7, 0),
    Feature.BF16: (8, 0),
    Feature.FP8_E4M3: (8, 9),
    Feature.FP8_E5M2: (8, 9),
    Feature.BULK_TENSOR_COPY: (9, 0),
    Feature.BF16_ATOMICS: (9, 0),
}
"""Oldest compute capability with the feature. CUDA C++ Programming Guide, "Compute Capabilities"; PTX ISA for fp8
conversions and the tensor copy."""


class CudaPlatform(TorchAccelerator):
    """NVIDIA."""

    name = "cuda"
    vendor = "NVIDIA"
    device_type = "cuda"
    collectives = "nccl"
    graph_classes = ("CUDAGraph",)
    visibility = ("CUDA_VISIBLE_DEVICES",)

    def look(self) -> Look:
        nvml = open_nvml(self.host)
        devices = [] if nvml is None else nvml.devices()
        if nvml is not None and devices:
            names = ", ".join(dict.fromkeys(device.name for device in devices))
            return Look(hardware=f"{len(devices)} x {names}, driver {nvml.driver_version() or 'unknown'}")
        seen = _nodes(self.host)
        if seen is None:
            return Look(hardware=None, obstacle="no NVIDIA device: no /dev/nvidia*, no NVIDIA card on the bus, no NVML")
        if self.host.load_library("libcuda.so.1") is None:
            return Look(hardware=seen, obstacle=f"{seen}, but the driver's libcuda.so.1 is not: {_cure(self.host)}")
        return Look(hardware=seen)

    def module(self) -> Any:
        import torch

        return torch.cuda

    def misbuilt(self) -> str | None:
        import torch

        if torch.version.cuda is not None:
            return None
        built = "ROCm" if torch.version.hip else "CPUs"
        return f"PyTorch {torch.__version__} is built for {built}, not for CUDA: install its CUDA build (pytorch.org)"

    def outdated(self) -> str | None:
        import torch

        toolkit = str(torch.version.cuda)
        installed = driver_version(self.host)
        minimum = CUDA_DRIVER_MINIMA.get(int(toolkit.split(".", maxsplit=1)[0]))
        if installed is None or minimum is None or not is_older(installed, minimum):
            return None
        return (
            f"the NVIDIA driver {installed} is too old: PyTorch {torch.__version__} uses CUDA toolkit {toolkit}, which "
            f"needs driver {minimum} or newer; update the driver, or install a PyTorch for an older CUDA"
        )

    def unsupported(self, index: int) -> str | None:
        module = self.module()
        major, minor = module.get_device_capability(index)
        built = list(module.get_arch_list())
        if has_code(built, major, minor):
            return None
        name = module.get_device_properties(index).name
        return (
            f"{name} is sm_{major}{minor}, and PyTorch {torch_version()} holds code for "
            f"{', '.join(built) or 'nothing'}: install a PyTorch build for sm_{major}{minor}"
        )

    def basic_mode(self, devices: tuple[FoundDevice, ...]) -> str | None:
        oldest = min((self.module().get_device_capability(device.index) for device in devices), default=None)
        if oldest is not None and tuple(oldest) < OLDEST_TRITON_CAPABILITY:
            wanted = "".join(map(str, OLDEST_TRITON_CAPABILITY))
            return f"kernels made for the device need sm_{wanted}, it is sm_{oldest[0]}{oldest[1]}"
        return super().basic_mode(devices)

    def describe(self, index: int) -> FoundDevice:
        properties = self.module().get_device_properties(index)
        is_board = any(board in properties.name for board in _BOARDS)
        return FoundDevice(
            index=index,
            name=properties.name,
            uuid=uuid_text(getattr(properties, "uuid", None), "GPU-"),
            memory_bytes=int(properties.total_memory),
            is_integrated=bool(getattr(properties, "is_integrated", False)) and not is_board,
            note=f"sm_{properties.major}{properties.minor}",
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
            runtime=torch.version.cuda,
            memory_bytes=device.memory_bytes,
            memory_is_shared=is_shared,
            is_integrated=is_shared,
            libraries=self.libraries() | {"cuda": str(torch.version.cuda)},
            capability=self._capability(properties, device),
            **self.host.pcie(bus),
        )
        return detected(profile)

    def _capability(self, properties: Any, device: FoundDevice) -> Any:
        version = (properties.major, properties.minor)
        features = {feature for feature, oldest in _FEATURES.items() if version >= oldest}
        if version == (9, 0):
            features.add(Feature.WARP_GROUP_MATRIX)  # of this architecture alone; later ones have another instruction
        features |= {Feature.FP64, Feature.ASYNC_ALLOCATION} | self.common_features((device,))
        return capability(
            f"sm_{properties.major}{properties.minor}",
            compute_capability=f"{properties.major}.{properties.minor}",
            features=frozenset(features),
            **launch_limits(properties),
        )

    def health_reader(self, index: int) -> Callable[[], DeviceHealth]:
        nvml, handle = self._board(index)
        return DeviceHealth if nvml is None else lambda: nvml.health(handle)

    def holders_reader(self, index: int) -> Callable[[], dict[str, int]]:
        nvml, handle = self._board(index)
        return dict if nvml is None else lambda: named_holders(self.host, nvml.holders(handle))

    def _board(self, index: int) -> tuple[Nvml | None, Any]:
        properties = self.module().get_device_properties(index)
        nvml = open_nvml(self.host)
        if nvml is None:
            return None, None
        handle = nvml.handle(uuid_text(getattr(properties, "uuid", None), "GPU-"), pci_bus_id(properties))
        return (None, None) if handle is None else (nvml, handle)


def _nodes(host: Host) -> str | None:
    """Traces of NVIDIA hardware on the host itself."""
    if host.glob("/dev/nvidia[0-9]*"):
        return "an NVIDIA device's node is there"
    if any(card.vendor == _NVIDIA for card in host.cards()):
        return "an NVIDIA card is there"
    if host.is_wsl and host.exists("/dev/dxg") and host.exists("/usr/lib/wsl/lib/libcuda.so.1"):
        return "an NVIDIA device by way of Windows is there"
    return None


def _cure(host: Host) -> str:
    if host.is_wsl:
        return "install the NVIDIA driver in Windows, and none in WSL; /usr/lib/wsl/lib must be on the library path"
    return "install the NVIDIA driver; in a container, start it with the NVIDIA runtime (--gpus all)"


def driver_version(host: Host) -> str | None:
    """Of the kernel's driver: from NVML, else from the file that the driver keeps."""
    nvml = open_nvml(host)
    version = None if nvml is None else nvml.driver_version()
    if version is not None:
        return version
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+\.[\d.]+)", host.read("/proc/driver/nvidia/version") or "")
    return found.group(1) if found else None


def has_code(built: Sequence[str], major: int, minor: int) -> bool:
    """Whether a build holds binary code for the device, or PTX that its driver can compile.

    Binary code runs on later minor versions of its major one; PTX on everything later; code whose name ends in a letter
    on its own version alone (CUDA C++ Programming Guide, "Binary Compatibility").
    """
    for name in built:
        kind, _, number = name.partition("_")
        digits = number.rstrip("af")
        if not digits.isdigit():
            continue
        own = (int(digits[:-1]), int(digits[-1]))
        if number.endswith("a") or (kind == "sm" and number.endswith("f")):
            fits = own == (major, minor)
        elif kind == "compute":
            fits = own <= (major, minor)
        else:
            fits = own[0] == major and own[1] <= minor
        if fits:
            return True
    return False


def pci_bus_id(properties: Any) -> str | None:
    """As the kernel writes it: domain, bus, device, function."""
    bus, device = getattr(properties, "pci_bus_id", None), getattr(properties, "pci_device_id", None)
    if bus is None or device is None:
        return None
    return f"{getattr(properties, 'pci_domain_id', 0):04x}:{bus:02x}:{device:02x}.0"


def launch_limits(properties: Any) -> dict[str, int | None]:
    """What torch's device properties say of the processors, by the name of our capability."""
    names = {
        "warp_width": ("warp_size",),
        "num_multiprocessors": ("multi_processor_count",),
        "shared_memory_per_block_bytes": ("shared_memory_per_block_optin", "shared_memory_per_block"),
        "shared_memory_per_multiprocessor_bytes": ("shared_memory_per_multiprocessor",),
        "registers_per_multiprocessor": ("regs_per_multiprocessor",),
        "max_threads_per_multiprocessor": ("max_threads_per_multi_processor",),
        "l2_bytes": ("L2_cache_size",),
    }
    return {
        ours: next((int(getattr(properties, name)) for name in theirs if getattr(properties, name, None)), None)
        for ours, theirs in names.items()
    }


def named_holders(host: Host, holders: dict[int, int]) -> dict[str, int]:
    """Bytes by "pid name", without this process.

    In a container the driver gives the host's pids, which mean nothing here, this process's own among them.
    """
    return {f"{pid} {host.process_name(pid)}": size for pid, size in holders.items() if pid != os.getpid()}
