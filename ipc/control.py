"""Between the supervisor and each of its children: the control link's messages.

The first message to a child is its configuration (`Begin`). File descriptors ride on `Begin` and `Attach`, in the
order that the message's docstring gives.
"""

from .configuration import Configuration
from .facts import Phase
from .inspection import FromInspection
from .messages import Decoder, Message
from .server_info import ServerInfo


class Begin(Message, frozen=True, tag="begin"):
    """A child's configuration.

    Descriptors: for the core and for workers those of `Attach`; for a frontend none.
    """

    configuration: Configuration


class Attach(Message, frozen=True, tag="attach"):
    """Rings of a (new) generation.

    Descriptors to the core: plan ring, then per rank its plan doorbell, then per rank its result ring, then the one
    result doorbell that all ranks ring. To a worker: plan ring, its plan doorbell, its result ring, the result
    doorbell.
    """

    generation: int


class ModelKnown(Message, frozen=True, tag="model_known"):
    """To frontends: the local directory with tokenizer and configuration, and the name the user gave."""

    directory: str
    root: str


class PhaseNotice(Message, frozen=True, tag="phase_notice"):
    """To frontends: what the engine is doing while it is not ready, for the 503 answer."""

    phase: Phase
    elapsed_s: float


class CoreStarted(Message, frozen=True, tag="core_started"):
    """To frontends: a core of this incarnation takes connections (again). Say Hello."""

    incarnation: int


class CoreLost(Message, frozen=True, tag="core_lost"):
    """To frontends: fail every live request of that core yourself."""

    incarnation: int
    cause: str


class FrontendLost(Message, frozen=True, tag="frontend_lost"):
    """To the core: abort everything that frontend had asked for."""

    index: int
    incarnation: int


class WorkersLost(Message, frozen=True, tag="workers_lost"):
    """To the core: the worker group of that generation is gone; fail its requests, wait for Attach."""

    generation: int
    cause: str


class Drain(Message, frozen=True, tag="drain"):
    """Finish what runs, accept nothing new, then say Drained. At the deadline the supervisor sends Stop."""

    timeout_s: float


class Stop(Message, frozen=True, tag="stop"):
    """End now, in order: clean error events to open streams, then exit 0."""


class PhaseReport(Message, frozen=True, tag="phase_report"):
    """A child's phase began (`took_s` None), moved (`fraction`) or ended."""

    phase: Phase


class Listening(Message, frozen=True, tag="listening"):
    """A frontend answers HTTP on this port."""

    port: int


class Ready(Message, frozen=True, tag="ready"):
    """The core made its boot token; `lines` are for the terminal: the decisions, the kernels, the memory."""

    generation: int
    lines: tuple[str, ...] = ()


class Explained(Message, frozen=True, tag="explained"):
    """From a core that explains: what serving would have settled on. Nothing was loaded."""

    info: ServerInfo


class Pulse(Message, frozen=True, tag="pulse"):
    """From the core and frontends, each second: this process's loop still turns."""


class Drained(Message, frozen=True, tag="drained"):
    """Nothing of this child's runs any more."""


class DrainAsked(Message, frozen=True, tag="drain_asked"):
    """From a frontend: an admin wants the server to end as SIGTERM ends it."""


class LogLevelAsked(Message, frozen=True, tag="log_level_asked"):
    """From a frontend: an admin wants lines of this level (info, warning, error) and above, and no others."""

    level: str


class Refused(Message, frozen=True, tag="refused"):
    """The child cannot start as asked; no restart would help. `text` ends with the cure."""

    text: str


class Fault(Message, frozen=True, tag="fault"):
    """The child is about to exit because it, or its device, is broken. A restart may help."""

    text: str


class GroupFault(Message, frozen=True, tag="group_fault"):
    """From the core: the worker group hangs or computes wrongly, and must be killed and started again."""

    generation: int
    text: str


ToChild = Begin | Attach | ModelKnown | PhaseNotice | CoreStarted | CoreLost | FrontendLost | WorkersLost | Drain | Stop
FromChild = (
    PhaseReport
    | Listening
    | Ready
    | Explained
    | Drained
    | DrainAsked
    | LogLevelAsked
    | Refused
    | Fault
    | GroupFault
    | Pulse
    | FromInspection
)

TO_CHILD: Decoder[ToChild] = Decoder(ToChild)
FROM_CHILD: Decoder[FromChild] = Decoder(FromChild)
