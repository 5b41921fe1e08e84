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


def search_path_hint(error: BaseException, module: str) -> str:
    """Says where ``module`` was looked for, if the error is that it or a package of it is missing; else returns ""."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is None or not f"{module}.".startswith(f"{missing}."):
        return ""
    return f"; modules are looked for in the working directory, {os.getcwd()}, and in those of PYTHONPATH"


def check_module(option: str, name: str) -> None:
    """Raises a one-line ``ValueError`` if ``name`` is ``FILE.py:name`` in place of ``module:name``.

    The error says how to write it; ``option`` is what ``name`` was given for.
    """
    file, colon, attribute = name.partition(":")
    if not colon or not file.endswith(".py") or not os.path.isfile(file):
        return
    folder, _, module = os.path.normpath(file.removesuffix(".py")).rpartition(os.sep)
    inside = not os.path.isabs(file) and not folder.startswith(os.pardir)
    written = f"{folder.replace(os.sep, '.')}.{module}" if folder and inside else module
    how = "" if inside else f", with {folder} in PYTHONPATH"
    raise ValueError(f"{option}: {name} names a file; give the module, {written}:{attribute}{how}")


def passed_over(module: str) -> str:
    """Says which file was imported as ``module`` in place of one in the working directory; "" if none was."""
    top = module.partition(".")[0]
    own = [path for path in (f"{top}.py", os.path.join(top, "__init__.py")) if os.path.isfile(path)]
    if not own or top not in sys.modules:
        return ""
    loaded = getattr(sys.modules[top], "__file__", None)
    if loaded is not None and any(os.path.exists(loaded) and os.path.samefile(loaded, path) for path in own):
        return ""
    mine = own[0].removesuffix(f"{os.sep}__init__.py")
    folders = list(getattr(sys.modules[top], "__path__", []))  # of a package without __init__.py, which has no file
    there = loaded or (folders[0] if folders else "built into Python")
    return f"; {top} is {there} here, so rename your {mine}"
