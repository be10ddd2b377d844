"""`trimaran` with a core that expects a worker's memory to settle at once, so that a test need not wait a minute."""

import sys
from typing import Any

from msgspec.structs import replace

from trimaran.frontend.launch import commands, supervisor
from trimaran.frontend.launch.configurations import core_configuration
from trimaran.ipc.configuration import CoreConfiguration

COMMAND = [sys.executable, "-P", "-m", "trimaran.tests.faults.quick_settling"]


def _quick(*arguments: Any, **named: Any) -> CoreConfiguration:
    return replace(core_configuration(*arguments, **named), growth_settling_s=0.5)


if __name__ == "__main__":
    supervisor.core_configuration = _quick  # type: ignore[attr-defined]
    commands.main()
