"""Where encoding runs, so that a very long text delays nobody else."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_ON_THE_LOOP = 1024  # characters: about 0.4 ms; a thread would cost more than it saves
_LONG = 65536


class TextWork:
    """Runs text work of a known size: short on the loop, the rest in two threads, one of them for long texts only.

    Work of each thread runs in order of arrival, so neither a long text nor a crowd of them starves the short ones.
    """

    def __init__(self) -> None:
        self._medium = ThreadPoolExecutor(1, "trimaran-text")
        self._long = ThreadPoolExecutor(1, "trimaran-long-text")

    async def run(self, num_characters: int, work: Callable[[], T]) -> T:
        """The result of `work`, which raises here what it raised there."""
        if num_characters <= _ON_THE_LOOP:
            return work()
        lane = self._medium if num_characters <= _LONG else self._long
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def close(self) -> None:
        """Drop what waits; what runs ends by itself."""
        self._medium.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)
