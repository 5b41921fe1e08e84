"""Reads on/off options of other libraries as the settings that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.config.keys import LEAVES
from lockstep.config.words import ALREADY, SWITCHES, advice, plain


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


def switch_in(flag: str, inline: str | None, truth: Callable[[], str]) -> Switch | None:
    """Reads a switch of another library, which stands for a value of a setting; returns None for any other option.

    ``inline`` is the value in the option's own word, and ``truth`` takes the next word if it is ``true`` or ``false``.

    Raises:
        ValueError: its value is neither true nor false, or Lockstep has no setting for it; one line.
    """
    key = flag.lstrip("-").replace("-", "_")
    section, dot, last = key.rpartition(".")
    word, negated = switch_named(key), False
    if word is None and plain(last).startswith("no_"):
        word, negated = switch_named(f"{section}{dot}{last[3:]}"), True
    if word is None:
        return None
    if negated and inline is not None:
        raise ValueError(f"{flag}: takes no value; {flag} alone says it")
    spoken = "" if negated else inline or truth()
    said = "false" if negated else spoken.lower() or "true"
    shown = f"{flag} {spoken}".strip()
    found = read_switch(word, said == "true", shown) if said in ("true", "false") else None
    if found is None:
        instead = advice(f"--{word.replace('_', '-')}" if negated or section else flag, spoken)
        raise ValueError(instead or f"{flag}: {spoken!r} is neither true nor false")
    return found
