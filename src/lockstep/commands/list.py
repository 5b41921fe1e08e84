"""``lockstep list`` shows the runs of a directory: what each trains, how far it is, and its result."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.commands.parser import CommandParser, add_runs_dir, from_home
from lockstep.runs.listing import SORTS, Row, ordered, printable, row_of, runs_in
from lockstep.runs.progress import UNKNOWN
from lockstep.runs.shown.numerals import format_number, format_size

Value = TypeVar("Value")
NUMBERS = ("steps", "return", "ranks", "size")
GAP = 2  # blanks between two columns
LEAST_OF_AN_ID = 8  # characters of an environment's id that are worth a column
COLUMNS = ("name", "environment", "seed", "steps", "status", "return", "ranks", "started", "size")


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep list [RUNS_DIR …]``: a table of runs, or JSON."""
    parser = CommandParser(prog="lockstep list", description="Show the runs of a directory; nothing of theirs is run.")
    parser.add_argument(
        "places",
        type=from_home,
        nargs="*",
        metavar="RUNS_DIR",
        help="directories of runs, or runs, by path or name (default: --runs-dir)",
    )
    add_runs_dir(parser)
    parser.add_argument("--sort", choices=SORTS, default="date", help="the highest, the newest first (default: date)")
    parser.add_argument("--json", action="store_true", help="print a list of objects: bytes, ISO dates in UTC")
    options = parser.parse_args(argv)
    runs_dir = Path(options.runs_dir)
    places = [_place_of(place, runs_dir) for place in options.places] or [runs_dir]
    one = len(places) == 1
    rows = [row_of(path, printable(path.name if one else str(path))) for path in runs_in(places)]
    rows = ordered(rows, options.sort)
    if options.json:
        print(json.dumps([row.to_json() for row in rows], indent=1))
    elif not rows:
        print(f"no runs in {', '.join(map(str, places))}; lockstep train ENVIRONMENT makes one")
    else:
        print_table(rows)
    return 0


def _place_of(given: str, runs_dir: Path) -> Path:
    """Returns a directory of runs, or a run's directory, given by its path or its name in ``runs_dir``.

    If both are there, it is the first that holds a run: a folder of another kind may have a run's name.
    """
    there = [place for place in (Path(given), runs_dir / given) if place.is_dir()]
    if not there:
        raise ValueError(f"list: {given} is no directory, and no run in {runs_dir}")
    return next((place for place in there if runs_in([place])), there[0])


def print_table(rows: Sequence[Row]) -> None:
    """Prints one row per run, and below them a line for each run that has a problem.

    On a terminal, columns are left out until names fit in one line, so that they can be copied.
    """
    cells = [cells_of(row) for row in rows]
    needed = {name: max(len(name), *(cell_len(row[i]) for row in cells)) for i, name in enumerate(COLUMNS)}
    widths = shown_widths(needed, Console().width) if sys.stdout.isatty() else needed
    table = Table(box=None, pad_edge=False)
    for name, width in widths.items():
        table.add_column(name, justify="right" if name in NUMBERS else "left", width=width, no_wrap=True)
    for row in cells:
        table.add_row(*(Text(cell) for name, cell in zip(COLUMNS, row, strict=True) if name in widths))
    Console(width=sum(widths.values()) + GAP * len(widths)).print(table)
    for row in rows:
        if row.problem is not None:
            print(printable(row.problem))
    if hidden := [name for name in COLUMNS if name not in widths]:
        print(f"not shown: {', '.join(hidden)}; a wider terminal or --json shows them")


def shown_widths(needed: Mapping[str, int], width: int) -> dict[str, int]:
    """Returns the columns that a terminal of ``width`` shows, with their widths: all of a name, and what else fits."""
    shown = dict(needed)
    for name in ("size", "ranks", "started", "environment", "seed"):
        spare = width - sum(shown.values()) - GAP * (len(shown) - 1)
        if spare >= 0:
            break
        if name == "environment" and shown[name] + spare >= LEAST_OF_AN_ID:
            shown[name] += spare
        else:
            del shown[name]
    return shown


def cells_of(row: Row) -> tuple[str, ...]:
    """Returns a run's cells as text, in the order of :data:`COLUMNS`."""
    return (
        row.name,
        row.environment or UNKNOWN,
        _shown(row.seed, str) if row.seeds == 1 else f"{row.seeds} seeds",
        _shown(row.steps, "{:,}".format),
        row.status,
        _shown(row.final_return, format_number),
        _shown(row.ranks, str),
        _shown(row.started, local_date),
        format_size(row.size),
    )


def _shown(value: Value | None, say: Callable[[Value], str]) -> str:
    return UNKNOWN if value is None else say(value)


def local_date(date: str) -> str:
    """Formats an ISO date in this machine's time zone, to the minute; it is unknown if that is beyond the calendar."""
    try:
        return datetime.datetime.fromisoformat(date).astimezone().strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError):
        return UNKNOWN
