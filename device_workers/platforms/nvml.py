"""NVIDIA's management library by its documented C interface (NVML API reference), through ctypes.

It needs neither torch nor a CUDA context, and sees devices that CUDA_VISIBLE_DEVICES hides.
"""

from __future__ import annotations

import ctypes
from typing import Any

from msgspec import Struct

from ...ipc.facts import DeviceHealth, MemoryFacts
from .host import Host

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS, _INSUFFICIENT_SIZE = 0, 7
_TEXT_BYTES = 96
_CLOCKS = {"graphics": 0, "sm": 1, "memory": 2}
_TEMPERATURE_GPU = 0
_UNCORRECTED, _VOLATILE = 1, 0
_MOST_PROCESSES = 4096
_UNKNOWN_BYTES = (1 << 64) - 1
_THROTTLE_REASONS = {
    0x0000000000000004: "power cap of software",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "thermal limit of software",
    0x0000000000000040: "thermal limit of hardware",
    0x0000000000000080: "power brake of hardware",
}
"""nvmlClocksThrottleReasons; idleness and clocks that somebody set are no trouble."""


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("usedGpuMemory", ctypes.c_ulonglong),
        ("gpuInstanceId", ctypes.c_uint),
        ("computeInstanceId", ctypes.c_uint),
    ]


class NvmlDevice(Struct, frozen=True, kw_only=True):
    """One board as the driver knows it."""

    name: str
    uuid: str
    memory_bytes: int | None
    compute_capability: tuple[int, int] | None


class Nvml:
    """An initialised library. Calls that a driver or a device does not know give None."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def driver_version(self) -> str | None:
        return self._text("nvmlSystemGetDriverVersion")

    def devices(self) -> list[NvmlDevice]:
        count = ctypes.c_uint()
        if not self._call("nvmlDeviceGetCount_v2", ctypes.byref(count)):
            return []
        handles = (self._handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index)) for index in range(count.value))
        return [self._device(handle) for handle in handles if handle is not None]

    def handle(self, uuid: str | None, pci_bus_id: str | None) -> Any:
        """Of a device by what torch says of it; None when the library does not know it."""
        if uuid is not None:
            found = self._handle("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid.encode()))
            if found is not None:
                return found
        if pci_bus_id is None:
            return None
        return self._handle("nvmlDeviceGetHandleByPciBusId_v2", ctypes.c_char_p(pci_bus_id.encode()))

    def health(self, handle: Any) -> DeviceHealth:
        clocks = {
            name: self._number("nvmlDeviceGetClockInfo", handle, ctypes.c_uint(kind)) for name, kind in _CLOCKS.items()
        }
        power = self._number("nvmlDeviceGetPowerUsage", handle)
        temperature = self._number("nvmlDeviceGetTemperature", handle, ctypes.c_uint(_TEMPERATURE_GPU))
        busy = _Utilization()
        known = self._call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(busy))
        return DeviceHealth(
            clocks={name: float(value) for name, value in clocks.items() if value is not None},
            power=None if power is None else power / 1000,
            temperature=None if temperature is None else float(temperature),
            compute_utilization=busy.gpu / 100 if known else None,
            memory_utilization=busy.memory / 100 if known else None,
            throttle_reasons=self._throttling(handle),
            errors=self._memory_errors(handle),
            memory=self._memory(handle),
        )

    def holders(self, handle: Any) -> dict[int, int]:
        """Bytes of device memory by process. Empty where they cannot be read, as in most containers."""
        for function in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"):
            if hasattr(self._library, function):
                found = self._processes(function, handle)
                return {entry.pid: entry.usedGpuMemory for entry in found if entry.usedGpuMemory != _UNKNOWN_BYTES}
        return {}

    def _processes(self, function: str, handle: Any) -> list[_Process]:
        count = ctypes.c_uint(0)
        status = getattr(self._library, function)(handle, ctypes.byref(count), None)
        if status not in (_SUCCESS, _INSUFFICIENT_SIZE) or count.value == 0:
            return []
        room = ctypes.c_uint(min(count.value * 2 + 4, _MOST_PROCESSES))  # some may start between the two calls
        entries = (_Process * room.value)()
        if not self._call(function, handle, ctypes.byref(room), entries):
            return []
        return list(entries[: room.value])

    def _device(self, handle: Any) -> NvmlDevice:
        memory, major, minor = _Memory(), ctypes.c_int(), ctypes.c_int()
        has_memory = self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        versioned = self._call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
        return NvmlDevice(
            name=self._text("nvmlDeviceGetName", handle) or "NVIDIA device",
            uuid=self._text("nvmlDeviceGetUUID", handle) or "",
            memory_bytes=int(memory.total) if has_memory else None,
            compute_capability=(major.value, minor.value) if versioned else None,
        )

    def _memory(self, handle: Any) -> MemoryFacts | None:
        """Whose it is, the library does not know of this process where pids are hidden."""
        memory = _Memory()
        if not self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)):
            return None
        return MemoryFacts(total_bytes=int(memory.total), free_bytes=int(memory.free), ours_bytes=0)

    def _throttling(self, handle: Any) -> tuple[str, ...]:
        reasons = ctypes.c_ulonglong()
        if not self._call("nvmlDeviceGetCurrentClocksThrottleReasons", handle, ctypes.byref(reasons)):
            return ()
        return tuple(text for bit, text in _THROTTLE_REASONS.items() if reasons.value & bit)

    def _memory_errors(self, handle: Any) -> tuple[str, ...]:
        count = ctypes.c_ulonglong()
        kinds = ctypes.c_uint(_UNCORRECTED), ctypes.c_uint(_VOLATILE)
        if not self._call("nvmlDeviceGetTotalEccErrors", handle, *kinds, ctypes.byref(count)) or not count.value:
            return ()
        return (f"{count.value} uncorrected memory errors since the driver was loaded",)

    def _handle(self, function: str, argument: Any) -> Any:
        handle = ctypes.c_void_p()
        return handle if self._call(function, argument, ctypes.byref(handle)) else None

    def _number(self, function: str, *arguments: Any) -> int | None:
        value = ctypes.c_uint()
        return value.value if self._call(function, *arguments, ctypes.byref(value)) else None

    def _text(self, function: str, *arguments: Any) -> str | None:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        known = self._call(function, *arguments, text, ctypes.c_uint(_TEXT_BYTES))
        return text.value.decode(errors="replace") if known else None

    def _call(self, function: str, *arguments: Any) -> bool:
        entry = getattr(self._library, function, None)
        return entry is not None and entry(*arguments) == _SUCCESS


def open_nvml(host: Host) -> Nvml | None:
    """None where there is no library or it does not start. Opening it again costs nothing and is allowed."""
    library = host.load_library(LIBRARY)
    if library is None or library.nvmlInit_v2() != _SUCCESS:
        return None
    return Nvml(library)
