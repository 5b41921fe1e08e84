"""Describes errors of a user's own functions in one line, with the place in the user's file."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import lockstep
from lockstep.core.errors import one_line

NOT_THE_USERS = (str(Path(lockstep.__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))
"""Directories whose code isn't a user's own, besides those of installed packages."""

INSTALLED = {"site-packages", "dist-packages"}


class UsersFunctionError(ValueError):
    """A named function of a user failed; the line names it and the place, and the original error is the cause."""


def error_line(error: BaseException) -> str:
    """Shortens an error of someone else's code to one line."""
    text = one_line(error)
    return f"{type(error).__name__}: {text[:200]}{'…' if len(text) > 200 else ''}"


def users_line(error: BaseException) -> str:
    """Returns the innermost place in a user's code that an error came through: `` (my_env.py, line 12)``, or ``""``.

    It begins with a space, so that it can be appended to a message.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        installed = bool(INSTALLED & set(path.parts)) or any(path.is_relative_to(place) for place in NOT_THE_USERS)
        generated = frame.filename.startswith("<") and not frame.filename.startswith(("<stdin", "<ipython"))
        if not installed and not generated:
            return f" ({path.name}, line {frame.lineno})"
    return ""


def users_error(error: BaseException) -> BaseException | None:
    """Returns the error of a user's own code that an error is or was made of; None if no user code is involved.

    A message about it should be raised from this error.
    """
    return error if users_line(error) else error.__cause__
