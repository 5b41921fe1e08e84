"""Defines a finding: one line of what an examination reports about an environment."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    """One statement about an environment: something is fine, worth knowing, or a problem for a run."""

    level: Level
    text: str
