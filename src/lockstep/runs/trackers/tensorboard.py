"""Writes metrics as TensorBoard event files, synchronously, and removes events when a run is cut.

TensorBoard's own writers hand events to a background thread. What that hasn't written is lost when the process is
killed, and a fork can hang on a thread's locks. Here an event is in the file when ``log`` returns.
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
COUNTERS = frozenset({"iteration", "global_step"})
"""Entries of a record that are no metrics, but say where it stands."""
FLOAT32_LIMIT = 2.0**128 - 2.0**103
"""Values from here on round to infinity in float32."""


class TensorBoardTracker(Tracker):
    """Writes every metric as a scalar, at the record's ``global_step``.

    Each tracker starts a new event file after those already in ``directory``: TensorBoard reads them in the order of
    their names, and moves on to the new file if it is running.
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
        """Writes the record's scalars; leaves out values that are missing, not finite or no numbers."""
        self.log_all([record])

    def log_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Writes the scalars of records, in order; see :meth:`log`."""
        self._write(*[event for record in records for event in self._events(record)])

    def _events(self, record: Mapping[str, Any]) -> Iterator[bytes]:
        step = int(record["global_step"])
        if self._continues:
            # Makes a TensorBoard that is still open drop what it has read of the steps that were cut.
            yield _serialized(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
            self._continues = False
        scalars = {
            tag: x for tag, x in PlainRecord.of(record).items() if tag not in COUNTERS and isinstance(x, (int, float))
        }
        tags = tuple(scalars)
        if tags != self._scalars.tags:
            self._scalars = Scalars(tags)
        yield _serialized(Event(step=step)) + self._scalars.with_values(scalars.values())

    def text(self, tag: str, text: str) -> None:
        """Writes markdown, such as the run's config, for the text tab, at step 0; only for a new run."""
        self._write(_serialized(Event(summary=Summary.FromString(text_pb(tag, text).SerializeToString()))))

    def close(self) -> None:
        """Closes the event file."""
        self._file.close()

    def _write(self, *events: bytes) -> None:
        self._file.write(b"".join(map(framed, events)))
        self._file.flush()


class Scalars:
    """Serialises a summary of one scalar per tag, as bytes in which only the values change.

    Building and serialising a message for each record would take most of a record's time.
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
        """Returns the serialised summary as the last fields of an event; values beyond float32 become infinite."""
        self._cells[1::2] = values
        try:
            return self._head + self._layout.pack(*self._cells)
        except (OverflowError, struct.error):  # by a float, by an int
            self._cells[1::2] = map(_float32, self._cells[1::2])
            return self._head + self._layout.pack(*self._cells)


def _float32(value: float) -> float:
    """Returns the value, or infinity of its sign if it is too large for float32."""
    if abs(value) < FLOAT32_LIMIT:
        return value
    return math.inf if value > 0 else -math.inf


def _serialized(event: Event) -> bytes:
    event.wall_time = time.time()  # the format wants the time of day; nothing of ours reads it
    return event.SerializeToString()


def framed(data: bytes) -> bytes:
    """Frames a record for an event file: its length and its data, each followed by a checksum.

    TensorBoard's own writer computes CRC-32C in Python, which is slow.
    """
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    """Returns the CRC-32C, rotated and offset as TFRecord files want it."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _next_number(directory: Path) -> int:
    """Returns one more than the highest number of an event file; other writers put the time in seconds there."""
    numbers = [path.name.split(".")[3] for path in directory.glob(EVENT_FILES)]
    return max((int(number) + 1 for number in numbers if number.isdecimal()), default=0)


def cut_tensorboard(directory: Path, last_global_step: int) -> None:
    """Removes every event after ``last_global_step``, and torn ends, from the event files in ``directory``.

    If that is 0, the run begins again and writes its texts anew, so that only each file's version stays.

    Each file is rewritten atomically; the events that stay keep their bytes. TensorBoard's own way, a marker that tells
    its reader to drop later steps, would leave them in the file for all other readers.
    """
    for path in sorted(directory.glob(EVENT_FILES)):
        with replacing(path) as file:
            for record in read_through(_records(path)):
                event = Event.FromString(record)
                if event.step <= last_global_step and (last_global_step or event.HasField("file_version")):
                    file.write(framed(record))


def _records(path: Path) -> Iterator[bytes]:
    """Yields the records of one event file, up to its end or the first torn one; see :func:`framed`.

    TensorBoard's own reader computes checksums in Python as well, which is slow for a long run.
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
