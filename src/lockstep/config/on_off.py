"""Checks arguments in Python that are on or off."""

from __future__ import annotations

from typing import Any

from lockstep.core.errors import one_line

MOST_SHOWN = 80


def switch(name: str, value: Any) -> bool:
    """Returns an argument that is on or off as a bool; accepts NumPy's, JAX's and PyTorch's bools, 0 and 1 too.

    Raises:
        ValueError: it is anything else, such as the text ``"False"``, which Python takes for true; one line.
    """
    if value is True or value is False:
        return value
    flag = value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
    if not isinstance(flag, bool | int) or flag not in (0, 1):
        raise ValueError(f"{name}: {one_line(repr(value))[:MOST_SHOWN]} must be True or False")
    return bool(flag)
