"""The engine core's process: `python -m trimaran.engine_core.process`, started by the supervisor."""

import asyncio
import logging
import os
import sys
import traceback
from typing import Any

from ..ipc.process import adopt


def main() -> None:
    """Adopt, then run the core until told to stop or the supervisor is gone."""
    link, begin, descriptors = adopt()

    import uvloop

    from ..ipc.configuration import CoreConfiguration
    from ..ipc.control import Fault
    from .core import Core

    logging.basicConfig(level=logging.INFO, format="%(levelname)s core: %(message)s", stream=sys.stderr)
    configuration = begin.configuration
    assert isinstance(configuration, CoreConfiguration)

    def fail(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: the core's state can no longer be trusted, and a new core is a second away."""
        error = context.get("exception")
        text = "".join(traceback.format_exception(error)) if error else str(context.get("message"))
        sys.stderr.write(text)
        link.send(Fault(f"the engine core failed: {error!r}"))
        os._exit(1)

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(fail)
        await Core(configuration, link, descriptors).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


if __name__ == "__main__":
    main()
