"""Intel GPUs: the kernel's graphics nodes and Level Zero first, then torch.xpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...ipc.facts import DeviceHealth, DeviceProfile, Feature
from ..streams.torch_streams import TorchStreams
from .contract import Clause, FoundDevice, Look
from .drm_health import drm_health
from .torch_accelerator import (
    AcceleratorBackend,
    BackendParts,
    TorchAccelerator,
    capability,
    detected,
    uuid_text,
)
from .versions import INTEL_KERNEL_MINIMUM, is_older

_INTEL = "0x8086"
_DRIVERS = ("i915", "xe")
_ARCHITECTURES = (
    ("Data Center GPU Max", "xe_hpc"),
    ("Data Center GPU Flex", "xe_hpg"),
    ("Arc(TM) A", "xe_hpg"),
    ("Arc(TM) B", "xe2_hpg"),
    ("Arc(TM) Pro A", "xe_hpg"),
    ("Arc(TM) Pro B", "xe2_hpg"),
)
"""Micro-architecture by product family, as Intel names both (Intel, "oneAPI GPU Optimization Guide")."""


class XpuPlatform(TorchAccelerator):
    """Intel."""

    name = "xpu"
    vendor = "Intel"
    device_type = "xpu"
    collectives = "xccl"
    graph_classes = ("XPUGraph",)
    visibility = ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")
    declines = {Clause.MEMORY_HOLDERS: "neither torch nor the kernel shows memory by process"}

    def look(self) -> Look:
        cards = [card for card in self.host.cards() if card.vendor == _INTEL and card.driver in _DRIVERS]
        if not cards:
            if self.host.is_wsl and self.host.exists("/dev/dxg") and self.host.load_library("libze_loader.so.1"):
                return Look(hardware="a device by way of Windows may be there")
            return Look(hardware=None, obstacle="no Intel GPU: no card with the driver i915 or xe")
        seen = f"{len(cards)} x Intel GPU ({', '.join(card.device for card in cards)})"
        nodes = self.host.glob("/dev/dri/renderD*")
        if not nodes:
            return Look(
                hardware=seen,
                obstacle=f"{seen}, but /dev/dri/renderD* is not there: in a container, start it with --device /dev/dri",
            )
        if not any(self.host.may_use(f"/dev/dri/{node.name}") for node in nodes):
            return Look(
                hardware=seen,
                obstacle=f"{seen}, but this user may not open /dev/dri/renderD*: add the user to the group render",
            )
        if self.host.load_library("libze_loader.so.1") is None:
            return Look(
                hardware=seen,
                obstacle=f"{seen}, but Level Zero (libze_loader.so.1) is not: install Intel's GPU compute runtime",
            )
        return Look(hardware=seen)

    def module(self) -> Any:
        import torch

        return torch.xpu

    def misbuilt(self) -> str | None:
        import torch

        if torch.version.xpu is not None:
            return None
        return f"PyTorch {torch.__version__} is not built for Intel GPUs: install its XPU build (pytorch.org)"

    def outdated(self) -> str | None:
        import torch

        kernel = self.host.system_version
        if self.host.system != "linux" or not is_older(kernel, INTEL_KERNEL_MINIMUM):
            return None
        return (
            f"the Linux kernel {kernel} is too old: PyTorch {torch.__version__} for Intel GPUs (toolkit "
            f"{torch.version.xpu}) needs kernel {INTEL_KERNEL_MINIMUM} or newer; update the system"
        )

    def describe(self, index: int) -> FoundDevice:
        properties = self.module().get_device_properties(index)
        return FoundDevice(
            index=index,
            name=properties.name,
            uuid=uuid_text(getattr(properties, "uuid", None)),
            memory_bytes=int(properties.total_memory),
            is_integrated=_is_integrated(properties),
            note=architecture_of(properties.name),
        )

    def profile(self, index: int) -> DeviceProfile:
        import torch

        properties, device = self.module().get_device_properties(index), self.describe(index)
        profile = DeviceProfile(
            platform=self.name,
            vendor=self.vendor,
            name=device.name,
            index=index,
            uuid=device.uuid,
            pci_bus_id=self._pci_bus_id(index),
            driver=properties.driver_version,
            runtime=torch.version.xpu,
            memory_bytes=device.memory_bytes,
            memory_is_shared=device.is_integrated,
            is_integrated=device.is_integrated,
            libraries=self.libraries(),
            capability=self._capability(properties, device),
            **self.host.pcie(self._pci_bus_id(index)),
        )
        return detected(profile)

    def _capability(self, properties: Any, device: FoundDevice) -> Any:
        features = {Feature.INT8}
        features |= {Feature.FP16} if properties.has_fp16 else set()
        features |= {Feature.FP64} if properties.has_fp64 else set()
        features |= {Feature.BF16} if getattr(properties, "has_bfloat16_conversions", False) else set()
        return capability(
            architecture_of(device.name),
            warp_width=max(properties.sub_group_sizes, default=None),
            num_multiprocessors=getattr(properties, "gpu_subslice_count", None),
            shared_memory_per_block_bytes=getattr(properties, "local_mem_size", None),
            l2_bytes=getattr(properties, "last_level_cache_size", None),
            features=frozenset(features | self.common_features((device,))),
        )

    def _pci_bus_id(self, index: int) -> str | None:
        """Torch does not say which card a device is; where there is one, it is that one."""
        cards = [card for card in self.host.cards() if card.vendor == _INTEL and card.driver in _DRIVERS]
        return cards[0].pci_bus_id if len(cards) == 1 else None

    def _backend(self, parts: BackendParts) -> AcceleratorBackend:
        return XpuBackend(parts, TorchStreams(parts.module, parts.index))

    def health_reader(self, index: int) -> Callable[[], DeviceHealth]:
        bus = self._pci_bus_id(index)
        return lambda: drm_health(self.host, bus)


class XpuBackend(AcceleratorBackend):
    """Integrated Intel GPUs cannot say how much memory is free."""

    def _free_and_total(self) -> tuple[int, int]:
        try:
            return super()._free_and_total()
        except RuntimeError:
            total = int(self._module.get_device_properties(self._parts.index).total_memory)
            return total - self._reserved(), total


def _is_integrated(properties: Any) -> bool:
    """Torch says so since 2.13; before, a GPU in a processor is not named Arc or Data Center with a number."""
    told = getattr(properties, "is_integrated_gpu", None)
    return bool(told) if told is not None else architecture_of(properties.name) == "xe_lpg"


def architecture_of(name: str) -> str:
    return next((architecture for family, architecture in _ARCHITECTURES if family in name), "xe_lpg")
