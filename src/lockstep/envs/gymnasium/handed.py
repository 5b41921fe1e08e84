"""Environments that were handed to ``lockstep.train`` as objects: this user's own processes find them in a file."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.core.private import only_we_write

HANDED = "python"
"""Stands before the colon in the id of such an environment, which has no module to be imported from."""
VARIABLE = "LOCKSTEP_ENVIRONMENT"
"""Names the file, which the process that was handed the object has written for those that it starts."""


def loading(run: Path, env_id: str) -> str | None:
    """Writes the Python that opens a run whose environment was handed over; None for one with another id."""
    name = handed_name(env_id)
    return None if name is None else f"lockstep.load_run({str(run)!r}, env={name})"


def handed_name(env_id: str) -> str | None:
    """Returns the name of a handed environment's class or function, ``…`` of a lambda; None for one with another id."""
    name = env_id.removeprefix(f"{HANDED}:")
    return None if name == env_id else name if name != "lambda" else "…"


def handed_environment(env_id: str) -> Callable[..., Any]:
    """The callable that makes an environment which was handed over, in a process that is started for it.

    Raises:
        ValueError: this process was started otherwise; one line.
    """
    file = os.environ.get(VARIABLE)
    if file is None:
        raise ValueError(
            f"{env_id} was handed to lockstep.train as an object that can't be imported; give it again: "
            "lockstep.load_run(RUN, env=…)"
        )
    return _read(file)


@functools.cache
def _read(file: str) -> Callable[..., Any]:
    if not (only_we_write(Path(file)) and only_we_write(Path(file).parent)):
        raise ValueError(f"env.id: {file} isn't this user's alone, so it isn't loaded")
    return pickle.loads(Path(file).read_bytes())  # written by this user's own process, for this one
