"""Tables of the commands: boxes and colours on a terminal, aligned plain text when piped."""

import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

import msgspec

_MAX_COLUMN = 60


class Table:
    """A title, column names and rows of text; a cell may have several lines."""

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self.title = title
        self.columns = tuple(columns)
        self.rows: list[tuple[str, ...]] = []

    def row(self, *cells: str) -> None:
        assert len(cells) == len(self.columns), (cells, self.columns)
        self.rows.append(cells)


def print_tables(tables: Sequence[Table]) -> None:
    """To stdout, as fits where it goes."""
    if sys.stdout is not None and sys.stdout.isatty():
        _print_rich(tables)
        return
    for table in tables:
        print("\n".join(plain_lines(table)), end="\n\n")


def print_json(value: object) -> None:
    """To stdout, the same text for the same facts: sets and mappings have no order of their own."""
    print(msgspec.json.format(msgspec.json.encode(value, order="deterministic")).decode())


def plain_lines(table: Table) -> list[str]:
    """Columns padded with blanks; long cells are wrapped, so that lines stay readable in a log."""
    cells = [tuple(_wrapped(cell) for cell in row) for row in table.rows]
    widths = [
        max(len(name), *(len(line) for row in cells for line in row[index])) if cells else len(name)
        for index, name in enumerate(table.columns)
    ]
    lines = [table.title, _line(table.columns, widths), _line(["-" * width for width in widths], widths)]
    for row in cells:
        lines += [_line(parts, widths) for parts in zip_longest(*row, fillvalue="")]
    return lines


def _wrapped(cell: str) -> list[str]:
    return [part for line in cell.split("\n") for part in textwrap.wrap(line, _MAX_COLUMN) or [""]]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _print_rich(tables: Sequence[Table]) -> None:
    import rich.box
    import rich.console
    import rich.table
    import rich.text

    console = rich.console.Console()
    for table in tables:
        drawn = rich.table.Table(title=table.title, title_justify="left", box=rich.box.SIMPLE_HEAD)
        for name in table.columns:
            drawn.add_column(name, overflow="fold")
        for row in table.rows:
            drawn.add_row(*(rich.text.Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        console.print(drawn)


_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}
