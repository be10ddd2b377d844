"""The platform under judgement, live, with the few moves that the clauses are made of."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ...kernels.implementation import FunctionKernel, Services
from ..platforms.contract import Backend, DeviceMemory, Found, MemoryKind, Platform
from ..streams.contract import Event, Stream, StreamPriority

_WORK_S = 0.15
_MOST_ROUNDS = 4096
_SIZE = 1024
"""Of the matrices of long work: enough that a fast device computes longer than the host takes to launch."""
_POLL_S = 0.001
WAIT_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Usable:
    """A platform whose detection found devices; index 0 of them is judged."""

    platform: Platform
    found: Found

    @property
    def index(self) -> int:
        return self.found.devices[0].index

    def open(self, cache_dir: Path) -> Backend:
        return self.platform.open(self.index, num_threads=1, cache_dir=cache_dir, warn=lambda text: None)


class Subject:
    """A live device. Everything of it is used under inference mode, as the engine does."""

    def __init__(self, usable: Usable, backend: Backend, cache_dir: Path) -> None:
        self.platform = usable.platform
        self.usable = usable
        self.backend = backend
        self.streams = backend.streams
        self.device = backend.torch_device
        self.cache_dir = cache_dir
        self._rounds: int | None = None

    @property
    def services(self) -> Services:
        return Services(device=str(self.device), num_threads=1, cache_dir=self.cache_dir)

    # -- memory and numbers

    def take(self, num_bytes: int, *, kind: MemoryKind = MemoryKind.DEVICE, alignment: int = 64) -> DeviceMemory:
        return self.backend.allocate_memory(num_bytes, kind=kind, alignment_bytes=alignment)

    def held_bytes(self, kind: MemoryKind = MemoryKind.DEVICE) -> int:
        """After what nobody can reach any more is gone, in circles too: it would be given back at any moment."""
        gc.collect()
        return self.backend.memory_facts().by_kind.get(kind, 0)

    def put(self, numbers: torch.Tensor) -> torch.Tensor:
        """A copy on the device, there when this returns."""
        tensor = numbers.to(self.device)
        self.backend.synchronize()
        return tensor

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the host, after all work."""
        self.backend.synchronize()
        return tensor.cpu().clone()

    def seen_elsewhere(self, tensor: torch.Tensor) -> torch.Tensor:
        """What another stream sees now, without waiting for any other one."""
        stream = self.streams.create_stream(StreamPriority.LOW)
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.backend.copy(host, tensor, stream)
        self.streams.synchronize(stream)
        return host

    # -- work

    def launch(self, function: Callable[..., None], *tensors: torch.Tensor, stream: Stream) -> None:
        self.backend.launch(FunctionKernel(function), tensors, stream)

    def start_long_work(self, stream: Stream, out: torch.Tensor, value: float) -> None:
        """Give the stream work of about a sixth of a second that ends by filling `out`."""
        rounds = self._calibrated()
        x = torch.ones(_SIZE, _SIZE, device=self.device)
        self.backend.synchronize()

        def work(out: torch.Tensor, x: torch.Tensor) -> None:
            _multiply(x, rounds)
            out.fill_(value)

        self.launch(work, out, x, stream=stream)

    def _calibrated(self) -> int:
        """How many products take so long on this device."""
        if self._rounds is None:
            x = torch.ones(_SIZE, _SIZE, device=self.device)
            _multiply(x, 2)
            self.backend.synchronize()
            rounds, took_s = 2, 0.0
            while took_s < _WORK_S / 4 and rounds < _MOST_ROUNDS:
                rounds *= 2
                began_s = time.perf_counter()
                _multiply(x, rounds)
                self.backend.synchronize()
                took_s = time.perf_counter() - began_s
            self._rounds = max(2, min(_MOST_ROUNDS, int(rounds * _WORK_S / max(took_s, 1e-6))))
        return self._rounds


def _multiply(x: torch.Tensor, rounds: int) -> None:
    for _ in range(rounds):
        x = (x @ x) * (1 / _SIZE)


def until_done(event: Event, limit_s: float = WAIT_LIMIT_S) -> bool:
    """Poll an event; whether it came to be done in time."""
    deadline_s = time.monotonic() + limit_s
    while not event.done():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
