"""Writes metrics as a CSV table: one row an iteration, one column a metric."""

from __future__ import annotations

import csv
import io
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.runs.trackers.files import PlainRecord, open_to_append, replacing
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
            rows = csv.reader(old)
            next(rows, None)
            _rewrite(self._path, header, (row + [""] * (len(header) - len(row)) for row in rows))
        self._header = header
        self._open()


def cut_csv(path: Path, last_iteration: int) -> None:
    """Remove the rows of iterations after ``last_iteration`` and a torn last row, atomically; the header stays.

    A file that doesn't exist is left alone. A ``ValueError`` says where it is no table of metrics.
    """
    if path.is_file():
        with path.open("rb") as file:
            header, rows = _whole_rows(path, file)
            _rewrite(path, header, _rows_until(path, header, rows, last_iteration))


def check_csv(path: Path) -> None:
    """Raises a ``ValueError`` where :func:`cut_csv` would."""
    if path.is_file():
        with path.open("rb") as file:
            deque(_rows_until(path, *_whole_rows(path, file), 0), maxlen=0)


def _whole_rows(path: Path, file: Iterable[bytes]) -> tuple[list[str], Iterator[list[str]]]:
    rows = csv.reader(line.decode() for line in file if line.endswith(b"\n"))  # only the last can lack its end
    header = next(rows, [])
    if header and "iteration" not in header:
        raise ValueError(f"{path} has no column named iteration: it is not a table of metrics")
    return header, rows


def _read_header(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file), [])


def _rows_until(path: Path, header: list[str], rows: Iterable[list[str]], last_iteration: int) -> Iterator[list[str]]:
    for number, row in enumerate(rows, start=2):
        cell = row[header.index("iteration")] if len(row) == len(header) else ""
        if not cell.isdecimal():
            raise ValueError(f"{path}: line {number} does not fit the header; remove that line")
        if int(cell) <= last_iteration:
            yield row


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
