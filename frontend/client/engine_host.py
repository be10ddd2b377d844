"""What the offline API needs of whoever runs an engine: the supervisor, with no frontends, in this process."""

from collections.abc import Callable, Mapping
from typing import Protocol

from ...ipc.configuration import RequestRules
from ...ipc.control import ToChild

Watch = Callable[[ToChild], None]


class EngineHost(Protocol):
    """Runs core and workers. Tells its watcher what it would tell a frontend: ModelKnown, CoreStarted, CoreLost, ..."""

    @property
    def core_address(self) -> str:
        """Where the core takes connections; known from CoreStarted on."""

    async def run(self) -> None:
        """Until `terminate` has ended everything. Raises why the engine could not be kept."""

    async def wait_ready(self) -> None:
        """Until the engine can make a token. Raises what kept it from it."""

    def terminate(self) -> None:
        """Drain and end."""


OpenHost = Callable[[Watch], EngineHost]


def supervised(
    model: str, keywords: Mapping[str, object], defaults: Mapping[str, object]
) -> tuple[OpenHost, RequestRules]:
    """A supervisor with the options of `trimaran serve`, given by keyword, and some defaults of its own. Raises
    OptionError for a wrong one.
    """
    from ..launch.configurations import request_rules
    from ..launch.options import inherited_environment, options_from_keywords
    from ..launch.progress import create_progress
    from ..launch.supervisor import Supervisor

    keywords = {**({"model": model} if model else {}), **keywords}
    reading = options_from_keywords(keywords, inherited_environment(), defaults)

    def open_host(watch: Watch) -> EngineHost:
        return Supervisor(reading.options, create_progress(), num_frontends=0, watch=watch)

    return open_host, request_rules(reading.options)
