"""Stores what the doctor compares in files, one directory per rank; no rank ever waits for another here.

A rank's ``events.jsonl`` holds events, ``values.bin`` the numbers that they point to, and ``state.json`` its current
state. What a rank has written stays readable if it dies.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

EVENTS = "events.jsonl"
VALUES = "values.bin"
STATE = "state.json"
ENDED = "ended.json"
LEFT = "left"
VERDICT = "verdict.json"
BROKEN = "broken"
"""The kind given to an event of which only a part was written."""
OPTIMIZED = frozenset({"parameters", "gradients", "moments"})
"""Kinds of tensors that are identified by their places in the optimiser."""

BETWEEN_WORDS = ","
"""Separates the words that stand for the data of forward passes."""


def rank_directory(directory: Path, rank: int) -> Path:
    """Returns the directory that a rank writes to."""
    return directory / f"rank_{rank}"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces a small file atomically: a reader sees the old content or the new."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(json.dumps(content))
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads what :func:`write_json` wrote; None if there is no readable file."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None


class SideWriter:
    """Writes one rank's part of the store: :meth:`add` only queues, :meth:`flush` writes, called by another thread."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.path = rank_directory(directory, rank)
        self.path.mkdir(parents=True, exist_ok=True)
        self._pending: deque[tuple[dict[str, Any], list[tuple[dict[str, Any], np.ndarray]]]] = deque()
        self._lock = threading.Lock()
        self._offset = 0
        self._lost = False

    def add(self, event: dict[str, Any], arrays: list[tuple[dict[str, Any], np.ndarray]] | None = None) -> None:
        """Queues an event and float32 or float64 vectors, each with the part of the event that will point to it."""
        if not self._lost:
            self._pending.append((event, arrays or []))

    def flush(self) -> None:
        """Writes what is queued; after a first failure nothing more is written."""
        if not self._lost:
            try:
                self._flush()
            except OSError:  # the disk is full or the store is gone; the script must not fail for it
                self._lost = True
                self._pending.clear()

    def _flush(self) -> None:
        with self._lock, (self.path / VALUES).open("ab") as values, (self.path / EVENTS).open("a") as events:
            while self._pending:
                event, arrays = self._pending.popleft()
                for part, array in arrays:
                    part |= {"offset": self._offset, "size": array.size, "dtype": array.dtype.str}
                    values.write(array.tobytes())
                    self._offset += array.nbytes
                values.flush()  # before the event that points there
                events.write(json.dumps(event) + "\n")

    def state(self, content: dict[str, Any]) -> None:
        """Replaces this rank's state, marked ``lost`` if events could not be written; ignores a failure to write it."""
        with self._lock, suppress(OSError):
            write_json(self.path / STATE, content | ({"lost": True} if self._lost else {}))


@dataclass
class SideReader:
    """Reads what a rank wrote to its directory."""

    path: Path

    def events(self) -> list[dict[str, Any]]:
        """Returns all complete lines in order as events; a damaged one has the kind :data:`BROKEN`."""
        with suppress(OSError):
            lines = (self.path / EVENTS).read_text(errors="replace").split("\n")
            return [_event(line) for line in lines[:-1]]
        return []

    def values(self) -> np.ndarray:
        """Returns the bytes that events point to, uint8 ``[bytes]``."""
        file = self.path / VALUES
        return np.memmap(file, np.uint8, "r") if file.is_file() and file.stat().st_size else np.empty(0, np.uint8)

    def state(self) -> dict[str, Any]:
        """Returns the rank's last state; empty if it wrote none."""
        return read_json(self.path / STATE) or {}

    def ended(self) -> dict[str, Any] | None:
        """Returns how the rank's process ended, as its supervisor wrote it; None while it runs."""
        return read_json(self.path / ENDED)


def _event(line: str) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError:
        return {"kind": BROKEN}


def array_at(part: dict[str, Any], values: np.ndarray) -> np.ndarray:
    """Returns the vector that an event's part points to."""
    dtype = np.dtype(part["dtype"])
    start = part["offset"]
    return np.frombuffer(values[start : start + part["size"] * dtype.itemsize].tobytes(), dtype)
