"""Memory that ran out, said by each vendor in its own words, as MemoryError."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_WORDS = ("out of memory", "allocate memory", "out_of_device_memory", "out_of_host_memory", "invalid buffer size")
"""In the RuntimeErrors of torch's allocators for the host, Metal, Ascend and Level Zero."""


def is_exhaustion(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or any(words in text for words in _WORDS)


@contextmanager
def exhaustion_as_memory_error(release: Callable[[], None]) -> Iterator[None]:
    """Turns an exhaustion into MemoryError and calls `release`, so that fragments do not starve what comes next."""
    try:
        yield
    except RuntimeError as error:
        if not is_exhaustion(error):
            raise
        error.__traceback__ = None  # it holds the tensors of the failed call, and they would stay
        release()
        raise MemoryError(str(error)) from None
