"""Converts settings given in Python to values that a config file can hold."""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
from collections import UserString
from collections.abc import Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any

from lockstep.config.files import MOST_LEVELS, TOO_DEEP
from lockstep.config.keys import FREE
from lockstep.config.words import advice

SCHEDULED = "ppo.learning_rate"
TEXTS = (str, bytes, bytearray, memoryview, UserString)
"""Sequences that are no lists."""
SECTION_LEVELS = 5


def plain_containers(value: Any, path: str = "") -> Any:
    """Replaces mappings of any kind by dicts, and sequences other than text by lists, at all levels.

    Args:
        value: nested settings, or one of them; anything else is returned as it is.
        path: dotted name of ``value``, for errors.

    Raises:
        ValueError: a mapping or a sequence can't be read, or is nested too deeply or within itself; one line.
    """
    if not isinstance(value, Mapping | Sequence) or isinstance(value, TEXTS):
        return value
    if path.count(".") > MOST_LEVELS + SECTION_LEVELS:
        first = ".".join(path.split(".")[:2])
        raise ValueError(f"{first if first in FREE else first.partition('.')[0]}: {TOO_DEEP}")
    try:
        inside = list(value.items() if isinstance(value, Mapping) else value)
    except Exception as error:  # its own: a value that is missing, an interpolation without an end
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(
            f"{path or 'config'}: {type(value).__name__} can't be read: {type(error).__name__}: {reason}"
        ) from error
    if isinstance(value, Mapping):
        return {key: plain_containers(inner, f"{path}.{key}" if path else str(key)) for key, inner in inside}
    return [plain_containers(inner, f"{path}.{place}") for place, inner in enumerate(inside)]


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


def other_form(value: Any) -> str:
    """Returns how to give nested settings that are no mapping, to be put after an error; empty for anything else."""
    kind = type(value).__name__
    if callable(getattr(value, "to_dict", None)) and not isinstance(value, type):
        return f"; {kind} is no mapping, give its to_dict()"
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return f"; {kind} is no mapping, give vars() of it"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"; {kind} is no mapping, give dataclasses.asdict() of it"
    return ""


def _refusal(path: str, value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    shown = name if callable(value) and name else type(value).__name__
    if isinstance(value, Number) and not isinstance(value, complex):
        return f"{path}: {value!r} is of a kind that a config can't hold; give float() of it, or int()"
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
    if inside == "env.kwargs":
        instead = "; env may be a function or a lambda that makes the environment with it"
    else:
        instead = other_form(value)
    return f"{path}: {shown} can't be written into a config; numbers, text, lists and dicts can{instead}"
