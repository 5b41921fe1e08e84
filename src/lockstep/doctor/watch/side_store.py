"""Keeps what the doctor compares: files, one directory per rank. No rank ever waits for another here.

A rank's ``events.jsonl`` holds objects, its ``values.bin`` the numbers that they point to; ``state.json`` says how it
fares now. Whatever a rank wrote stays readable when it dies.
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
"""Kind of an event of which only a part was written."""
OPTIMIZED = frozenset({"parameters", "gradients", "moments"})
"""Kinds of tensors that are known by their places in the optimiser."""

BETWEEN_WORDS = ","
"""Stands between words of data."""


def rank_directory(directory: Path, rank: int) -> Path:
    """Names the directory in which a rank writes."""
    return directory / f"rank_{rank}"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a small file at once: a reader sees the old one or the new one."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(json.dumps(content))
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads what :func:`write_json` wrote, or None if there is nothing."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None


class SideWriter:
    """One rank's part of the store. ``add`` only remembers; :meth:`flush`, called by another thread, writes."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.path = rank_directory(directory, rank)
        self.path.mkdir(parents=True, exist_ok=True)
        self._pending: deque[tuple[dict[str, Any], list[tuple[dict[str, Any], np.ndarray]]]] = deque()
        self._lock = threading.Lock()
        self._offset = 0
        self._lost = False

    def add(self, event: dict[str, Any], arrays: list[tuple[dict[str, Any], np.ndarray]] | None = None) -> None:
        """Remember an event, and float32 or float64 vectors, each with the part of the event that is to point to it."""
        if not self._lost:
            self._pending.append((event, arrays or []))

    def flush(self) -> None:
        """Write what was remembered; from the first time on that it can't be, nothing more is."""
        if not self._lost:
            try:
                self._flush()
            except OSError:  # no room any more, or the store is gone: the script is not to notice
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
        """Say how this rank fares, and whether what it saw could be written, if that can be written."""
        with self._lock, suppress(OSError):
            write_json(self.path / STATE, content | ({"lost": True} if self._lost else {}))


@dataclass
class SideReader:
    """Reads what a rank left in its directory."""

    path: Path

    def events(self) -> list[dict[str, Any]]:
        """All events in order, but for the last if it is being written; for one that is broken that it is."""
        with suppress(OSError):
            lines = (self.path / EVENTS).read_text(errors="replace").split("\n")
            return [_event(line) for line in lines[:-1]]
        return []

    def values(self) -> np.ndarray:
        """The bytes that events point to, uint8."""
        file = self.path / VALUES
        return np.memmap(file, np.uint8, "r") if file.is_file() and file.stat().st_size else np.empty(0, np.uint8)

    def state(self) -> dict[str, Any]:
        """Reads how the rank fared when it last said so."""
        return read_json(self.path / STATE) or {}

    def ended(self) -> dict[str, Any] | None:
        """Reads how its process ended, None while it runs: written by who watches over it."""
        return read_json(self.path / ENDED)


def _event(line: str) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError:
        return {"kind": BROKEN}


def array_at(part: dict[str, Any], values: np.ndarray) -> np.ndarray:
    """The vector that an event's part points to."""
    dtype = np.dtype(part["dtype"])
    start = part["offset"]
    return np.frombuffer(values[start : start + part["size"] * dtype.itemsize].tobytes(), dtype)
