"""What a worker process that inspects the machine says on its control link; see `InspectionConfiguration`."""

from enum import StrEnum

from .facts import DeviceProfile, Provenance
from .messages import Message


class PlatformSeen(Message, frozen=True, tag="platform_seen"):
    """One platform in the order of detection: its devices, or why it cannot be used. `notes` are worth a line each."""

    name: str
    refused: str | None
    devices: tuple[DeviceProfile, ...] = ()
    is_chosen: bool = False
    notes: tuple[str, ...] = ()


class Level(StrEnum):
    """How bad a verdict is."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


class Verdict(Message, frozen=True, tag="verdict"):
    """One judgement of the doctor. `cure` is empty only when there is nothing to do."""

    check: str
    level: Level
    text: str
    cure: str = ""


class Measured(Message, frozen=True, tag="measured"):
    """One value that `diagnose` measured, by the name of the profile's field ("capability.launch_latency_us")."""

    test: str
    field: str
    value: float | int | bool | str | dict[str, int]
    unit: str
    before: float | int | bool | str | dict[str, int] | None = None
    provenance: Provenance | None = None


class TestSkipped(Message, frozen=True, tag="test_skipped"):
    """A test of `diagnose` that makes no sense, or cannot run, on this device."""

    test: str
    reason: str


class ImplementationSeen(Message, frozen=True, tag="implementation_seen"):
    """One implementation of a kernel, and how it stands on one device. `reason` is for what does not fit or failed."""

    kernel: str
    implementation: str
    device: str
    state: str
    reason: str = ""
    needs: str = ""


class Inspected(Message, frozen=True, tag="inspected"):
    """The end of an inspection; `text` is what `diagnose` wrote, ready to be a file."""

    text: str = ""


FromInspection = PlatformSeen | Verdict | Measured | TestSkipped | ImplementationSeen | Inspected
