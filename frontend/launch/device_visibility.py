"""Which devices each worker may see: the vendors' visibility variables, written for one worker at a time.

Nothing is known of the vendor here, so a worker gets every vendor's variable; each driver reads its own alone. Entries
are passed on as the user wrote them: indices, identifiers, slices. The worker checks what it then finds.
"""

from collections.abc import Mapping

from msgspec import Struct

from ...ipc.conditions import Refusal
from .options import AUTO, Options

_TAKE_IDENTIFIERS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_TAKE_INDICES = ("ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES")
_WRITTEN = (*_TAKE_IDENTIFIERS, *_TAKE_INDICES)
_READ = (*_WRITTEN, "ROCR_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR")
_ORDER = "CUDA_DEVICE_ORDER"
_WITHOUT_VARIABLES = ("cpu", "null", "metal")


class Visibility(Struct, frozen=True, kw_only=True):
    """For one worker: what is written into its environment, and all visibility variables that hold there."""

    written: dict[str, str]
    holding: dict[str, str]


def worker_visibility(options: Options, rank: int, inherited: Mapping[str, str]) -> Visibility:
    """One worker sees exactly its own device, unless there is one worker and no device was named.

    Raises:
        Refusal: a variable that this process was started with names too few devices.
    """
    held = {name: inherited[name] for name in _READ if name in inherited}
    if not options.device and options.tensor_parallel == 1:
        return Visibility(written={}, holding=held)
    asked = options.device[rank] if options.device else str(rank)
    written = {_ORDER: inherited.get(_ORDER, "PCI_BUS_ID")}  # so that an index is the one the vendor's tools show
    for name in _WRITTEN if asked.isdecimal() else _TAKE_IDENTIFIERS:
        written[name] = _entry(name, inherited.get(name), asked, options)
    return Visibility(written=written, holding=held | {name: written[name] for name in written if name != _ORDER})


def _entry(name: str, inherited: str | None, asked: str, options: Options) -> str:
    """What stands for one device: an index counts among those that the inherited variable shows."""
    if not inherited or not asked.isdecimal():
        return asked
    entries = [entry.strip() for entry in inherited.split(",")]
    if int(asked) < len(entries):
        return entries[int(asked)]
    if options.platform in _WITHOUT_VARIABLES:
        return inherited
    wanted = f"--device {asked}" if options.device else f"--tensor-parallel {options.tensor_parallel}"
    platform = " or --platform cpu" if options.platform == AUTO else ""
    raise Refusal(
        f"{wanted} needs device {asked} of those that {name}={inherited} shows, and it shows {len(entries)}. "
        f"Name more devices in it, or use fewer{platform}."
    )
