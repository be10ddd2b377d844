"""Whole machines that are not here: files under a root, libraries, torch modules, and the platform that looks at them.

`install` patches torch for one test. What only a real device has (tensors of its type) is replaced by CPU tensors: the
platforms' `torch_device` answers "cpu", and `torch.empty` counts for the simulated memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from trimaran.device_workers.platforms.ascend import AscendPlatform
from trimaran.device_workers.platforms.cuda import CudaPlatform
from trimaran.device_workers.platforms.host import Host
from trimaran.device_workers.platforms.metal import MetalPlatform
from trimaran.device_workers.platforms.rocm import RocmPlatform
from trimaran.device_workers.platforms.torch_accelerator import TorchAccelerator
from trimaran.device_workers.platforms.xpu import XpuPlatform

from .memory import empty_on
from .modules import (
    OUT_OF_MEMORY,
    CudaModule,
    Device,
    MpsBackend,
    MpsModule,
    NpuModule,
    State,
    XpuModule,
)
from .nvml import Board, NvmlLibrary

GIB = 1 << 30
MEMINFO = "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n"
H200 = "GPU-11111111-2222-3333-4444-555555555555"
A10 = "GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
VENDORS = ("cuda", "rocm", "xpu", "ascend", "metal")


class Machine:
    """One simulated machine. `platform` is the real platform, looking at it; `devices` and `boards` may be changed."""

    def __init__(self, vendor: str, root: Path) -> None:
        self.vendor = vendor
        self.root = root
        self.files: dict[str, str] = {"/proc/meminfo": MEMINFO, "/proc/version": "Linux version 6.8"}
        self.variables: dict[str, str] = {}
        self.libraries: dict[str, Any] = {}
        self.modules = {"triton"}
        self.system, self.machine, self.system_version = "linux", "x86_64", "6.8.0-generic"
        self.versions: dict[str, str | None] = {"cuda": None, "hip": None, "xpu": None}
        self.devices: list[Device] = []
        self.boards: list[Board] = []
        self.architectures: list[str] = []
        self.state = State(self.devices)
        _BUILDERS[vendor](self)

    def host(self) -> Host:
        for name, text in self.files.items():
            path = self.root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Host(
            root=self.root,
            variables=self.variables,
            system=self.system,
            machine=self.machine,
            system_version=self.system_version,
            load_library=self.libraries.get,
            has_module=lambda name: name in self.modules,
        )

    def link(self, name: str, target: str) -> None:
        """A symbolic link of the machine, by which the kernel names drivers and buses."""
        path, goal = self.root / name.lstrip("/"), self.root / target.lstrip("/")
        goal.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(goal)

    def install(self, patch: pytest.MonkeyPatch, *, beside: bool = False) -> TorchAccelerator:
        """Torch as built for this vendor (`beside`: for this one too), and the platform."""
        for name, version in self.versions.items():
            if version is not None or not beside:
                patch.setattr(torch.version, name, version)
        patch.setattr(TorchAccelerator, "torch_device", lambda platform, index: torch.device("cpu"))
        _INSTALLERS[self.vendor](self, patch)
        if self.devices:
            patch.setattr(torch, "empty", empty_on(self.devices[0].memory, OUT_OF_MEMORY[self.vendor]))
        return _PLATFORMS[self.vendor](self.host())


def _cuda(machine: Machine) -> None:
    machine.boards.append(Board("NVIDIA H200", H200, "0000:19:00.0", 141 * GIB, (9, 0)))
    machine.libraries["libnvidia-ml.so.1"] = NvmlLibrary("580.159.04", machine.boards)
    machine.libraries["libcuda.so.1"] = object()
    machine.versions["cuda"] = "12.8"
    machine.architectures = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
    machine.devices.append(Device(cuda_properties("NVIDIA H200", 9, 0, H200), 141 * GIB))
    folder = "/sys/bus/pci/devices/0000:19:00.0"
    machine.files |= {
        f"{folder}/max_link_speed": "32.0 GT/s PCIe",
        f"{folder}/max_link_width": "16",
        f"{folder}/numa_node": "1",
    }


def cuda_properties(name: str, major: int, minor: int, uuid: str, **values: Any) -> SimpleNamespace:
    told = {
        "name": name,
        "major": major,
        "minor": minor,
        "total_memory": 141 * GIB,
        "is_integrated": 0,
        "multi_processor_count": 132,
        "warp_size": 32,
        "uuid": uuid.removeprefix("GPU-"),
        "L2_cache_size": 60 << 20,
        "shared_memory_per_block": 49152,
        "shared_memory_per_block_optin": 232448,
        "shared_memory_per_multiprocessor": 233472,
        "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": 2048,
        "pci_domain_id": 0,
        "pci_bus_id": 0x19,
        "pci_device_id": 0,
    }
    return SimpleNamespace(**(told | values))


def _rocm(machine: Machine) -> None:
    node = "/sys/class/kfd/kfd/topology/nodes"
    machine.files |= {
        "/dev/kfd": "",
        "/dev/dri/renderD128": "",
        f"{node}/0/properties": "cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0",
        f"{node}/1/properties": "simd_count 304\ngfx_target_version 90402\nvendor_id 4098",
        "/sys/module/amdgpu/version": "6.10.5",
        "/sys/class/drm/card1/device/vendor": "0x1002",
        "/sys/class/drm/card1/device/device": "0x74a1",
    }
    device = "/sys/bus/pci/devices/0000:19:00.0"
    machine.files |= {
        f"{device}/hwmon/hwmon3/power1_average": "230000000",
        f"{device}/hwmon/hwmon3/temp1_input": "51000",
        f"{device}/hwmon/hwmon3/freq1_input": "2100000000",
        f"{device}/gpu_busy_percent": "42",
        f"{device}/mem_busy_percent": "17",
        f"{device}/ras/umc_err_count": "ue: 2\nce: 0",
    }
    machine.versions["hip"] = "6.3.42131"
    machine.architectures = ["gfx900", "gfx90a", "gfx942", "gfx1100"]
    machine.devices.append(Device(rocm_properties("AMD Instinct MI300X", "gfx942:sramecc+:xnack-"), 192 * GIB))


def rocm_properties(name: str, architecture: str, **values: Any) -> SimpleNamespace:
    properties = cuda_properties(name, 9, 4, H200, warp_size=64, gcnArchName=architecture, total_memory=192 * GIB)
    return SimpleNamespace(**(vars(properties) | values))


def _xpu(machine: Machine) -> None:
    machine.files |= {
        "/sys/class/drm/card0/device/vendor": "0x8086",
        "/sys/class/drm/card0/device/device": "0xe20b",
        "/dev/dri/renderD128": "",
    }
    machine.link("/sys/class/drm/card0/device/driver", "/sys/bus/pci/drivers/xe")
    machine.libraries["libze_loader.so.1"] = object()
    machine.versions["xpu"] = "20250300"
    machine.devices.append(Device(xpu_properties("Intel(R) Arc(TM) B580 Graphics", 12 * GIB), 12 * GIB))


def xpu_properties(name: str, memory_bytes: int, **values: Any) -> SimpleNamespace:
    told = {
        "name": name,
        "driver_version": "1.6.33578",
        "total_memory": memory_bytes,
        "is_integrated_gpu": False,
        "has_fp16": True,
        "has_fp64": True,
        "has_bfloat16_conversions": True,
        "sub_group_sizes": [16, 32],
        "gpu_subslice_count": 20,
        "local_mem_size": 131072,
        "last_level_cache_size": 18 << 20,
        "uuid": bytes(range(16)),
    }
    return SimpleNamespace(**(told | values))


def _ascend(machine: Machine) -> None:
    machine.files |= {
        "/dev/davinci0": "",
        "/dev/davinci_manager": "",
        "/usr/local/Ascend/driver/version.info": "Version=25.2.0\n",
        "/usr/local/Ascend/ascend-toolkit/latest/version.cfg": "# versions\nruntime_running_version=[7.7.0:8.5.0]\n",
    }
    machine.libraries["libascendcl.so"] = object()
    machine.modules.add("torch_npu")
    properties = SimpleNamespace(name="Ascend910B3", total_memory=64 * GIB, cube_core_num=20, L2_cache_size=192 << 20)
    machine.devices.append(Device(properties, 64 * GIB))


def _metal(machine: Machine) -> None:
    machine.system, machine.machine, machine.system_version = "darwin", "arm64", "15.3"
    machine.modules.clear()
    machine.devices.append(Device(SimpleNamespace(name="Apple M3 Max"), 12 * GIB))


def _install_cuda(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "cuda", CudaModule(machine.state, machine.architectures))


def _install_xpu(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "xpu", XpuModule(machine.state))


def _install_npu(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    patch.setattr(torch, "npu", NpuModule(machine.state), raising=False)


def _install_mps(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "mps", MpsModule(machine.devices[0].memory))
    patch.setattr(torch.backends, "mps", MpsBackend())


_BUILDERS: Mapping[str, Callable[[Machine], None]] = {
    "cuda": _cuda,
    "rocm": _rocm,
    "xpu": _xpu,
    "ascend": _ascend,
    "metal": _metal,
}
_INSTALLERS: Mapping[str, Callable[[Machine, pytest.MonkeyPatch], None]] = {
    "cuda": _install_cuda,
    "rocm": _install_cuda,
    "xpu": _install_xpu,
    "ascend": _install_npu,
    "metal": _install_mps,
}
_PLATFORMS: Mapping[str, Callable[[Host], TorchAccelerator]] = {
    "cuda": CudaPlatform,
    "rocm": RocmPlatform,
    "xpu": XpuPlatform,
    "ascend": AscendPlatform,
    "metal": MetalPlatform,
}
