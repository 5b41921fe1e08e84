"""Switches of other libraries, on or off, each with the setting that it stands for."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.keys import LEAVES
from lockstep.config.words import ALREADY, SWITCHES, plain


@dataclass(frozen=True)
class Switch:
    """A switch as it was given: its words, the path of its setting, and the value in words of the command line.

    The path is empty where it says what is so anyway.
    """

    words: str
    path: str = ""
    value: str = ""


def switch_named(key: str) -> str | None:
    """Finds the switch that a key names, at the top or in its setting's section; None where it names a setting."""
    section, _, last = key.rpartition(".")
    word = plain(last)
    if key in LEAVES or (word not in SWITCHES and word not in ALREADY):
        return None
    inside = SWITCHES[word].path.rpartition(".")[0] if word in SWITCHES else ""
    return word if section in ("", inside) else None


def read_switch(word: str, on: bool, words: str) -> Switch | None:
    """Reads what a switch says; None where nothing here does that, and the advice on the word says what to write."""
    if word in ALREADY:
        return Switch(words) if ALREADY[word] is on else None
    stands_for = SWITCHES[word]
    value = stands_for.on if on else stands_for.off
    return None if value is None else Switch(words, stands_for.path, value)
