"""The HTTP port, taken for this server alone before any frontend binds it.

Frontends share the port by SO_REUSEPORT, which would as well let a second server steal connections in silence. So the
supervisor first takes a lock by an abstract socket (it vanishes with its process), then probes with a plain bind, then
holds a bound socket that never listens.
"""

import contextlib
import errno
import os
import socket
import struct
from pathlib import Path

from ...ipc.conditions import Refusal

_LISTEN_STATE = "0A"


class HeldPort:
    """A port that no other server of this machine can take until `close`."""

    def __init__(self, host: str, port: int) -> None:
        """Raises Refusal: the port is taken (by whom, where that is seen), or the address is not of this machine."""
        self.host = host
        family, address = _resolve(host, port)
        self._lock: socket.socket | None = None
        if port:
            self._lock = _take_lock(host, port)
        try:
            if port:
                _probe(family, address, host, port)
            self._socket = _hold(family, address, host, port)
            self.port: int = self._socket.getsockname()[1]
            if not port:
                self._lock = _take_lock(host, self.port)
        except BaseException:
            self._close_lock()
            raise

    def close(self) -> None:
        """Let go of the port."""
        self._socket.close()
        self._close_lock()

    def _close_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str | int, ...]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise Refusal(f"--host {host}: {error.strerror}. Use 127.0.0.1 or an address of this machine.") from None
    family, _, _, _, address = found[0]
    return family, tuple(part for part in address if isinstance(part, str | int))


def _take_lock(host: str, port: int) -> socket.socket:
    name = f"\0trimaran/{host}/{port}"
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(name)
        lock.listen(1)  # so that a second server can connect and read whose it is
    except OSError as error:
        lock.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise _taken(host, port, f"another Trimaran server{_peer(name)}") from None
    return lock


def _peer(name: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            caller.connect(name)
            credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return ""
    return f" (process {struct.unpack('3i', credentials)[0]})"


def _probe(family: socket.AddressFamily, address: tuple[str | int, ...], host: str, port: int) -> None:
    """Raises Refusal when somebody listens there, even if they would share the port.

    A bind also fails over connections of an earlier server that linger in TIME_WAIT; those are no reason to refuse.
    """
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            listener = _listener(port) if error.errno == errno.EADDRINUSE else None
            if listener is not None:
                raise _taken(host, port, listener) from None


def _hold(family: socket.AddressFamily, address: tuple[str | int, ...], host: str, port: int) -> socket.socket:
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _bind(held, address, host, port)
    except BaseException:
        held.close()
        raise
    return held


def _bind(end: socket.socket, address: tuple[str | int, ...], host: str, port: int) -> None:
    try:
        end.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _taken(host, port, _listener(port) or "another program") from None
        if error.errno == errno.EADDRNOTAVAIL:
            cure = "Use 127.0.0.1, 0.0.0.0 or an address that it has."
            raise Refusal(f"--host {host} is not an address of this machine. {cure}") from None
        if error.errno == errno.EACCES:
            raise Refusal(f"--port {port} may not be taken by this user. Use a port from 1024 on.") from None
        raise


def _taken(host: str, port: int, by: str) -> Refusal:
    return Refusal(
        f"Port {port} of {host} is taken by {by}. Stop it, or choose another with --port; 0 takes a free one."
    )


def _listener(port: int) -> str | None:
    """Who listens there, as far as /proc lets this user see; None when nobody does."""
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN_STATE and int(fields[1].rsplit(":", 1)[1], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(fd) in inodes for fd in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (process {process.name})"
    return "another program"
