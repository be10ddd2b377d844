"""`python -m trimaran.device_workers.process`: one device worker, started by the supervisor or by a command that looks
at the machine.
"""

import asyncio
import logging
import os
import sys

from ..ipc.configuration import InspectionConfiguration, WorkerConfiguration
from ..ipc.process import Adopted, adopt


def main() -> None:
    """Adopted by the supervisor first; the worker's modules are imported after."""
    adopted = adopt()
    configuration = adopted.begin.configuration
    match configuration:
        case WorkerConfiguration():
            code = _work(adopted, configuration)
        case InspectionConfiguration():
            code = _inspect(adopted, configuration)
        case _:
            raise AssertionError(f"a worker has no use for {type(configuration).__name__}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a hung step thread must not keep the process


def _work(adopted: Adopted, configuration: WorkerConfiguration) -> int:
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s worker {configuration.rank} %(levelname)s %(message)s")
    from .worker import Worker

    worker = Worker(adopted.link, configuration, adopted.descriptors)
    asyncio.run(worker.run())
    return worker.exit_code


def _inspect(adopted: Adopted, configuration: InspectionConfiguration) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    from .inspection import inspect

    return inspect(adopted.link, configuration)


if __name__ == "__main__":
    main()
