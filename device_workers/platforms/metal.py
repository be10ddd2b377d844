"""Apple's GPUs by torch.mps. One queue, memory shared with the processor, no graphs and no float64."""

from __future__ import annotations

from typing import Any

from ...ipc.facts import DeviceProfile, Feature
from ..streams.single_queue import SingleQueue
from .contract import Clause, FenceScope, FoundDevice, Look
from .host import Host
from .torch_accelerator import AcceleratorBackend, BackendParts, TorchAccelerator, capability, detected
from .versions import MACOS_MINIMUM, is_older


class MetalPlatform(TorchAccelerator):
    """Apple."""

    name = "metal"
    vendor = "Apple"
    device_type = "mps"
    collectives = None
    graph_classes = ()
    declines = {
        Clause.GRAPH_CAPTURE: "torch.mps records no graphs",
        Clause.STREAM_PRIORITIES: "torch.mps has one queue: first in, first out",
        Clause.CONCURRENT_STREAMS: "torch.mps has one queue: first in, first out",
        Clause.COLLECTIVES: "there is one GPU, and torch.distributed has no library for it",
        Clause.PINNED_MEMORY: "the GPU reads the host's memory itself",
        Clause.ASYNC_COPIES: "memory is shared with the host: copies are done when the call returns",
        Clause.MEMORY_HOLDERS: "Metal does not show memory by process",
        Clause.HEALTH: "macOS shows clocks, power and temperature to the administrator alone",
    }

    def look(self) -> Look:
        if self.host.system != "darwin" or self.host.machine != "arm64":
            return Look(hardware=None, obstacle="no Apple GPU: not macOS on Apple silicon")
        version = self.host.system_version
        if is_older(version, MACOS_MINIMUM):
            return Look(
                hardware="an Apple GPU",
                obstacle=f"macOS {version} is too old: PyTorch's Metal backend needs {MACOS_MINIMUM} or newer; update",
            )
        return Look(hardware="an Apple GPU")

    def module(self) -> Any:
        import torch

        return torch.mps

    def misbuilt(self) -> str | None:
        import torch

        if torch.backends.mps.is_built():
            return None
        return f"PyTorch {torch.__version__} is built without Metal: install the build for macOS on Apple silicon"

    def num_devices(self) -> int:
        import torch

        return int(torch.mps.device_count()) if torch.backends.mps.is_available() else 0

    def basic_mode(self, devices: tuple[FoundDevice, ...]) -> str | None:
        return "Triton has no code for Metal: plain PyTorch is used"

    def describe(self, index: int) -> FoundDevice:
        return FoundDevice(index=index, name=_name(), memory_bytes=int(self.module().recommended_max_memory()))

    def profile(self, index: int) -> DeviceProfile:
        device = self.describe(index)
        features = {Feature.FP16, Feature.BF16} | self.common_features()  # bf16: Metal 3.1, which macOS 14 brings
        profile = DeviceProfile(
            platform=self.name,
            vendor=self.vendor,
            name=device.name,
            index=index,
            runtime=self.host.system_version,
            memory_bytes=device.memory_bytes,
            memory_is_shared=True,
            is_integrated=True,
            libraries=self.libraries(),
            capability=capability("apple_m", features=frozenset(features), num_multiprocessors=_num_cores()),
        )
        return detected(profile)

    def _select(self, index: int) -> None:
        """There is one."""

    def _synchronize(self, index: int) -> None:
        self.module().synchronize()

    def _backend(self, parts: BackendParts) -> AcceleratorBackend:
        return MetalBackend(parts, self.host)


class MetalBackend(AcceleratorBackend):
    """Apple's GPU, live. `total` is what Metal recommends to stay below; free is also bounded by the host's memory."""

    def __init__(self, parts: BackendParts, host: Host) -> None:
        super().__init__(parts, SingleQueue(parts.module))
        self._host = host

    def _free_and_total(self) -> tuple[int, int]:
        total = int(self._module.recommended_max_memory())
        return max(min(total - self._reserved(), self._host.memory_facts().free_bytes), 0), total

    def _reserved(self) -> int:
        return int(self._module.driver_allocated_memory())

    def _allocated(self) -> int:
        return int(self._module.current_allocated_memory())

    def synchronize(self, scope: FenceScope = FenceScope.DEVICE) -> None:
        self._module.synchronize()


def _name() -> str:
    import torch

    return str(torch.backends.mps.get_name()) if hasattr(torch.backends.mps, "get_name") else "Apple GPU"


def _num_cores() -> int | None:
    import torch

    ask = getattr(torch.backends.mps, "get_core_count", None)
    return None if ask is None else int(ask())
