"""Typed ends of ZeroMQ sockets, driven by the event loop's reader on the socket's descriptor.

The descriptor is edge-triggered: whoever wakes must receive until nothing is left, and must look again after every
send, or messages stick (libzmq's contract for ZMQ_FD). zmq.asyncio costs 1.5 times the latency and is not used.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import zmq
from msgspec import Struct

from .conditions import TrimaranError
from .messages import Decoder, MalformedMessage, encode

T = TypeVar("T")
Frame = bytes | bytearray | memoryview
_MORE, _LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)  # send_multipart joins the flags anew for each frame
_BATCH = 256  # messages per wake-up before other callbacks of the loop get their turn

log = logging.getLogger("trimaran.channel")


class AddressTooLong(TrimaranError):
    """A Unix socket path beyond what the kernel takes; libzmq would fail without saying so."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the socket path {path!r} has {len(path)} bytes, over the 100 that are safe; "
            "choose a shorter run directory (--run-dir or TRIMARAN_RUN_DIR)"
        )


def ipc_address(run_directory: str, name: str) -> str:
    """The ZeroMQ endpoint of socket `name` in the run directory. Raises AddressTooLong."""
    path = f"{run_directory}/{name}"
    if len(path) > 100:
        raise AddressTooLong(path)
    return f"ipc://{path}"


class _Channel(Generic[T]):
    def __init__(self, socket: zmq.Socket[bytes], decoder: Decoder[T]) -> None:
        self._socket = socket
        self._decoder = decoder
        self._loop: asyncio.AbstractEventLoop | None = None
        self._look_again = False
        self.num_malformed = 0
        self._descriptor = int(socket.getsockopt(zmq.FD))
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            socket.setsockopt(option, 0)

    def open(self) -> None:
        """Start delivering messages on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._drain)
        self._schedule()

    def close(self) -> None:
        """Stop delivering and close the socket; what is still queued for sending is dropped."""
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
            self._loop = None
        self._socket.close(linger=0)

    def _schedule(self) -> None:
        if not self._look_again and self._loop is not None:
            self._look_again = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._look_again = False
        for _ in range(_BATCH):
            if self._loop is None:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._deliver(frames)
        self._schedule()

    def _decode(self, frame: bytes) -> T | None:
        try:
            return self._decoder.decode(frame)
        except MalformedMessage as error:
            self.num_malformed += 1
            log.warning("dropped a malformed message (%d so far): %s", self.num_malformed, error)
            return None

    def _deliver(self, frames: list[bytes]) -> None:
        raise NotImplementedError

    def _send(self, frames: Sequence[Frame]) -> None:
        with contextlib.suppress(zmq.Again):
            for frame in frames[:-1]:
                self._socket.send(frame, _MORE)
            self._socket.send(frames[-1], _LAST)
        self._schedule()


class DealerChannel(_Channel[T]):
    """The connecting end. `on_message(message, frames)` runs on the loop; the frames follow the message."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        identity: str,
        decoder: Decoder[T],
        on_message: Callable[[T, list[bytes]], None],
    ) -> None:
        super().__init__(context.socket(zmq.DEALER), decoder)
        self._on_message = on_message
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)  # without back-off: a part that has restarted is met at once
        self._socket.connect(address)

    def send(self, message: Struct, *frames: Frame) -> None:
        """Queue a message; never blocks."""
        self._send((encode(message), *frames))

    def _deliver(self, frames: list[bytes]) -> None:
        if (message := self._decode(frames[0])) is not None:
            self._on_message(message, frames[1:])


class RouterChannel(_Channel[T]):
    """The bound end. `on_message(peer, message, frames)` runs on the loop; `peer` is the dealer's identity."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        decoder: Decoder[T],
        on_message: Callable[[bytes, T, list[bytes]], None],
    ) -> None:
        super().__init__(context.socket(zmq.ROUTER), decoder)
        self._on_message = on_message
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(address)

    def send(self, peer: bytes, message: Struct, *frames: Frame) -> None:
        """Queue a message for `peer`; never blocks. A peer that has gone gets nothing, silently."""
        self._send((peer, encode(message), *frames))

    def _deliver(self, frames: list[bytes]) -> None:
        if len(frames) < 2:
            self.num_malformed += 1
            log.warning("dropped a message of %d frames (%d malformed so far)", len(frames), self.num_malformed)
            return
        if (message := self._decode(frames[1])) is not None:
            self._on_message(frames[0], message, frames[2:])
