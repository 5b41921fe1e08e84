"""Adds places in which Python looks for modules of the user's own, and names them in errors."""

from __future__ import annotations

import os
import sys

PATH_VARIABLE = "LOCKSTEP_PATH"
"""Holds, for a process that we start, directories in which Python looks for modules last."""


def search_working_directory_last() -> None:
    """Lets Python import modules from ``LOCKSTEP_PATH`` and the working directory, after all other places.

    Raises:
        FileNotFoundError: the working directory has been removed; one line.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError("the working directory has been removed; change to one that is there") from None
    places = [*sys.path, *os.environ.get(PATH_VARIABLE, "").split(os.pathsep)]
    sys.path[:] = [*dict.fromkeys(place for place in places if place not in ("", here)), here]


def search_path_hint(error: Exception, module: str) -> str:
    """Says where ``module`` was looked for, if the error is that it or a package of it is missing; else returns ""."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is None or not f"{module}.".startswith(f"{missing}."):
        return ""
    return f"; modules are looked for in the working directory, {os.getcwd()}, and in those of PYTHONPATH"
