"""NVIDIA's management library, simulated at its C interface: it fills what `ctypes.byref` points at."""

from __future__ import annotations

from typing import Any

_SUCCESS, _INVALID, _NOT_SUPPORTED, _INSUFFICIENT_SIZE = 0, 2, 3, 7


class Board:
    """One board's readings. `holders` maps pids to bytes."""

    def __init__(self, name: str, uuid: str, bus: str, memory_bytes: int, capability: tuple[int, int]) -> None:
        self.name, self.uuid, self.bus, self.memory_bytes, self.capability = name, uuid, bus, memory_bytes, capability
        self.holders: dict[int, int] = {}
        self.throttle_reasons = 0
        self.uncorrected = 0


class NvmlLibrary:
    """`libnvidia-ml.so.1` of a machine with these boards."""

    def __init__(self, driver: str, boards: list[Board]) -> None:
        self._driver = driver
        self._boards = boards

    def nvmlInit_v2(self) -> int:
        return _SUCCESS

    def nvmlSystemGetDriverVersion(self, text: Any, length: Any) -> int:
        text.value = self._driver.encode()
        return _SUCCESS

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._boards)
        return _SUCCESS

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return _SUCCESS

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int:
        return self._find("uuid", uuid.value.decode(), handle)

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: Any, handle: Any) -> int:
        return self._find("bus", bus.value.decode(), handle)

    def _find(self, attribute: str, value: str, handle: Any) -> int:
        for number, board in enumerate(self._boards, 1):
            if getattr(board, attribute) == value:
                handle._obj.value = number
                return _SUCCESS
        return _INVALID

    def _board(self, handle: Any) -> Board:
        return self._boards[handle.value - 1]

    def nvmlDeviceGetName(self, handle: Any, text: Any, length: Any) -> int:
        text.value = self._board(handle).name.encode()
        return _SUCCESS

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, length: Any) -> int:
        text.value = self._board(handle).uuid.encode()
        return _SUCCESS

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        board = self._board(handle)
        memory._obj.total = board.memory_bytes
        memory._obj.used = sum(board.holders.values())
        memory._obj.free = board.memory_bytes - sum(board.holders.values())
        return _SUCCESS

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._board(handle).capability
        return _SUCCESS

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: Any, value: Any) -> int:
        value._obj.value = {0: 1830, 1: 1830, 2: 3201}[kind.value]
        return _SUCCESS

    def nvmlDeviceGetPowerUsage(self, handle: Any, value: Any) -> int:
        value._obj.value = 312_500
        return _SUCCESS

    def nvmlDeviceGetTemperature(self, handle: Any, kind: Any, value: Any) -> int:
        value._obj.value = 54
        return _SUCCESS

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:
        rates._obj.gpu, rates._obj.memory = 80, 25
        return _SUCCESS

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, entries: Any) -> int:
        holders = self._board(handle).holders
        if entries is None or count._obj.value < len(holders):
            count._obj.value = len(holders)
            return _INSUFFICIENT_SIZE if holders else _SUCCESS
        count._obj.value = len(holders)
        for entry, (pid, size) in zip(entries, holders.items(), strict=False):
            entry.pid, entry.usedGpuMemory = pid, size
        return _SUCCESS

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, reasons: Any) -> int:
        reasons._obj.value = self._board(handle).throttle_reasons
        return _SUCCESS

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, error: Any, counter: Any, count: Any) -> int:
        count._obj.value = self._board(handle).uncorrected
        return _SUCCESS
