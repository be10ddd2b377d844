"""Errors named by their condition. A message ends with the cure where the user has one."""


class TrimaranError(Exception):
    """Root of the conditions this engine raises on purpose."""


class Refusal(TrimaranError):
    """The engine will not start or serve as asked. The text says what was found, what is needed and the cure."""


class PeerDied(TrimaranError):
    """The process at the other end of a link has ended."""

    def __init__(self, peer: str, detail: str = "") -> None:
        super().__init__(f"{peer} died{f': {detail}' if detail else ''}")
        self.peer = peer
        self.detail = detail


class StepFailed(TrimaranError):
    """One step could not be computed. Its requests fail; the engine goes on."""


class DeviceFault(TrimaranError):
    """The device can no longer be trusted. The worker must end; the worker group restarts."""


class Oversized(TrimaranError):
    """A packed message does not fit its ring slot and must travel another way."""

    def __init__(self, num_bytes: int, capacity: int) -> None:
        super().__init__(f"{num_bytes} bytes do not fit a slot of {capacity}")
        self.num_bytes = num_bytes
        self.capacity = capacity


_CURE_WORDS = frozenset(
    {"--platform", "ask", "check", "choose", "connect", "convert", "download", "end", "give", "install", "leave"}
    | {"load", "lower", "name", "pass", "pip", "raise", "remove", "rename", "repair", "run", "set", "start", "take"}
    | {"update", "use", "write"}
)


def part_cure(refusal: str, otherwise: str) -> tuple[str, str]:
    """What is wrong, and the cure with which a refusal ends; `otherwise` for one that ends without."""
    text = refusal.strip().rstrip(".")
    for separator in ("\n", "; ", ". ", ": "):
        found, between, cure = text.rpartition(separator)
        if between and cure.split()[0].lstrip("(").lower() in _CURE_WORDS:
            return found, cure
    found, between, cure = text.rpartition("; ")
    return (found, cure) if between else (refusal, otherwise)
