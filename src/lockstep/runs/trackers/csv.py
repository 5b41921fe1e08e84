"""Writes metrics as a CSV table: one row an iteration, one column a metric."""

from __future__ import annotations

import csv
import io
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.runs.trackers.files import PlainRecord, open_to_append, read_through, replacing
from lockstep.runs.trackers.service import Tracker


class CsvTracker(Tracker):
    """Appends one row a record, which is in the file on return.

    The header is the first record's keys. A record with new keys (the first evaluation, say) has the file rewritten
    with further columns at the right. What a record lacks, and ``None``, NaN and infinities, are empty cells.
    An existing file is continued with its header.
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
        """Append ``record`` as a row."""
        self.log_all([record])

    def log_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append records as rows, in order."""
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
        """Close the file."""
        self._file.close()

    def _extend(self, columns: Sequence[str]) -> None:
        """Rewrite the file with ``columns`` added at the right of the header."""
        self._file.close()
        header = [*self._header, *columns]
        with self._path.open(encoding="utf-8", newline="") as old:
            rows = csv.reader(read_through(old))
            next(rows, None)
            _rewrite(self._path, header, (row + [""] * (len(header) - len(row)) for row in rows))
        self._header = header
        self._open()


def cut_csv(path: Path, last_iteration: int) -> set[int]:
    """Remove the rows of iterations after ``last_iteration`` and a torn last row, atomically; the header stays.

    Of broken rows as :func:`~lockstep.runs.trackers.jsonl.cut_jsonl`, but without a warning: see :func:`mend_csv`. A
    header with zeros in it goes with all rows. A file that doesn't exist is left alone.

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
    """Raises a ``ValueError`` where :func:`cut_csv` would."""
    if path.is_file():
        with path.open("rb") as file:
            deque(_rows_until(path, *_whole_rows(path, file), last_iteration, set()), maxlen=0)


def mend_csv(path: Path, records: Path, there: set[int], wanted: set[int]) -> str | None:
    """Write the table anew from the JSON lines ``records`` where it lacks a row that they have: the very same bytes.

    Args:
        path: the table; made, where it is missing.
        records: the file of JSON lines, without a broken one.
        there: iterations that the table has.
        wanted: iterations that the records have.

    Returns:
        What to say of it, in one line; None: nothing is missing. A table that has other rows as well is left as it is.
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


def _cells(header: Sequence[str], record: PlainRecord) -> list[Any]:
    cells = dict(zip(record, record.cells, strict=True))
    return [cells.get(key) for key in header]


def _whole_rows(path: Path, file: Iterable[bytes]) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """The header, and each row that has no zeros in it with the number of its line."""
    at = 0

    def lines() -> Iterator[str]:
        nonlocal at
        for at, line in enumerate(read_through(file), start=1):
            if b"\0" not in line and line.endswith(b"\n"):  # only the last can lack its end
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
    """Yields the rows that stay, whose iterations ``stay`` takes."""
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
        text.detach()  # the binary file stays open: it is synchronised and renamed by its owner


def _writer(file: Any) -> Any:
    return csv.writer(file, lineterminator="\n")  # floats are written by repr: every digit
