"""`trimaran explain`: how a model would be served, without its weights and without the device.

Runs the boot of `serve` as far as that goes, and prints what was settled. Takes the options of `serve`.
"""

import asyncio
from collections.abc import Sequence

from ...ipc.conditions import TrimaranError
from ...ipc.facts import Decision, Resolution
from ...ipc.server_info import ServerInfo
from .ending import guarded
from .inspections import split_json
from .options import Options, inherited_environment, read_options
from .progress import SilentProgress
from .supervisor import Supervisor
from .tables import Table, print_json, print_tables

_GIB = 1 << 30
USAGE = """usage: trimaran explain [MODEL] [OPTIONS OF serve] [--json]

Says how MODEL would be served and why: sizes, policies, kernels, memory. Reads the model's config.json only, and needs
no device: with --device-config FILE (or the name of a packaged capability file, such as hopper:H200) it explains that
device, otherwise this machine's. --json prints one object.
"""


class _LastLines(SilentProgress):
    """Keeps what children print, for an end that has no better cause."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


def explain(arguments: Sequence[str]) -> int:
    """The exit code: 0 when it was explained, 2 when serving would be refused, with the reason on stderr."""
    if "--help" in arguments or "-h" in arguments:
        print(USAGE)
        return 0

    def body() -> int:
        as_json, words = split_json(arguments)
        options = read_options(words, inherited_environment()).options
        info = asyncio.run(ask_how_it_is_served(options))
        if as_json:
            print_json(info)
        else:
            print_tables(tables(info))
        return 0

    return guarded("explain", body)


async def ask_how_it_is_served(options: Options) -> ServerInfo:
    """The boot as far as it goes without device and weights. Raises Refusal where serving would be refused."""
    told: list[ServerInfo] = []
    progress = _LastLines()
    await Supervisor(options, progress, num_frontends=0, on_explained=told.append).run()
    if not told:
        raise TrimaranError(progress.lines[-1] if progress.lines else "the boot ended without a word")
    return told[0]


def tables(info: ServerInfo) -> list[Table]:
    """Device, model, decisions, kernels, memory: in the order in which they follow from each other."""
    found = [_device(info), _model(info), _decisions(info.decisions), _kernels(info.kernels)]
    return [*found, _memory(info)] if info.memory else found


def _device(info: ServerInfo) -> Table:
    table = Table("Device", ("fact", "value", "known by"))
    profile = info.devices[0]
    capability = profile.capability
    facts: list[tuple[str, str, object]] = [
        ("name", "name", profile.name),
        ("platform", "platform", profile.platform),
        ("architecture", "capability.architecture", capability.architecture),
        ("multiprocessors", "capability.num_multiprocessors", capability.num_multiprocessors),
        ("memory", "memory_bytes", _gib(profile.memory_bytes)),
        ("bandwidth", "bandwidth", None if profile.bandwidth is None else f"{profile.bandwidth:g} GB/s"),
        ("shared memory per block", "capability.shared_memory_per_block_bytes", _kib(capability)),
        ("L2", "capability.l2_bytes", None if capability.l2_bytes is None else f"{capability.l2_bytes >> 20} MiB"),
        ("features", "capability.features", ", ".join(sorted(capability.features)) or None),
    ]
    for label, key, value in facts:
        if value is not None:
            table.row(label, str(value), str(profile.provenance.get(key, "")))
    for dtype, rate in capability.rates.items():
        table.row(f"{dtype} rate", f"{rate:g} TFLOP/s", str(profile.provenance.get(f"capability.rates.{dtype}", "")))
    return table


def _kib(capability: object) -> str | None:
    size = getattr(capability, "shared_memory_per_block_bytes", None)
    return None if size is None else f"{size >> 10} KiB"


def _gib(size: int | None) -> str | None:
    return None if size is None else f"{size / _GIB:.2f} GiB"


def _model(info: ServerInfo) -> Table:
    table = Table("Model", ("fact", "value"))
    model = info.model
    assert model is not None
    table.row("architecture", model.architecture)
    table.row("parameters", f"{model.num_parameters / 1e9:.3f} billion")
    table.row("layers", str(model.num_layers))
    table.row("heads", f"{model.num_heads} query, {model.num_kv_heads} key/value, of size {model.head_dim}")
    table.row("dtype", model.dtype)
    table.row("weights per device", _gib(model.weight_bytes) or "")
    table.row("KV cache per token", f"{model.kv_bytes_per_token / 1024:g} KiB")
    return table


def _decisions(decisions: tuple[Decision, ...]) -> Table:
    table = Table("Decisions", ("what", "value", "why"))
    for decision in decisions:
        table.row(decision.name, _short(decision.value), decision.reason)
    return table


def _short(value: str) -> str:
    """A long list by its beginning and end."""
    parts = value.split(",")
    return value if len(parts) <= 8 else f"{','.join(parts[:4])},...,{parts[-1]} ({len(parts)})"


def _kernels(resolutions: tuple[Resolution, ...]) -> Table:
    table = Table("Kernels", ("kernel", "implementation", "not chosen"))
    for found in resolutions:
        reasons = {**found.rejected, **found.demoted}
        table.row(found.kernel, found.chosen, "\n".join(f"{name}: {reason}" for name, reason in reasons.items()))
    return table


def _memory(info: ServerInfo) -> Table:
    table = Table("Memory per device", ("for", "size"))
    for name, size in info.memory.items():
        table.row(name, _gib(size) or "")
    limits = info.limits
    if limits is not None:
        table.row("context", f"{limits.max_model_len} tokens")
        table.row("KV blocks", f"{limits.num_blocks} of {limits.block_size} tokens")
    return table
