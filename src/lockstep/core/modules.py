"""Says where Python looked for a module of the user's."""

from __future__ import annotations

import os


def where_it_was_looked_for(error: Exception, module: str) -> str:
    """Says where ``module`` was looked for, if that it or a package of it isn't there is the error; else nothing."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is None or not f"{module}.".startswith(f"{missing}."):
        return ""
    return f"; modules are looked for in the working directory, {os.getcwd()}, and in those of PYTHONPATH"
