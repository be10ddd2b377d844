"""A text that arrives in pieces, for parsers that are generators: what they yield are events, or None for more text.

A parser decides on the text alone and waits where it cannot decide yet, so that the events joined are the same however
the text was cut.
"""

from collections.abc import Generator
from typing import TypeVar

from msgspec import Struct


class Text(Struct, frozen=True):
    """More of the answer's text."""

    text: str


class Reasoning(Struct, frozen=True):
    """More of the reasoning."""

    text: str


class CallBegan(Struct, frozen=True):
    """A call of this tool; its arguments follow."""

    name: str


class Arguments(Struct, frozen=True):
    """More of the JSON text of the last call's arguments."""

    text: str


class CallBroken(Struct, frozen=True):
    """The last call's arguments are not JSON: it was none. What the model wrote of it follows as text."""


class CallEnded(Struct, frozen=True):
    """The last call is complete."""


Event = Text | Reasoning | CallBegan | Arguments | CallBroken | CallEnded
Result = TypeVar("Result")
Parse = Generator[Event | None, None, Result]


class Scanner:
    """`at` is where the parser reads; text from `mark` on is kept, for what turns out to be something else."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.mark = 0
        self.has_ended = False
        self.was_cut = False  # at its end: by a limit, not by the model

    def feed(self, piece: str) -> None:
        """More text; what nobody needs any more goes."""
        drop = min(self.at, self.mark)
        self.text = self.text[drop:] + piece
        self.at -= drop
        self.mark -= drop

    def end(self, was_cut: bool) -> None:
        """Nothing follows."""
        self.has_ended, self.was_cut = True, was_cut

    def set_mark(self) -> None:
        """`back` and `since_mark` begin here."""
        self.mark = self.at

    def back(self) -> None:
        """Read again from the mark."""
        self.at = self.mark

    def since_mark(self) -> str:
        """What was read since the mark."""
        return self.text[self.mark : self.at]

    def peek(self) -> Parse[str]:
        """The next character; empty at the end."""
        while self.at == len(self.text) and not self.has_ended:
            yield None
        return self.text[self.at : self.at + 1]

    def skip_space(self) -> Parse[str]:
        """Read over white space; the character after it."""
        while (character := (yield from self.peek())).isspace():
            self.at += 1
        return character

    def take(self, literal: str) -> Parse[bool]:
        """Read over this text, if it comes next."""
        while True:
            found = self.text[self.at : self.at + len(literal)]
            if found == literal:
                self.at += len(literal)
                return True
            if not literal.startswith(found) or self.has_ended:
                return False
            yield None

    def until(self, markers: tuple[str, ...], kind: type[Text] | type[Reasoning]) -> Parse[str | None]:
        """Everything before the first marker is yielded, without white space at its end; the marker is read over.

        None: the text ended without one, and is whole.
        """
        while True:
            rest = self.text[self.at :]
            places = [(place, marker) for marker in markers if (place := rest.find(marker)) >= 0]
            if places:
                place, marker = min(places)
                self.at += place + len(marker)
                self.set_mark()
                if shown := rest[:place].rstrip():
                    yield kind(shown)
                return marker
            shown = rest if self.has_ended else rest[: len(rest) - _held(rest, markers)].rstrip()
            self.at += len(shown)
            self.set_mark()
            if shown:
                yield kind(shown)
            if self.has_ended:
                return None
            yield None

    def rest(self) -> Parse[None]:
        """All that follows is text."""
        while True:
            shown, self.at = self.text[self.at :], len(self.text)
            self.set_mark()
            if shown:
                yield Text(shown)
            if self.has_ended:
                return
            yield None


def _held(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end may be the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
