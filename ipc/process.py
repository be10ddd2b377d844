"""A child process and its parent: the control link between them, and dying with the parent.

The parent gives each child two descriptors: one end of an AF_UNIX SOCK_SEQPACKET pair (the control link) and the
read end of a pipe it never writes (the death pipe). A child's first statement is `adopt()`.
"""

import argparse
import asyncio
import ctypes
import fcntl
import os
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from msgspec import Struct

from .conditions import PeerDied
from .control import FROM_CHILD, TO_CHILD, Begin, FromChild, ToChild
from .messages import Decoder, encode

Incoming = TypeVar("Incoming")
_PR_SET_PDEATHSIG = 1
_F_SETSIG = 10
_MAX_MESSAGE_BYTES = 200_000
_MAX_DESCRIPTORS = 128


class ControlLink(Generic[Incoming]):
    """One end of the control link: typed messages with descriptors, in order, each whole.

    `send` never blocks. Messages arrive by `receive` (blocking, before a loop runs) or, after `open`, by
    `on_message(message, descriptors)` on the loop; the end of the peer by `on_end()`. Received descriptors belong to
    the receiver.
    """

    def __init__(self, end: socket.socket, decoder: Decoder[Incoming]) -> None:
        self._socket = end
        self._decoder = decoder
        self._pending: deque[tuple[bytes, Sequence[int]]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def receive(self) -> tuple[Incoming, list[int]]:
        """Block until the next message. Raises PeerDied at the end of the peer."""
        self._socket.setblocking(True)
        received = self._receive_now()
        if received is None:
            raise PeerDied("the process at the other end of the control link")
        return received

    def open(self, on_message: Callable[[Incoming, list[int]], None], on_end: Callable[[], None]) -> None:
        """Deliver messages on the running loop from now on."""
        self._socket.setblocking(False)
        self._on_message, self._on_end = on_message, on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def close(self) -> None:
        """Close this end; the peer sees the end."""
        if self._socket.fileno() < 0:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        for _, descriptors in self._pending:
            for fd in descriptors:
                os.close(fd)
        self._pending.clear()

    def send(self, message: Struct, descriptors: Sequence[int] = ()) -> None:
        """Send, or queue when the peer is slow. The descriptors must stay open until sent; a dead peer is ignored."""
        payload = encode(message)
        assert len(payload) <= _MAX_MESSAGE_BYTES, f"control message of {len(payload)} bytes"
        if self._socket.fileno() < 0:
            return
        if self._pending or not self._send_now(payload, descriptors):
            self._pending.append((payload, [os.dup(fd) for fd in descriptors]))
            assert self._loop is not None, "the control link is full before a loop serves it"
            self._loop.add_writer(self._socket.fileno(), self._writable)

    def _send_now(self, payload: bytes, descriptors: Sequence[int]) -> bool:
        try:
            socket.send_fds(self._socket, [payload], list(descriptors))
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            pass
        return True

    def _writable(self) -> None:
        while self._pending:
            payload, descriptors = self._pending[0]
            if not self._send_now(payload, descriptors):
                return
            self._pending.popleft()
            for fd in descriptors:
                os.close(fd)
        assert self._loop is not None
        self._loop.remove_writer(self._socket.fileno())

    def _receive_now(self) -> tuple[Incoming, list[int]] | None:
        try:
            payload, descriptors = self._receive_packet()
        except ConnectionResetError:
            # The peer closed with messages of ours unread. The error comes once; what the peer had sent lies behind it.
            payload, descriptors = self._receive_packet()
        if not payload:
            return None
        return self._decoder.decode(payload), descriptors

    def _receive_packet(self) -> tuple[bytes, list[int]]:
        payload, descriptors, _, _ = socket.recv_fds(
            self._socket, _MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        return payload, list(descriptors)

    def _readable(self) -> None:
        while self._socket.fileno() >= 0:
            try:
                received = self._receive_now()
            except BlockingIOError:
                return
            if received is None:
                assert self._loop is not None
                self._loop.remove_reader(self._socket.fileno())
                self._on_end()
                return
            self._on_message(*received)


def die_with_forking_thread() -> None:
    """End this forked process when the thread that forked it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def die_with_parent(death_pipe: int, parent: int) -> None:
    """End this process when `parent` ends, even while C code holds the interpreter lock.

    Two mechanisms, because each has a hole: PR_SET_PDEATHSIG (prctl(2)) is bound to the parent's spawning thread and
    set after exec, hence the getppid check; a SIGKILL by O_ASYNC (fcntl(2), F_SETSIG) when the pipe's other end
    closes. F_SETOWN is kept per open file description, so the child opens its own.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    own = os.open(f"/proc/self/fd/{death_pipe}", os.O_RDONLY | os.O_NONBLOCK)
    os.close(death_pipe)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([own], [], [], 0)[0] or os.getppid() != parent:
        os._exit(1)


def child_arguments(control: int, death_pipe: int) -> list[str]:
    """Arguments by which `adopt` in the child finds its descriptors; the parent passes both in `pass_fds`."""
    return ["--control", str(control), "--death-pipe", str(death_pipe), "--parent", str(os.getpid())]


class Adopted(NamedTuple):
    """What a child starts from. `received_s` is CLOCK_MONOTONIC, for its first phase."""

    link: ControlLink[ToChild]
    begin: Begin
    descriptors: list[int]


def adopt() -> Adopted:
    """First statement of a child's main, before heavy imports: die with the parent, then receive `Begin`.

    SIGINT and SIGTERM are ignored: they often reach the whole process group, and the supervisor alone decides what
    they mean; it ends a child by Stop or SIGKILL.
    """
    parser = argparse.ArgumentParser()
    for name in ("--control", "--death-pipe", "--parent"):
        parser.add_argument(name, type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.death_pipe, arguments.parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link: ControlLink[ToChild] = ControlLink(socket.socket(fileno=arguments.control), TO_CHILD)
    begin, descriptors = link.receive()
    assert isinstance(begin, Begin), f"the first control message was {type(begin).__name__}"
    return Adopted(link, begin, descriptors)


def create_control_link() -> tuple[ControlLink[FromChild], socket.socket]:
    """The parent's end, and the socket to pass to the child (close it after spawning)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ControlLink(ours, FROM_CHILD), theirs
