"""Huawei Ascend devices: the driver's nodes and CANN first, then torch.npu of the package torch-npu."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ...ipc.facts import DeviceHealth, DeviceProfile, Feature
from .contract import Clause, FoundDevice, Look
from .torch_accelerator import TorchAccelerator, capability, detected
from .versions import CANN_MINIMA, is_older, parts

_DRIVER_FILE = "/usr/local/Ascend/driver/version.info"
_CANN_FILES = (
    "/usr/local/Ascend/ascend-toolkit/latest/version.cfg",
    "/usr/local/Ascend/ascend-toolkit/latest/*-linux/ascend_toolkit_install.info",
    "/usr/local/Ascend/cann/*-linux/ascend_toolkit_install.info",
)
_LIBRARY = "libascendcl.so"


class AscendPlatform(TorchAccelerator):
    """Huawei."""

    name = "ascend"
    vendor = "Huawei"
    device_type = "npu"
    collectives = "hccl"
    graph_classes = ("NPUGraph",)
    visibility = ("ASCEND_RT_VISIBLE_DEVICES",)
    declines = {Clause.MEMORY_HOLDERS: "torch-npu does not show memory by process"}

    def look(self) -> Look:
        nodes = self.host.glob("/dev/davinci[0-9]*")
        if not nodes:
            return Look(hardware=None, obstacle="no Ascend device: no /dev/davinci*")
        seen = f"{len(nodes)} x Ascend device"
        if not self.host.exists("/dev/davinci_manager"):
            return Look(
                hardware=seen,
                obstacle=f"{seen}, but /dev/davinci_manager is not there: in a container, pass it by --device",
            )
        if not any(self.host.may_use(f"/dev/{node.name}") for node in nodes):
            return Look(
                hardware=seen,
                obstacle=f"{seen}, but this user may not open /dev/davinci*: add the user to the group HwHiAiUser",
            )
        if self.host.load_library(_LIBRARY) is None:
            return Look(
                hardware=seen,
                obstacle=f"{seen}, but CANN's {_LIBRARY} is not found: install CANN and source its set_env.sh",
            )
        return Look(hardware=seen)

    def module(self) -> Any:
        import torch

        return torch.npu  # type: ignore[attr-defined]  # there once torch_npu is imported

    def misbuilt(self) -> str | None:
        import torch

        if not self.host.has_module("torch_npu"):
            release = ".".join(map(str, parts(torch.__version__)[:3]))
            return f"torch-npu is not installed: pip install torch-npu=={release}"
        try:
            import torch_npu  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            return (
                f"torch-npu cannot be imported ({error}): it must be made for PyTorch {torch.__version__} and this CANN"
            )
        return None

    def outdated(self) -> str | None:
        import torch

        release = ".".join(map(str, parts(torch.__version__)[:2]))
        installed, minimum = cann_version(self), CANN_MINIMA.get(release)
        if installed is None or minimum is None or not is_older(installed, minimum):
            return None
        driver = driver_version(self) or "unknown"
        return (
            f"CANN {installed} is too old (driver {driver}): torch-npu for PyTorch {torch.__version__} needs CANN "
            f"{minimum} or newer; update CANN, or install the PyTorch that goes with it"
        )

    def describe(self, index: int) -> FoundDevice:
        properties = self.module().get_device_properties(index)
        name = str(getattr(properties, "name", None) or self.module().get_device_name(index))
        memory = getattr(properties, "total_memory", None)
        return FoundDevice(
            index=index, name=name, memory_bytes=None if memory is None else int(memory), note=architecture_of(name)
        )

    def profile(self, index: int) -> DeviceProfile:
        device, properties = self.describe(index), self.module().get_device_properties(index)
        features = {Feature.FP16, Feature.INT8} | self.common_features((device,))
        if self.module().is_bf16_supported():
            features.add(Feature.BF16)
        profile = DeviceProfile(
            platform=self.name,
            vendor=self.vendor,
            name=device.name,
            index=index,
            driver=driver_version(self),
            runtime=cann_version(self),
            memory_bytes=device.memory_bytes,
            memory_is_shared=False,
            is_integrated=False,
            libraries=self.libraries() | self._own_libraries(),
            capability=capability(
                architecture_of(device.name),
                num_multiprocessors=getattr(properties, "cube_core_num", None),
                l2_bytes=getattr(properties, "L2_cache_size", None),
                features=frozenset(features),
            ),
        )
        return detected(profile)

    def _own_libraries(self) -> dict[str, str]:
        found = self.host.package_version("torch-npu")
        return {} if found is None else {"torch-npu": found}

    def health_reader(self, index: int) -> Callable[[], DeviceHealth]:
        module = self.module()
        return lambda: DeviceHealth(compute_utilization=module.utilization(index) / 100)


def driver_version(platform: AscendPlatform) -> str | None:
    return _value(platform.host.read(_DRIVER_FILE), r"Version")


def cann_version(platform: AscendPlatform) -> str | None:
    """Of the toolkit that is installed in its usual place."""
    for pattern in _CANN_FILES:
        for file in platform.host.glob(pattern):
            name = "/" + str(file.relative_to(platform.host.root))
            found = _value(platform.host.read(name), r"(?:runtime_running_version|version)")
            if found is not None:
                return found
    return None


def _value(text: str | None, key: str) -> str | None:
    """Of a line such as `version=8.5.0` or `runtime_running_version=[7.7.0:8.5.0]`: the last version named."""
    found = re.search(rf"^{key}\s*=\s*\[?([^\]\n]+)\]?", text or "", re.MULTILINE)
    return found.group(1).split(":")[-1].strip() if found else None


def architecture_of(name: str) -> str:
    """The family of a product: Ascend910B3 is ascend910b."""
    found = re.match(r"ascend\d+[a-z]*", name.lower().replace(" ", ""))
    return found.group() if found else "ascend"
