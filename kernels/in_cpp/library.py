"""The loaded C++ library: launches, runs, and recordings of launches that replay in one call.

The library uses the OpenMP runtime that torch has loaded already (one soname, one runtime, one team of threads); so
torch is imported before it is opened.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .build import discard_temporary, ensure_library, rebuild_library

NUM_POINTERS = 12
NUM_NUMBERS = 12
_LINE_BYTES = 64
_HUGE_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 64 << 20
_MADV_HUGEPAGE = 14
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Launch(ctypes.Structure):
    """One kernel with its arguments; mirrors the struct of the source."""

    _fields_ = (
        ("kernel", ctypes.c_int64),
        ("pointers", ctypes.c_void_p * NUM_POINTERS),
        ("numbers", ctypes.c_int64 * NUM_NUMBERS),
        ("reals", ctypes.c_double * 2),
    )


class Recording:
    """Launches kept with the tensors they point at. `run` repeats them for other sizes; the tensors' memory stays."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._launches: list[Launch] = []
        self._kept: list[Any] = []
        self._array: Any = None

    @property
    def num_launches(self) -> int:
        return len(self._launches)

    def add(self, launch: Launch, tensors: Sequence[torch.Tensor | None]) -> None:
        self._launches.append(launch)
        self._kept.append(tensors)
        self._array = None

    def run(self, num_tokens: int, num_sequences: int, progress: ctypes.c_int64 | None = None) -> None:
        if self._array is None:
            self._array = (Launch * len(self._launches))(*self._launches)
        self._library.execute(
            self._array, len(self._launches), num_tokens, num_sequences, progress, self._library.num_threads
        )


class HugePageArena:
    """Hands out memory for weights one after the other, on huge pages where the system has them: a decode step reads
    all weights once, and with small pages the address translation shows."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised, aligned to a cache line."""
        num_bytes = -(-num_elements * dtype.itemsize // _LINE_BYTES) * _LINE_BYTES
        if num_bytes > len(self._free):
            self._free = self._chunk(max(num_bytes, _CHUNK_BYTES))
        taken, self._free = self._free[:num_bytes], self._free[num_bytes:]
        return taken[: num_elements * dtype.itemsize].view(dtype)

    def _chunk(self, num_bytes: int) -> torch.Tensor:
        whole = torch.empty(num_bytes + _HUGE_PAGE_BYTES, dtype=torch.uint8)
        begin = -whole.data_ptr() % _HUGE_PAGE_BYTES
        chunk = whole[begin : begin + num_bytes]
        advise = getattr(ctypes.CDLL(None), "madvise", None)
        if sys.platform == "linux" and advise is not None:
            whole_pages = num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
            advise(ctypes.c_void_p(chunk.data_ptr()), ctypes.c_size_t(whole_pages), _MADV_HUGEPAGE)
        return chunk


class Library:
    """The functions of one built library, on a fixed number of threads. Used by one thread at a time."""

    def __init__(self, path: Path, num_threads: int) -> None:
        loaded = ctypes.CDLL(str(path))
        self._run = loaded.trimaran_run
        self._run.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
        self._run.restype = None
        self._packed_elements = loaded.trimaran_packed_elements
        self._packed_elements.argtypes = (ctypes.c_int64, ctypes.c_int64)
        self._packed_elements.restype = ctypes.c_int64
        self._pack = loaded.trimaran_pack
        self._pack.argtypes = (ctypes.c_void_p, ctypes.c_void_p, *(ctypes.c_int64,) * 4)
        self._pack.restype = None
        loaded.trimaran_launch_bytes.restype = ctypes.c_int64
        assert loaded.trimaran_launch_bytes() == ctypes.sizeof(Launch), "the launch struct differs from the source's"
        self.num_threads = num_threads
        self._sizes = (ctypes.c_int64 * 2)()
        self._recording: Recording | None = None
        self._arena = HugePageArena()

    def launch(
        self,
        kernel: int,
        tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[int],
        num_tokens: int,
        num_sequences: int = 0,
        real: float = 0.0,
        is_small: bool = False,
    ) -> None:
        """Run one kernel now, or add it to the recording under way. A small one runs on this thread: waking others
        costs more.
        """
        launch = Launch(kernel)
        for index, tensor in enumerate(tensors):
            launch.pointers[index] = None if tensor is None else tensor.data_ptr()
        launch.numbers[: len(numbers)] = numbers
        launch.reals[0] = real
        if self._recording is not None:
            self._recording.add(launch, tensors)
            return
        self.execute(ctypes.byref(launch), 1, num_tokens, num_sequences, None, 1 if is_small else self.num_threads)

    def execute(
        self,
        launches: Any,
        count: int,
        num_tokens: int,
        num_sequences: int,
        progress: ctypes.c_int64 | None,
        num_threads: int,
    ) -> None:
        self._sizes[0], self._sizes[1] = num_tokens, num_sequences
        counter = None if progress is None else ctypes.addressof(progress)
        self._run(launches, count, self._sizes, num_threads, counter)

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Launches inside are recorded, not run. Recordings do not nest."""
        assert self._recording is None
        self._recording = Recording(self)
        try:
            yield self._recording
        finally:
            self._recording = None

    def pack(self, weight_NK: torch.Tensor) -> torch.Tensor:
        """The weight in the layout `linear` reads, as a flat tensor."""
        num_outputs, num_inputs = weight_NK.shape
        assert weight_NK.stride(1) == 1
        packed = self._arena.take(self._packed_elements(num_outputs, num_inputs), weight_NK.dtype)
        self._pack(
            packed.data_ptr(),
            weight_NK.data_ptr(),
            num_outputs,
            num_inputs,
            weight_NK.stride(0),
            DTYPE_CODES[weight_NK.dtype],
        )
        return packed


_opened: dict[int, Library] = {}


def open_library(cache_dir: Path | None, num_threads: int, warn: Callable[[str], None]) -> Library:
    """The library for this machine, built when needed; one per number of threads and process. A cached file that
    does not load is built again, with a warning. Raises BuildFailed, OSError.
    """
    if num_threads not in _opened:
        path = ensure_library(cache_dir, warn)
        try:
            _opened[num_threads] = Library(path, num_threads)
        except (OSError, AttributeError) as error:
            warn(f"the cached C++ kernels {path} do not load ({error}): built again")
            _opened[num_threads] = Library(rebuild_library(path), num_threads)
        discard_temporary(path)
    return _opened[num_threads]
