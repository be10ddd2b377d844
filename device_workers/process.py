"""`python -m trimaran.device_workers.process`: one device worker, started by the supervisor."""

import asyncio
import logging
import os
import sys

from ..ipc.configuration import WorkerConfiguration
from ..ipc.process import adopt


def main() -> None:
    """Adopted by the supervisor first; the worker's modules are imported after."""
    adopted = adopt()
    configuration = adopted.begin.configuration
    assert isinstance(configuration, WorkerConfiguration)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s worker {configuration.rank} %(levelname)s %(message)s")
    from .worker import Worker

    worker = Worker(adopted.link, configuration, adopted.descriptors)
    asyncio.run(worker.run())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(worker.exit_code)  # a hung step thread must not keep the process


if __name__ == "__main__":
    main()
