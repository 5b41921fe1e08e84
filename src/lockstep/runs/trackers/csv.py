"""Writes metrics as a CSV table: one row per iteration, one column per metric."""

from __future__ import annotations

import csv
import io
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.runs.trackers.files import PlainRecord, open_to_append, read_through, replacing
from lockstep.runs.trackers.jsonl import records_in
from lockstep.runs.trackers.service import Tracker


class CsvTracker(Tracker):
    """Appends one row per record, which is in the file on return.

    The header has the first record's keys, or those of an existing file. A record with new keys, such as the first
    evaluation, makes the tracker rewrite the file with further columns at the right. Missing values, ``None``, NaN and
    infinities become empty cells.
    """

    writes_files = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header = _read_header(path)
        self._open()

    def _open(self) -> None:
        self._file = open_to_append(self._path)
        self._rows = _writer(self._file)

    def log(self, record: Mapping[str, Any]) -> None:
        """Appends ``record`` as a row."""
        self.log_all([record])

    def log_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Appends records as rows, in order."""
        for record in map(PlainRecord.of, records):
            if list(record) == self._header:
                self._rows.writerow(record.cells)
                continue
            new = [key for key in record if key not in self._header]
            if new:
                self._extend(new)
            cells = dict(zip(record, record.cells, strict=True))
            self._rows.writerow([cells.get(key) for key in self._header])
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _extend(self, columns: Sequence[str]) -> None:
        """Rewrites the file with ``columns`` added at the right."""
        self._file.close()
        header = [*self._header, *columns]
        with self._path.open(encoding="utf-8", newline="") as old:
            rows = csv.reader(read_through(old))
            next(rows, None)
            _rewrite(self._path, header, (row + [""] * (len(header) - len(row)) for row in rows))
        self._header = header
        self._open()


def cut_csv(path: Path, last_iteration: int) -> set[int]:
    """Removes the rows of iterations after ``last_iteration`` and a torn last row, atomically; the header stays.

    Broken rows are treated as in :func:`~lockstep.runs.trackers.jsonl.cut_jsonl`, but without a warning, which
    :func:`mend_csv` gives. If the header has zeros in it, all is removed. A file that doesn't exist is left alone.

    Returns:
        The iterations whose rows stay.

    Raises:
        ValueError: it is no table of metrics; one line says where.
    """
    stay: set[int] = set()
    if path.is_file():
        with path.open("rb") as file:
            header, rows = _whole_rows(path, file)
            _rewrite(path, header, _rows_until(path, header, rows, last_iteration, stay))
    return stay


def check_csv(path: Path, last_iteration: int) -> None:
    """Raises a ``ValueError`` if :func:`cut_csv` would."""
    if path.is_file():
        with path.open("rb") as file:
            deque(_rows_until(path, *_whole_rows(path, file), last_iteration, set()), maxlen=0)


def mend_csv(path: Path, records: Path, there: set[int], wanted: set[int]) -> str | None:
    """Rewrites the table, byte for byte, from the JSON lines in ``records`` if it lacks a row that they have.

    A table that also has rows that they don't have is left as it is.

    Args:
        path: the table; made if it is missing.
        records: the file of JSON lines, none of which is broken.
        there: iterations in the table.
        wanted: iterations in ``records``.

    Returns:
        A line for the user; None if nothing is missing.
    """
    missing = len(wanted - there)
    if not missing or (path.exists() and not path.is_file()):
        return None
    said = f"{path} misses {missing:,} of {len(wanted):,} rows that {records.name} has"
    if not there <= wanted:
        return f"{said}, and has others; it stays as it is"
    path.touch()
    with records.open("rb") as lines:
        header = list(dict.fromkeys(key for line in lines for key in json.loads(line)))
    with records.open("rb") as lines:
        _rewrite(path, header, (_cells(header, PlainRecord(json.loads(line))) for line in lines))
    return f"{said}; it was written anew"


def table_differs(path: Path, records: Path) -> bool:
    """Tells whether a table and a file of JSON lines have whole but different rows of the same iteration.

    Raises:
        ValueError: the first file is no table of metrics; one line.
    """
    if not path.is_file():
        return False
    with path.open("rb") as file:
        header, rows = _whole_rows(path, file)
        whole = (row for _, row in rows if len(row) == len(header))
        known = {row[header.index("iteration")]: row for row in whole}
    for iteration, line in records_in(records):
        row = known.get(str(iteration))
        cells = _cells(header, PlainRecord(json.loads(line)))
        if row is not None and row != ["" if cell is None else str(cell) for cell in cells]:
            return True
    return False


def _cells(header: Sequence[str], record: PlainRecord) -> list[Any]:
    cells = dict(zip(record, record.cells, strict=True))
    return [cells.get(key) for key in header]


def _whole_rows(path: Path, file: Iterable[bytes]) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Reads the header, and each row without zeros in it together with the number of its line."""
    at = 0

    def lines() -> Iterator[str]:
        nonlocal at
        for at, line in enumerate(read_through(file), start=1):
            if b"\0" not in line and line.endswith(b"\n"):  # only the last line can lack its end
                yield line.decode(errors="replace")
            elif at == 1:
                yield "\n"

    rows = csv.reader(lines())
    header = next(rows, [])
    if not header:
        return [], iter(())
    if "iteration" not in header:
        raise ValueError(f"{path} has no column named iteration: it is not a table of metrics")
    return header, ((at, row) for row in rows)


def _read_header(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file), [])


def _rows_until(
    path: Path, header: list[str], rows: Iterable[tuple[int, list[str]]], last_iteration: int, stay: set[int]
) -> Iterator[list[str]]:
    """Yields the rows that stay, and adds their iterations to ``stay``."""
    reached = 0
    for number, row in rows:
        cell = row[header.index("iteration")] if len(row) == len(header) else ""
        if cell.isdecimal():
            reached = max(reached, int(cell))
            if int(cell) <= last_iteration:
                stay.add(int(cell))
                yield row
        elif reached >= last_iteration > 0:
            return
        else:
            raise ValueError(f"{path}: line {number} does not fit the header; remove that line")


def _rewrite(path: Path, header: list[str], rows: Iterable[list[str]]) -> None:
    with replacing(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        if header:
            _writer(text).writerow(header)
        _writer(text).writerows(rows)
        text.flush()
        text.detach()  # keeps the binary file open for its owner, which syncs and renames it


def _writer(file: Any) -> Any:
    return csv.writer(file, lineterminator="\n")  # floats are written by repr: every digit
