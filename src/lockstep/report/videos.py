"""Takes a run's newest video into the page, as far as there is room."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from lockstep.runs.directory import VIDEOS

ROOM = 8 * 2**20
"""Bytes of videos on one page."""
MP4 = b"ftyp"
"""The bytes 4 to 7 of such a file."""


@dataclass(frozen=True)
class Video:
    """A run's newest video.

    Attributes:
        step: of the policy that plays.
        source: the file as a ``data:`` address; None: it is larger than the page has room for.
        size: in bytes.
        others: how many older ones there are.
    """

    path: str
    step: int
    source: Markup | None
    size: int
    others: int


def video_of(run: Path, room: int) -> Video | None:
    """Reads the newest video of a run, if it has at most ``room`` bytes; None without any."""
    found = {}
    for path in (run / VIDEOS).glob("step_*.mp4"):
        step = path.stem.removeprefix("step_")
        if step.isdecimal() and not path.is_symlink() and path.is_file() and _is_mp4(path):
            found[int(step)] = path
    if not found or (run / VIDEOS).is_symlink():
        return None
    step = max(found)
    path, size = found[step], found[step].stat().st_size
    source = None
    if size <= room:
        source = Markup("data:video/mp4;base64,") + base64.b64encode(path.read_bytes()).decode()
    return Video(str(path), step, source, size, len(found) - 1)


def _is_mp4(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(8)[4:] == MP4
