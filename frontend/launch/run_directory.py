"""The private folder of one server's run: its sockets live there, and it is gone afterwards.

A server holds a lock on a file of its folder. A folder whose lock can be taken belongs to a server that was killed, and
is removed at the next start.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from ...ipc.channel import AddressTooLong, ipc_address
from ...ipc.conditions import Refusal

PREFIX = "trimaran-"
_UNFINISHED_PREFIX = ".trimaran-new-"
_UNFINISHED_LIFE_S = 3600
_LOCK = "lock"


class RunDirectory:
    """A folder of mode 0700 with a short path, until `remove`."""

    def __init__(self, parent: Path) -> None:
        """Raises Refusal: no folder can be made there, or sockets in it would have too long a path."""
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(parent)
            # Made under another name and renamed with its lock held, so that nobody takes it for a stale one.
            unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED_PREFIX, dir=parent))
            self._lock = os.open(unfinished / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.path = unfinished.with_name(PREFIX + unfinished.name.removeprefix(_UNFINISHED_PREFIX))
            unfinished.rename(self.path)
        except OSError as error:
            raise Refusal(
                f"No folder for sockets can be made in {parent}: {error.strerror}. Name another with --run-dir."
            ) from None
        try:
            self.address("core-frontends")
        except AddressTooLong as error:
            self.remove()
            raise Refusal(f"{error}.") from None

    def address(self, name: str) -> str:
        """The ZeroMQ address of a socket in this folder."""
        return ipc_address(str(self.path), name)

    def remove(self) -> None:
        """Delete the folder and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_stale(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid() and not folder.is_symlink() and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
    for folder in parent.glob(f"{_UNFINISHED_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.stat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > _UNFINISHED_LIFE_S:
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # not one of ours
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
