"""Writes metrics as TensorBoard event files, synchronously, and cuts them for real.

TensorBoard's own writers hand events to a background thread: what it hasn't written when a process is killed is lost,
and a thread is one more thing that a fork can hang on. Here an event is in the file when ``log`` returns.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.text.summary_v2 import text_pb

from lockstep.runs.trackers.files import PlainRecord, read_through, replacing
from lockstep.runs.trackers.service import Tracker

EVENT_FILES = "events.out.tfevents.*"
FLOAT32_LIMIT = 2.0**128 - 2.0**103
"""What is as large rounds to infinity."""


class TensorBoardTracker(Tracker):
    """Writes every metric whose name has a ``/`` as a scalar, at the record's ``global_step``.

    Each tracker starts an event file of its own after those already in ``directory``: TensorBoard reads them in the
    order of their names, and one that is running moves on to the new file.
    """

    writes_files = True

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        number = _next_number(directory)
        self._file = (directory / f"events.out.tfevents.{number:010d}.lockstep").open("xb")
        self._continues = number > 0
        self._scalars = Scalars(())
        self._write(_serialized(Event(file_version="brain.Event:2")))

    def log(self, record: Mapping[str, Any]) -> None:
        """Write the record's scalars; a value that is missing, not finite or no number is left out."""
        self.log_all([record])

    def log_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the scalars of records, in order; see :meth:`log`."""
        self._write(*[event for record in records for event in self._events(record)])

    def _events(self, record: Mapping[str, Any]) -> Iterator[bytes]:
        step = int(record["global_step"])
        if self._continues:
            # A TensorBoard that was open all along drops what it had read of the steps that were cut.
            yield _serialized(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
            self._continues = False
        scalars = {tag: x for tag, x in PlainRecord.of(record).items() if "/" in tag and isinstance(x, (int, float))}
        tags = tuple(scalars)
        if tags != self._scalars.tags:
            self._scalars = Scalars(tags)
        yield _serialized(Event(step=step)) + self._scalars.with_values(scalars.values())

    def text(self, tag: str, text: str) -> None:
        """Write markdown (the run's config, say) for the text tab, at step 0: once, when the run is new."""
        self._write(_serialized(Event(summary=Summary.FromString(text_pb(tag, text).SerializeToString()))))

    def close(self) -> None:
        """Close the event file."""
        self._file.close()

    def _write(self, *events: bytes) -> None:
        self._file.write(b"".join(map(framed, events)))
        self._file.flush()


class Scalars:
    """The summary of an event with a scalar of each tag, as bytes in which only the values change.

    To fill in a message and to serialise it takes most of a record's time.
    """

    def __init__(self, tags: Sequence[str]) -> None:
        self.tags = tuple(tags)
        each = [Summary(value=[Summary.Value(tag=tag, simple_value=0.0)]).SerializeToString() for tag in tags]
        whole = Summary(value=[Summary.Value(tag=tag, simple_value=0.0) for tag in tags])
        fields = Event(summary=whole).SerializeToString()
        self._head = fields[: len(fields) - sum(map(len, each))]
        self._layout = struct.Struct("<" + "".join(f"{len(one) - 4}sf" for one in each))  # a value is its last field
        self._cells: list[Any] = [part for one in each for part in (one[:-4], 0.0)]

    def with_values(self, values: Iterable[float]) -> bytes:
        """The summary, serialised, as the last fields of an event; a value beyond float32 is infinite."""
        self._cells[1::2] = values
        try:
            return self._head + self._layout.pack(*self._cells)
        except (OverflowError, struct.error):  # of a float, of an int
            self._cells[1::2] = map(_float32, self._cells[1::2])
            return self._head + self._layout.pack(*self._cells)


def _float32(value: float) -> float:
    """The value, or infinity where it is too large for float32."""
    if abs(value) < FLOAT32_LIMIT:
        return value
    return math.inf if value > 0 else -math.inf


def _serialized(event: Event) -> bytes:
    event.wall_time = time.time()  # the format wants the time of day; nothing of ours reads it
    return event.SerializeToString()


def framed(data: bytes) -> bytes:
    """A record as event files hold it: its length, and itself, each followed by a checksum.

    TensorBoard's own writer computes CRC-32C in Python, which takes most of a record's time.
    """
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and offset as TFRecord files want it."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _next_number(directory: Path) -> int:
    """One more than the highest number of an event file; others' writers put the time in seconds there."""
    numbers = [path.name.split(".")[3] for path in directory.glob(EVENT_FILES)]
    return max((int(number) + 1 for number in numbers if number.isdecimal()), default=0)


def cut_tensorboard(directory: Path, last_global_step: int) -> None:
    """Remove every event after ``last_global_step``, and torn ends, from the event files in ``directory``.

    Each file is rewritten atomically with the events that stay, byte for byte. TensorBoard's own remedy, a marker
    that has the reader drop later steps, leaves them in the file for every other reader.
    """
    for path in sorted(directory.glob(EVENT_FILES)):
        with replacing(path) as file:
            for record in read_through(_records(path)):
                if Event.FromString(record).step <= last_global_step:
                    file.write(framed(record))


def _records(path: Path) -> Iterator[bytes]:
    """The whole records of one event file, up to its end or the first one that is torn; see :func:`framed`.

    TensorBoard's own reader computes checksums in Python as well, which takes most of resuming a long run.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        while len(length := file.read(8)) == 8 and file.read(4) == _checksum(length):
            (count,) = struct.unpack("<Q", length)
            if count > size:
                return
            data = file.read(count)
            if file.read(4) != _checksum(data):
                return
            yield data
