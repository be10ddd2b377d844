"""Text that is still coming, for parsers written as if it were all there.

A parser is a generator that yields wherever it needs more than has come. It asks for characters and never learns where
a chunk ended, so what it finds cannot depend on that.
"""

import re
from collections.abc import Generator
from typing import TypeVar

from .json_scanner import JsonScanner

Result = TypeVar("Result")
Steps = Generator[None, None, Result]

_SPACE = re.compile(r"[ \t\n\r]*")


class Source:
    """`text[at:]` has come and is not taken yet; `is_ended`: nothing follows it."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_ended = False

    def drop_taken(self) -> None:
        """Forget what was taken; places in the text before this are void."""
        self.text, self.at = self.text[self.at :], 0

    def more(self) -> Steps[bool]:
        """Until there is more text than now; False: there will not be."""
        size = len(self.text)
        while len(self.text) == size:
            if self.is_ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        while self.at == len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def skip_space(self) -> Steps[None]:
        """Take white space."""
        while True:
            found = _SPACE.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text) or not (yield from self.more()):
                return

    def take(self, literal: str) -> Steps[bool]:
        """Take this text if it comes next, else nothing."""
        while True:
            if self.text.startswith(literal, self.at):
                self.at += len(literal)
                return True
            if not literal.startswith(self.text[self.at :]) or not (yield from self.more()):
                return False

    def take_any(self, *literals: str) -> Steps[str | None]:
        """Take the first of these texts that comes next."""
        for literal in literals:
            if (yield from self.take(literal)):
                return literal
        return None

    def take_while(self, pattern: re.Pattern[str], limit: int) -> Steps[str]:
        """Take the run of characters of this class, `limit` at most."""
        begin = self.at
        while True:
            found = pattern.match(self.text, self.at, begin + limit)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text) or self.at == begin + limit or not (yield from self.more()):
                return self.text[begin : self.at]

    def take_json(self) -> Steps[str | None]:
        """Take one whole JSON value; None, and the place is lost, where none comes."""
        scanner = JsonScanner()
        while True:
            self.at = scanner.scan(self.text, self.at)
            if scanner.is_done:
                return scanner.escaped()
            if scanner.is_broken or not (yield from self.more()):
                return None


def tag_begun(text: str, tags: tuple[str, ...]) -> int:
    """How many of the last characters may be the beginning of a tag."""
    longest = max(map(len, tags), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        end = text[len(text) - size :]
        if any(tag.startswith(end) for tag in tags):
            return size
    return 0
