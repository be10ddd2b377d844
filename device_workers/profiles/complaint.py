"""Where in a capability file something is wrong, said so that the user can repair it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ...ipc.conditions import Refusal


class Place:
    """A key path of a file: "hopper.yaml: products[0].bandwidth"."""

    def __init__(self, label: str, path: str = "") -> None:
        self.label = label
        self.path = path

    def key(self, name: str) -> Place:
        return Place(self.label, f"{self.path}.{name}" if self.path else name)

    def item(self, index: int) -> Place:
        return Place(self.label, f"{self.path}[{index}]")

    def refusal(self, text: str) -> Refusal:
        return Refusal(f"{self.label}: {self.path}: {text}" if self.path else f"{self.label}: {text}")

    def unknown(self, name: str, allowed: Iterable[str], what: str = "key") -> Refusal:
        """For a name that is not one of the allowed: the nearest first, then all."""
        allowed = list(allowed)
        listed = ", ".join(allowed)
        return self.key(name).refusal(f"there is no such {what}{nearest(name, allowed)}; take one of {listed}")


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Such as " (did you mean 'bandwidth'?)", or nothing."""
    by_lower = {word.lower(): word for word in allowed}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f" (did you mean {by_lower[matches[0]]!r}?)" if matches else ""
