"""Reads on/off options of other libraries as the settings that they stand for."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.keys import LEAVES
from lockstep.config.words import ALREADY, SWITCHES, plain


@dataclass(frozen=True)
class Switch:
    """A switch that was given: its words, the path of its setting, and the value as the command line would give it.

    The path is empty if the switch asks for what every run does anyway.
    """

    words: str
    path: str = ""
    value: str = ""


def switch_named(key: str) -> str | None:
    """Returns the switch that a key names, at the top or in its setting's section; None for any other key."""
    section, _, last = key.rpartition(".")
    word = plain(last)
    if key in LEAVES or (word not in SWITCHES and word not in ALREADY):
        return None
    inside = SWITCHES[word].path.rpartition(".")[0] if word in SWITCHES else ""
    return word if section in ("", inside) else None


def read_switch(word: str, on: bool, words: str) -> Switch | None:
    """Returns what a switch asks for; None if no setting does that, for which ``ADVICE`` has an answer."""
    if word in ALREADY:
        return Switch(words) if ALREADY[word] is on else None
    stands_for = SWITCHES[word]
    value = stands_for.on if on else stands_for.off
    return None if value is None else Switch(words, stands_for.path, value)
