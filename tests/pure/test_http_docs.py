"""Row V6: the limits stand in the docs, with their options, and are those of the code."""

from pathlib import Path

import msgspec

from trimaran.frontend.launch.options import Options
from trimaran.ipc.configuration import RequestLimits

PAGE = (Path(__file__).parents[2] / "docs" / "http_api.md").read_text()


def test_v6_limits_are_documented() -> None:
    section = PAGE.split("## Limits on one request")[1].split("##")[0]
    for field in msgspec.structs.fields(RequestLimits):
        assert f"| {field.default:,} |" in section, field.name


def test_documented_options_exist() -> None:
    import re

    names = {flag[2:].removeprefix("no-").replace("-", "_") for flag in re.findall(r"--[a-z][a-z-]+", PAGE)}
    assert names <= set(Options.__struct_fields__), names - set(Options.__struct_fields__)
