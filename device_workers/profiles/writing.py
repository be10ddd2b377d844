"""A capability file of what was measured on one device: readable, and read back before it counts as written."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path

from ...ipc.conditions import Refusal
from ...ipc.facts import DeviceProfile
from ...kernels.verification import write_atomically
from .capability_file import MEASURED, CapabilityFile, Value, plain_architecture
from .reading import SCHEMA, make_file
from .vocabulary import KEYS, Key
from .yaml_text import parse_yaml

_HEAD = """\
# Measured on one device by {tool} on {date}. Give it to `trimaran serve --device-config` or `trimaran explain`.
# Each value goes before what is detected and what is declared for {architecture}; delete a line to let those count.
# The format is described in docs/capability-files.md.
"""


def write_capability_file(
    path: Path, profile: DeviceProfile, measured: Mapping[str, Value], *, tool: str, date: datetime.date
) -> CapabilityFile:
    """Write identity and measured values, and nothing that was declared or detected; returns what reads back.

    `measured` is keyed as in the file: "bandwidth", "rates.bfloat16", "features.graph_capture", and
    "best.rms_norm" with {"num_warps": 4}. Raises Refusal when the file cannot be written or a value is impossible.
    """
    text = capability_text(profile, measured, tool=tool, date=date)
    file = make_file(parse_yaml(text, str(path)), str(path), str(path))
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise Refusal(f"{path}: cannot be written ({error}); name a place that this user can write") from None
    return file


def capability_text(profile: DeviceProfile, measured: Mapping[str, Value], *, tool: str, date: datetime.date) -> str:
    """The file's text."""
    lines = [_HEAD.format(tool=tool, date=date.isoformat(), architecture=profile.capability.architecture)]
    lines += _identity(profile)
    by_key: dict[str, dict[str, Value]] = {}
    for path, value in measured.items():
        name, _, entry = path.partition(".")
        assert name in KEYS and bool(KEYS[name].of) == bool(entry), f"{path} is no figure of a capability file"
        by_key.setdefault(name, {})[entry] = value
    suffix = f"source: {MEASURED}, date: {date.isoformat()}, tool: {_text(tool)}}}"
    for name, key in KEYS.items():
        if name in by_key:
            lines += _figures(key, by_key[name], suffix)
    return "\n".join(lines) + "\n"


def _identity(profile: DeviceProfile) -> list[str]:
    lines = [
        f"schema: {SCHEMA}",
        f"architecture: {plain_architecture(profile.capability.architecture)}",
        f"platform: {_text(profile.platform)}",
        f"vendor: {_text(profile.vendor)}",
        "device:",
        f"  name: {_text(profile.name)}",
    ]
    others = {
        "uuid": profile.uuid,
        "pci_bus_id": profile.pci_bus_id,
        "driver": profile.driver,
        "runtime": profile.runtime,
    }
    return [*lines, *(f"  {name}: {_text(value)}" for name, value in others.items() if value is not None), ""]


def _figures(key: Key, entries: Mapping[str, Value], suffix: str) -> list[str]:
    comment = f"  # {key.unit}" if key.unit else ""
    if not key.of:
        return [f"{key.name}: {{value: {_value(entries[''])}, {suffix}{comment}"]
    inner = [f"  {entry}: {{value: {_value(value)}, {suffix}" for entry, value in entries.items()]
    return [f"{key.name}:{comment}", *inner]


def _value(value: Value) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {number}" for name, number in value.items()) + "}"
    return f"{value:.6g}" if isinstance(value, float) and 1e-4 <= abs(value) < 1e6 else json.dumps(value)


def _text(text: str) -> str:
    """In quotes: JSON's are YAML's, and nothing is taken for a number or a date."""
    return json.dumps(text, ensure_ascii=False)
