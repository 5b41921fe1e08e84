"""``lockstep list`` shows the runs of a directory: what each trains, how far it is, and its result."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.commands.parser import CommandParser, from_home
from lockstep.runs.listing import SORTS, Row, ordered, printable, row_of, runs_in
from lockstep.runs.progress import UNKNOWN, format_number

Value = TypeVar("Value")
RUNS = "runs"
NUMBERS = ("steps", "return", "ranks", "size")
COLUMNS = ("name", "environment", "seed", "steps", "status", "return", "ranks", "started", "size")


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep list [RUNS_DIR …]``: a table of runs, or JSON."""
    parser = CommandParser(prog="lockstep list", description="Show the runs of a directory; nothing of theirs is run.")
    parser.add_argument(
        "places",
        type=from_home,
        nargs="*",
        metavar="RUNS_DIR",
        help="directories of runs, or runs, by path or name (default: runs)",
    )
    parser.add_argument("--sort", choices=SORTS, default="date", help="the highest, the newest first (default: date)")
    parser.add_argument("--json", action="store_true", help="print a list of objects: bytes, ISO dates in UTC")
    options = parser.parse_args(argv)
    places = [_place_of(place) for place in options.places] or [Path(RUNS)]
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


def _place_of(given: str) -> Path:
    """Returns a directory of runs, or a run's directory, given by its path or its name in ``runs``."""
    for place in (Path(given), Path(RUNS, given)):
        if place.is_dir():
            return place
    raise ValueError(f"list: {given} is no directory, and no run in {RUNS}")


def print_table(rows: Sequence[Row]) -> None:
    """Prints one row per run, and below them a line for each run that has a problem."""
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in NUMBERS else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in cells_of(row)))
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)
    for row in rows:
        if row.problem is not None:
            print(printable(row.problem))


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
        size_in_words(row.size),
    )


def _shown(value: Value | None, say: Callable[[Value], str]) -> str:
    return UNKNOWN if value is None else say(value)


def local_date(date: str) -> str:
    """Formats an ISO date in this machine's time zone, to the minute."""
    return datetime.datetime.fromisoformat(date).astimezone().strftime("%Y-%m-%d %H:%M")


def size_in_words(size: int) -> str:
    """Formats bytes in the largest unit that gives at least 1, by powers of 1,000."""
    amount, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while round(amount, 1) >= 1000 and len(units) > 1:
        amount /= 1000
        units.pop(0)
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{amount:.1f} {units[0]}"
