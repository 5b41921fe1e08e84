"""Declares what an examination of an environment says of it, line by line."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    """Says one thing of an environment: that it is well, worth knowing, or a problem for a run."""

    level: Level
    text: str
