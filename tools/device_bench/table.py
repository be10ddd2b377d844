"""A table of texts, for a page and for a terminal."""

from collections.abc import Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """`title` stands above it."""

    title: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]

    def markdown(self) -> str:
        rows = [self.columns, ["---"] * len(self.columns), *self.lines]
        return f"{self.title}\n\n" + "".join("| " + " | ".join(row) + " |\n" for row in rows)

    def plain(self) -> str:
        rows = [self.columns, *self.lines]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return f"{self.title}\n" + "".join(line.rstrip() + "\n" for line in padded)
