"""Finds stop strings in a text that arrives in pieces."""

from collections.abc import Sequence
from typing import NamedTuple


class Cut(NamedTuple):
    """What a piece releases: text that may be shown, and the stop string that ended the text, if one did."""

    text: str
    stop: str | None


class StopStrings:
    """The stop strings of one request, prepared once; `start` gives a matcher for one sequence."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would end every text"
        self.stops = tuple(dict.fromkeys(stops))
        self.fallbacks = tuple(_fallback(stop) for stop in self.stops)

    def start(self, *, include_stop: bool) -> "StopMatcher":
        """A matcher at the beginning of a text."""
        return StopMatcher(self, include_stop)


class StopMatcher:
    """Reads one text, character by character, so that the result does not depend on how it was cut into pieces.

    The stop string that is complete first wins; of several complete at the same character, the longest. Text is held
    back only as long as it may be the start of a stop string.
    """

    def __init__(self, strings: StopStrings, include_stop: bool) -> None:
        self._strings = strings
        self._matched = [0] * len(strings.stops)  # per stop string: how much of it the text now ends with
        self._include_stop = include_stop
        self._held = ""

    def feed(self, piece: str) -> Cut:
        """After a cut with a stop, feed nothing more."""
        text = self._held + piece
        for position, character in enumerate(piece, len(self._held)):
            if (stop := self._advance(character)) is not None:
                end = position + 1 if self._include_stop else position + 1 - len(stop)
                self._held = ""
                return Cut(text[:end], stop)
        shown = len(text) - max(self._matched)
        self._held = text[shown:]
        return Cut(text[:shown], None)

    def flush(self) -> str:
        """What was held back; the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        found: str | None = None
        matched = self._matched
        for index, stop in enumerate(self._strings.stops):
            length = matched[index]
            while length and stop[length] != character:
                length = self._strings.fallbacks[index][length - 1]
            if stop[length] == character:
                length += 1
            matched[index] = length
            if length == len(stop) and (found is None or length > len(found)):
                found = stop
        return found


def _fallback(stop: str) -> list[int]:
    """Per prefix of `stop`, the length of its longest proper prefix that is also its suffix (Knuth, Morris, Pratt)."""
    lengths = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = lengths[length - 1]
        if stop[length] == stop[index]:
            length += 1
        lengths[index] = length
    return lengths
