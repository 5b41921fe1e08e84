"""Objects that were handed to ``lockstep.train`` and can't be imported: the user's own processes pass them in files.

A config names such an object as ``python:NAME``. Nothing is imported by that name. A process unpickles only the file
that the process which started it has written for it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
from pathlib import Path
from typing import Any

from lockstep.core.errors import one_line
from lockstep.core.private import only_we_write

HANDED = "python"
"""Stands in place of the module in the name of such an object."""
VARIABLES = {"env.id": "LOCKSTEP_ENVIRONMENT", "network.custom": "LOCKSTEP_NETWORK", "ppo.loss": "LOCKSTEP_LOSS"}
"""Environment variables that name the file which holds the object, by the object's setting."""
SPAWNED = "__mp_main__"
"""Module name of the caller's script in processes of ``multiprocessing``."""
SCRIPTS = ("__main__", SPAWNED)
ARGUMENTS = {"env.id": "env", "network.custom": "network", "ppo.loss": "loss"}
"""Arguments of ``lockstep.load_run`` by which the object is given again."""


def is_handed(name: str | None) -> bool:
    """Returns whether a name in a config is that of an object that was handed over."""
    return name is not None and name.partition(":")[0] == HANDED


def shown_name(name: str | None) -> str | None:
    """Returns the name of a handed class or function, ``…`` for a lambda; None for an object that can be imported."""
    if name is None or not is_handed(name):
        return None
    return "…" if name == f"{HANDED}:lambda" else name.removeprefix(f"{HANDED}:")


def loading(run: Path, env_id: str, network: str | None, loss: str | None = None) -> str | None:
    """Returns the Python code that opens a run with a handed environment, network or loss; None for other runs."""
    names = {"env.id": shown_name(env_id), "network.custom": shown_name(network), "ppo.loss": shown_name(loss)}
    given = [f"{ARGUMENTS[key]}={name}" for key, name in names.items() if name is not None]
    return f"lockstep.load_run({', '.join([repr(str(run)), *given])})" if given else None


def imported_name(given: Any) -> str | None:
    """Returns the ``module:name`` by which other processes import a class or function; None if they can't."""
    module, name = getattr(given, "__module__", "") or "", getattr(given, "__qualname__", "") or ""
    if not name.isidentifier() or module in ("", *SCRIPTS):  # in the caller's script, or inside a function
        return None
    with contextlib.suppress(ImportError):
        if getattr(importlib.import_module(module), name, None) is given:
            return f"{module}:{name}"
    return None


def is_wanted_again(key: str, given: Any, recorded: str | None, run: Path) -> bool:
    """Returns whether an object that is given for a run has to be handed over, because it can't be imported.

    Args:
        key: the setting that it stands in.
        given: the object, or a name.
        recorded: what the run's config has there.
        run: its directory.

    Raises:
        ValueError: the run needs an object and a name is given, or the run was trained with something else, which is
            found by its name; one line.
    """
    argument = ARGUMENTS[key]
    if is_handed(recorded):
        if isinstance(given, str) or not callable(given):
            kinds = {"network.custom": "a class", "ppo.loss": "a function or a lambda"}
            kind = kinds.get(key, "a class, a function or a lambda")
            raise ValueError(
                f"{argument}: {given!r} was given, but {recorded} of {run} was an object, and is given again as one: "
                f"{kind}"
            )
        return True
    name = given if isinstance(given, str) else imported_name(given)
    if name is not None and name == recorded:
        return False
    shown = repr(given) if isinstance(given, str) else name or getattr(given, "__qualname__", type(given).__name__)
    found = f"{recorded}, which is found by that name" if recorded else f"none of its own ({key})"
    what = {"network.custom": "network", "ppo.loss": "loss"}.get(key, "environment")
    raise ValueError(f"{argument}: {shown} was given, but the {what} of {run} is {found}; leave {argument}= out")


def handed_object(key: str, name: str) -> Any:
    """Loads the object that a setting names, in a process that was started with it.

    Raises:
        ValueError: this process was started without it, or it can't be loaded here; one line.
    """
    file = os.environ.get(VARIABLES[key])
    if file is None:
        raise ValueError(
            f"{name} was handed to lockstep.train as an object that can't be imported; give it again: "
            f"lockstep.load_run(RUN, {ARGUMENTS[key]}=…), with every other object of the run"
        )
    return _read(key, name, file)


@functools.cache
def _read(key: str, name: str, file: str) -> Any:
    if not os.path.lexists(file):
        raise ValueError(
            f"{key}: {name} can't be loaded in another process: {file}, which held it, is gone with other temporary "
            f"files; hand it over again: lockstep.load_run(RUN, {ARGUMENTS[key]}=…).resume()"
        )
    if not (only_we_write(Path(file)) and only_we_write(Path(file).parent)):
        raise ValueError(f"{key}: {file} isn't this user's alone, so it isn't loaded")
    try:
        return pickle.loads(Path(file).read_bytes())  # written by this user's own process, for this one
    except Exception as error:  # from its imports or its own code
        reason = one_line(error)
        raise ValueError(
            f"{key}: {name} can't be loaded in another process: {type(error).__name__}: {reason}"
        ) from error
