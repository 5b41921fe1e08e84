"""Embeds a run's newest video in the page, if there is room."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from lockstep.report.reading import unreadable
from lockstep.runs.directory import VIDEOS

ROOM = 8 * 2**20
"""The most bytes of videos on one page."""
MP4 = b"ftyp"
"""Bytes 4 to 7 of an mp4 file."""


@dataclass(frozen=True)
class Video:
    """A run's newest video.

    Attributes:
        step: global step of the policy that plays.
        source: the file as a ``data:`` URL; None if it is larger than the page has room for.
        size: bytes of the file.
        others: number of older videos.
    """

    path: str
    step: int
    source: Markup | None
    size: int
    others: int


def video_of(run: Path, room: int, problems: list[str]) -> Video | None:
    """Finds the newest video of a run, or None; reads its content only if it has at most ``room`` bytes.

    ``problems`` gets a line for each video that can't be read.
    """
    if (run / VIDEOS).is_symlink():
        return None
    found = {}
    for path in sorted((run / VIDEOS).glob("step_*.mp4")):
        step = path.stem.removeprefix("step_")
        if step.isdecimal() and _is_mp4(path, problems):
            found[int(step)] = path
    if not found:
        return None
    step = max(found)
    try:
        path, size = found[step], found[step].stat().st_size
        source = None
        if size <= room:
            source = Markup("data:video/mp4;base64,") + base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        problems.append(unreadable(found[step], error))
        return None
    return Video(str(path), step, source, size, len(found) - 1)


def _is_mp4(path: Path, problems: list[str]) -> bool:
    try:
        if path.is_symlink() or not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(8)[4:] == MP4
    except OSError as error:
        problems.append(unreadable(path, error))
        return False
