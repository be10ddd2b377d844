"""How a command ends: one exit code for each way, and no traceback for what its user, terminal or pipe did."""

import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from ...ipc.conditions import Refusal, TrimaranError
from .options import OptionError

EXIT_FAILED, EXIT_REFUSED = 1, 2
_SIGNALLED = 128  # as shells count the end by a signal
_TO_END = (signal.SIGTERM, signal.SIGHUP)


def guarded(name: str, body: Callable[[], int]) -> int:
    """The body's own exit code; else 2 for a refusal, 1 for a failure, 128 and the signal's number when told to end.

    A reader that has seen enough (`| head`) counts as a signal too. What the body started is ended in order.
    """
    _accept_any_text()
    told: list[int] = []
    before = {number: signal.getsignal(number) for number in _TO_END}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup
            signal.signal(number, _as_interrupt(told))
    try:
        return _ended(name, body, told)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ended(name: str, body: Callable[[], int], told: list[int]) -> int:
    try:
        code = body()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except (OptionError, Refusal) as refusal:
        say(f"trimaran {name}: {refusal}")
        return EXIT_REFUSED
    except TrimaranError as error:
        say(f"trimaran {name}: {error}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        say(f"trimaran {name}: ended before it was done")
        return _SIGNALLED + (told[0] if told else signal.SIGINT)
    except OSError as error:
        return _without_output(name, error)


def say(text: str) -> None:
    """A line for people, on stderr where there is one: stdout may be somebody's JSON."""
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


def _without_output(name: str, error: OSError) -> int:
    """The output went away, or is full. Another error of the system is none of ours to explain."""
    if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF):
        raise error
    with open(os.devnull, "wb") as nowhere:  # what is still buffered must not fail again when Python ends
        os.dup2(nowhere.fileno(), 1)
    if error.errno == errno.EPIPE:
        return _SIGNALLED + signal.SIGPIPE
    say(f"trimaran {name}: the output cannot be written ({error.strerror}); send it to another file or disk")
    return EXIT_FAILED


def _as_interrupt(told: list[int]) -> Callable[[int, FrameType | None], None]:
    """A handler by which any wish to end takes the way of Ctrl-C, which asyncio knows how to end in order."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        told.append(number)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script's background job
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    return interrupt


def _accept_any_text() -> None:
    """Names of files and devices that the terminal's encoding cannot show are escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
