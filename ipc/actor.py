"""A living part of a process: it owns its tasks, and cancellation is its only way to end."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Actor:
    """Subclasses override `open` and `close`; `run` holds them and every task between.

    A task that raises ends the actor, and `run` raises what it raised: nothing dies in silence.
    """

    def __init__(self) -> None:
        self._stopping = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._living: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Take what the actor needs. Runs inside the task group, so it may call `start_task`."""

    async def close(self) -> None:
        """Give back what `open` took; runs however the actor ends."""

    def stop(self) -> None:
        """Ask the actor to end; `run` returns when its tasks have been cancelled and `close` is done."""
        self._stopping.set()

    def start_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that lives at most as long as the actor."""
        assert self._group is not None, f"{type(self).__name__} is not running"
        task = self._group.create_task(work, name=name)
        self._living.add(task)
        task.add_done_callback(self._living.discard)
        return task

    async def run(self) -> None:
        """Open, live until `stop` or a failure, close."""
        try:
            async with asyncio.TaskGroup() as self._group:
                await self.open()
                await self._stopping.wait()
                for task in tuple(self._living):
                    task.cancel()
        finally:
            self._group = None
            await self.close()
