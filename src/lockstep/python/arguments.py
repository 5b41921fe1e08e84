"""Converts settings given in Python to values that a config file can hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.keys import FREE
from lockstep.config.words import advice

SCHEDULED = "ppo.learning_rate"


def in_plain_words(value: Any, path: str = "") -> Any:
    """Converts nested settings to JSON values: NumPy numbers and arrays, paths, tuples and ranges are replaced.

    Args:
        value: the settings, or one of them.
        path: dotted name of ``value``, for errors.

    Raises:
        ValueError: a setting can't be converted; one line that names it and says what to give.
    """
    if isinstance(value, Mapping):
        return {key: in_plain_words(inner, f"{path}.{key}" if path else str(key)) for key, inner in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, set | frozenset):  # each process hashes text, and so orders it, differently
        raise ValueError(f"{path}: a set has no order; give a list")
    if isinstance(value, list | tuple | range):
        return [in_plain_words(inner, path) for inner in value]
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return in_plain_words(value.tolist(), path)
    raise ValueError(_refusal(path, value))


def file_given(place: Any, argument: str) -> Path:
    """Returns the file that an argument names, with ``~`` expanded; a one-line ``ValueError`` if it names none."""
    if isinstance(place, str | os.PathLike):
        path = Path(os.path.expanduser(os.fspath(place)))
        if path.name:
            return path
    raise ValueError(f"{argument}: {place!r} names no file; give text or a path, e.g. 'report.html'")


def _refusal(path: str, value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    shown = name if callable(value) and name else type(value).__name__
    if path == SCHEDULED:
        return f"{path}: {shown}: a number is wanted; ppo.schedule is linear, constant or adaptive, and no function"
    if path == "network.activation":
        return f"{path}: {shown}: its name is wanted, {shown.lower()!r}"
    if path == "loss":
        return f"{path}: {shown}: a loss of your own is a setting of the section ppo, ppo=dict(loss={shown})"
    said = advice(path.rpartition(".")[2], "")
    if said is not None:
        return said
    inside = next((free for free in FREE if path.startswith(f"{free}.")), None)
    instead = ""
    if inside == "env.kwargs":
        instead = "; env may be a function or a lambda that makes the environment with it"
    return f"{path}: {shown} can't be written into a config; numbers, text, lists and dicts can{instead}"
