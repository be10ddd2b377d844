"""Found by every pytest of an installation that has Trimaran; does nothing unless this suite was asked for.

The options of a package that `--pyargs` names would come too late, so that this hook adds them, and only then: other
test runs see no option and no hook of ours.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

PACKAGE = __name__.rpartition(".")[0]
_PLUGIN = f"{PACKAGE}.plugin"


def asks_for_the_suite(arguments: list[str]) -> bool:
    """By its name or by its folder."""
    wanted = (PACKAGE, PACKAGE.partition(".")[2].replace(".", "/"))
    return any(name in argument for argument in arguments for name in wanted)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> Generator[None, object, object]:
    """After everybody else, so that an option that others have already is seen."""
    result = yield
    if asks_for_the_suite(args):
        early_config.pluginmanager.import_plugin(_PLUGIN)
    return result
