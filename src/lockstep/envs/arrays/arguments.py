"""Checks arguments of array environments, because a config passes ``env.kwargs`` on as a user wrote them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def whole_number(name: str, value: Any, least: int, greatest: int | None = None) -> int:
    """Returns an argument as an ``int``; a float without a fraction is one, as for a config's own options.

    Raises:
        ValueError: it is no whole number, or not within ``least`` to ``greatest`` (None: no limit); one line.
    """
    offered = f"use {least} or more" if greatest is None else f"use {least} to {greatest}"
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(whole, bool) or not isinstance(whole, int | np.integer):
        raise ValueError(f"{name}: {value!r} is no whole number; {offered}")
    whole = int(whole)
    if whole < least or (greatest is not None and whole > greatest):
        raise ValueError(f"{name}: {value!r} isn't offered; {offered}")
    return whole


def finite_number(name: str, value: Any) -> float:
    """Returns an argument as a ``float``.

    Raises:
        ValueError: it is no number, or none that is finite; one line.
    """
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not (is_number and abs(value) <= sys.float_info.max):  # false for NaN too
        raise ValueError(f"{name}: {value!r} is no finite number; use one, such as 1.5")
    return float(value)


def switch(name: str, value: Any) -> bool:
    """Returns an argument that is a bool.

    Raises:
        ValueError: it is none, as the text "false", which would count as true; one line.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}: {value!r} is neither true nor false; use one of them, without quotes")
    return value
