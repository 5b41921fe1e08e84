"""Writes, cuts and reads metrics as JSON lines: one object per iteration."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lockstep.core.errors import RunError
from lockstep.core.files import why_unwritten
from lockstep.core.process import say
from lockstep.runs.trackers.files import PlainRecord, open_to_append, read_through, replacing
from lockstep.runs.trackers.service import Tracker

LARGEST = 2**63 - 1


class JsonlTracker(Tracker):
    """Appends one JSON object per record as a line, which is in the file on return.

    Floats have every digit of a float64; ``None``, NaN and infinities are written as ``null``.
    """

    writes_files = True

    def __init__(self, path: Path) -> None:
        self._file = open_to_append(path)
        self._keys: tuple[str, ...] = ()
        self._line = "{}\n"  # a template with these keys for the values' texts

    def log(self, record: Mapping[str, Any]) -> None:
        """Appends ``record``, with its keys in their order."""
        self.log_all([record])

    def log_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Appends records, in order."""
        self._file.write("".join([self._line_of(PlainRecord.of(record)) for record in records]))
        self._file.flush()

    def _line_of(self, record: PlainRecord) -> str:
        keys = tuple(record)
        if keys != self._keys:
            members = [json.dumps(key).replace("%", "%%") + ": %s" for key in keys]
            self._keys, self._line = keys, "{" + ", ".join(members) + "}\n"
        return self._line % record.texts

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class RecordFile(JsonlTracker):
    """A file of a run beside its metrics, without whose rows the run doesn't go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path = path

    def log_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Appends records, in order; raises a ``RunError`` of one line if they can't be written."""
        try:
            super().log_all(records)
        except OSError as error:
            raise RunError(f"{self._path} can't be written: {why_unwritten(error)}") from error


def cut_jsonl(path: Path, last_iteration: int) -> set[int]:
    """Removes the lines of iterations after ``last_iteration`` and a torn last line, atomically.

    If ``last_iteration`` comes before the first broken line, everything from that line on is removed. An earlier line
    with zeros in it, as a power loss leaves them, is removed with a warning. A file that doesn't exist (or isn't a
    regular one, such as a pipe) is left alone.

    Returns:
        The iterations whose lines stay.

    Raises:
        ValueError: another line before the last is no metrics record; the message gives its number, and the file is
            unchanged.
    """
    stay: set[int] = set()
    if not path.is_file():
        return stay
    zeros: list[int] = []
    with path.open("rb") as lines, replacing(path) as kept:
        for iteration, line in _until(path, lines, last_iteration, zeros):
            kept.write(line)
            stay.add(iteration)
    _warn_of_zeros(path, zeros)
    return stay


def check_jsonl(path: Path, last_iteration: int) -> None:
    """Raises a ``ValueError`` if :func:`cut_jsonl` would."""
    if path.is_file():
        with path.open("rb") as lines:
            deque(_until(path, lines, last_iteration, []), maxlen=0)


def _until(path: Path, lines: Iterable[bytes], last_iteration: int, zeros: list[int]) -> Iterator[tuple[int, bytes]]:
    """Yields the iterations and lines that stay; appends to ``zeros`` the numbers of lines with zeros in them."""
    broken = reached = 0
    for number, line in enumerate(read_through(lines), start=1):
        if broken:
            raise ValueError(f"{path}: line {broken} is no metrics record; remove that line")
        iteration = _integer(line, "iteration")  # half an object is never valid JSON
        if iteration is not None:
            reached = max(reached, iteration)
            if iteration <= last_iteration:
                yield iteration, line.rstrip(b"\n") + b"\n"
        elif reached >= last_iteration > 0:
            return
        elif b"\0" in line:
            zeros.append(number)
        else:
            broken = number


def _warn_of_zeros(path: Path, lines: Sequence[int]) -> None:
    """Warns which lines of a file were removed because a power loss has left zeros in them."""
    if lines:
        shown = ", ".join(map(str, lines[:5])) + (f" and {len(lines) - 5} more" if len(lines) > 5 else "")
        word, were = ("line", "was") if len(lines) == 1 else ("lines", "were")
        say(f"lockstep: warning: {path}: {word} {shown} held zeros, as a power loss leaves them, and {were} removed")


def read_jsonl(path: Path, *integers: str) -> list[dict[str, Any]]:
    """Reads the records of a file, without a torn last line, which a killed or running writer leaves.

    Records with the same keys share the key strings, which would otherwise take most of a long run's memory.

    Args:
        path: the file.
        integers: keys that every record must have, with whole numbers.

    Raises:
        ValueError: another line is no such record; one line names it.
        OSError: it can't be read.
    """
    found: list[dict[str, Any]] = []
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    broken = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if broken:
                raise ValueError(f"{path}: line {broken} is no metrics record")
            record = _record(line)
            if record is not None and all(_is_whole(record.get(key)) for key in integers):
                keys = tuple(record)
                found.append(dict(zip(known.setdefault(keys, keys), record.values(), strict=True)))
            elif not line.endswith(b"\n"):  # torn, or still being written
                break
            else:
                broken = number
    return found


def _is_whole(value: Any) -> bool:
    """Tells whether a value is a whole number that fits into int64; JSON's may have any size."""
    return isinstance(value, int) and abs(value) <= LARGEST


def records_differ(path: Path, other: Path) -> bool:
    """Tells whether two files have whole but different records of the same iteration."""
    known = dict(records_in(other))
    return any(known.get(iteration, line) != line for iteration, line in records_in(path))


def records_in(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the iterations and lines of a file's whole records; none if there is no such file."""
    with path.open("rb") if path.is_file() else nullcontext([]) as lines:
        for line in read_through(lines):
            if (iteration := _integer(line, "iteration")) is not None:
                yield iteration, line.rstrip(b"\n")


def iterations_of(path: Path) -> set[int]:
    """Returns the iterations of a file's whole records."""
    with path.open("rb") if path.is_file() else nullcontext([]) as lines:
        return {number for line in read_through(lines) if (number := _integer(line, "iteration")) is not None}


def last_global_step_of(path: Path) -> int | None:
    """Returns ``global_step`` of the last whole record; None if there is none."""
    last = None
    with path.open("rb") if path.is_file() else nullcontext([]) as lines:
        for line in read_through(lines):
            step = _integer(line, "global_step")
            last = last if step is None else step
    return last


def _integer(line: bytes, key: str) -> int | None:
    record = _record(line)
    value = None if record is None else record.get(key)
    return value if isinstance(value, int) else None


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
