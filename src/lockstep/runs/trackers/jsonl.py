"""Writes metrics as JSON lines: one object an iteration."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lockstep.runs.trackers.files import PlainRecord, open_to_append, replacing
from lockstep.runs.trackers.service import Tracker


class JsonlTracker(Tracker):
    """Appends one JSON object a line, which is in the file on return, with every digit of a float64.

    A value that is ``None``, NaN or infinite is written as ``null``.
    """

    writes_files = True

    def __init__(self, path: Path) -> None:
        self._file = open_to_append(path)
        self._keys: tuple[str, ...] = ()
        self._line = "{}\n"  # of these keys, to be filled in with the values' texts

    def log(self, record: Mapping[str, Any]) -> None:
        """Append ``record``, keys in its own order."""
        self.log_all([record])

    def log_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append records, in order."""
        self._file.write("".join([self._line_of(PlainRecord.of(record)) for record in records]))
        self._file.flush()

    def _line_of(self, record: PlainRecord) -> str:
        keys = tuple(record)
        if keys != self._keys:
            members = [json.dumps(key).replace("%", "%%") + ": %s" for key in keys]
            self._keys, self._line = keys, "{" + ", ".join(members) + "}\n"
        return self._line % record.texts

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def cut_jsonl(path: Path, last_iteration: int) -> None:
    """Remove the lines of iterations after ``last_iteration`` and a torn last line, atomically.

    A file that doesn't exist (or isn't a regular one, such as a pipe) is left alone. A ``ValueError`` names a line
    before the last that is no metrics record.
    """
    if not path.is_file():
        return
    with path.open("rb") as lines, replacing(path) as kept:
        kept.writelines(_until(path, lines, last_iteration))


def check_jsonl(path: Path) -> None:
    """Raises a ``ValueError`` where :func:`cut_jsonl` would."""
    if path.is_file():
        with path.open("rb") as lines:
            deque(_until(path, lines, 0), maxlen=0)


def _until(path: Path, lines: Iterable[bytes], last_iteration: int) -> Iterator[bytes]:
    broken = 0
    for number, line in enumerate(lines, start=1):
        if broken:
            raise ValueError(f"{path}: line {broken} is no metrics record; remove that line")
        iteration = _integer(line, "iteration")  # half an object is never valid JSON
        if iteration is None:
            broken = number
        elif iteration <= last_iteration:
            yield line.rstrip(b"\n") + b"\n"


def records_differ(path: Path, other: Path) -> bool:
    """Whether two files have a whole record of the same iteration that isn't the same."""
    known = dict(_records(other))
    return any(known.get(iteration, line) != line for iteration, line in _records(path))


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") if path.is_file() else nullcontext([]) as lines:
        for line in lines:
            if (iteration := _integer(line, "iteration")) is not None:
                yield iteration, line.rstrip(b"\n")


def iterations_of(path: Path) -> set[int]:
    """The iterations that have a whole record."""
    with path.open("rb") if path.is_file() else nullcontext([]) as lines:
        return {number for line in lines if (number := _integer(line, "iteration")) is not None}


def last_global_step_of(path: Path) -> int | None:
    """``global_step`` of the last whole record, ``None`` when there is none."""
    last = None
    with path.open("rb") if path.is_file() else nullcontext([]) as lines:
        for line in lines:
            step = _integer(line, "global_step")
            last = last if step is None else step
    return last


def _integer(line: bytes, key: str) -> int | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    value = record.get(key) if isinstance(record, dict) else None
    return value if isinstance(value, int) else None
