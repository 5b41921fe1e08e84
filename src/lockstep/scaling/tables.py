"""Prints a table of numbers so that no digit is cut: turned round where the terminal is too narrow for it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

PIPE = 10_000
"""Columns of what isn't a terminal: a table there is as wide as it has to be."""

Cells = list[tuple[str, bool]]
"""Texts of a column, each with whether it may be wrapped between words."""


def print_numbers(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], prose: Collection[str] = ()) -> None:
    """Prints one row for each of ``rows``, or one column where that is too wide, in as many tables as it takes.

    Columns whose heads are in ``prose`` may be wrapped between words, and begin at the left; the others are whole.
    """
    console = Console(width=None if sys.stdout.isatty() else PIPE)
    columns = [[(head, True), *((row[i], head in prose) for row in rows)] for i, head in enumerate(heads)]
    widths = _widths(columns, console.width)
    if widths is not None:
        at_left = [i for i, head in enumerate(heads) if head in prose]
        console.print(_table(columns, widths, at_left, escape(title)))
        return
    names: Cells = [(head, False) for head in heads]
    left = [[(text, head in prose) for text, head in zip(row, heads, strict=True)] for row in rows]
    console.print(Text(title))
    while left:
        count, widths = 1, None
        for more in range(1, len(left) + 1):
            fitting = _widths([names, *left[:more]], console.width)
            count, widths = (more, fitting) if fitting is not None else (count, widths)
        console.print(_table([names, *left[:count]], widths, [0]))
        left = left[count:]


def _widths(columns: Sequence[Cells], width: int) -> list[int] | None:
    """Shares out the columns of a terminal; None if they are too few."""
    wanted = [max(len(text) for text, _ in cells) for cells in columns]
    needed = [max(_longest(text) if may_wrap else len(text) for text, may_wrap in cells) for cells in columns]
    spare = width - (3 * len(needed) + 1) - sum(needed)  # a border and two blanks for each, and the last border
    if spare < 0:
        return None
    while spare > 0 and (narrow := [i for i, want in enumerate(wanted) if needed[i] < want][:spare]):
        for i in narrow:
            needed[i] += 1
        spare -= len(narrow)
    return needed


def _longest(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _table(
    columns: Sequence[Cells], widths: Sequence[int] | None, at_left: Collection[int], title: str | None = None
) -> Table:
    """Makes the table; without widths, of a terminal narrower than a single column, cells go on in the next line."""
    table = Table(title=title)
    for i, cells in enumerate(columns):
        width = None if widths is None else widths[i]
        table.add_column(Text(cells[0][0]), justify="left" if i in at_left else "right", width=width, overflow="fold")
    for row in zip(*(cells[1:] for cells in columns), strict=True):
        table.add_row(*(Text(text) for text, _ in row))
    return table
