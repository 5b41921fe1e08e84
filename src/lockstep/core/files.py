"""Writes files so that they are there whole or not at all, also if the power fails."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
"""Flags by which a file is made, and none opened that is there."""


def write_synced(path: Path, content: bytes) -> None:
    """Writes a new file, which is on the disk on return; what had its name, a link too, is removed, not followed."""
    try:
        descriptor = os.open(path, NEW_FILE, 0o666)
    except FileExistsError:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, NEW_FILE, 0o666)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Makes what was written to a file, or renamed in a directory, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Writes a text file whole or not at all: beside its place, then renamed; an ``OSError`` names ``path``."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(temporary, text.encode())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_json(path: Path, value: Any) -> None:
    """Writes a value as JSON, whole or not at all, unless the file says it already; an ``OSError`` names ``path``."""
    text = _as_text(value)
    with contextlib.suppress(OSError, ValueError):
        if path.read_text() == text:
            return
    replace_text(path, text)


def try_json(path: Path, value: Any) -> None:
    """Writes what :func:`write_json` would beside its place, and removes it: an ``OSError`` where that can't be."""
    beside = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(beside, _as_text(value).encode())
    finally:
        beside.unlink(missing_ok=True)


def _as_text(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def new_directory(path: Path) -> Path:
    """Makes a directory that nobody has made, under this name or with the first number behind it that is free."""
    wanted, number = path, 1
    while True:
        try:
            wanted.mkdir()
            return wanted
        except FileExistsError:
            number += 1
            wanted = path.with_name(f"{path.name}-{number}")
