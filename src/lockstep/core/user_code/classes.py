"""Finds the classes that a user may mean by a name, in files of the working directory, without importing them."""

from __future__ import annotations

import ast
import difflib
import os

LARGEST_FILE = 1_000_000
"""Bytes of a file that is read for the names in it."""


def named_here(name: str) -> str | None:
    """Returns ``module:Class`` for a module's name, ``module.Class``, or a class of a module named like it.

    The module is a file in the working directory or a package of it; nothing of it is run. None if there is no such
    file, or no class in it that is like an environment's.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    above, _, last = name.rpartition(".")
    for module, wanted in ((name, None), (above, last), (name.lower(), name)):
        classes = _environments_of(module) if module else []
        near = classes if wanted is None else difflib.get_close_matches(wanted, classes, 1, 0.5)
        if near:
            return f"{module}:{near[0]}"
    return None


def _environments_of(module: str) -> list[str]:
    """Returns the names of a file's classes that have ``step`` or are based on a name that ends in ``Env``."""
    path = module.replace(".", os.sep)
    for file in (f"{path}.py", os.path.join(path, "__init__.py")):
        try:
            if os.path.isfile(file) and os.path.getsize(file) <= LARGEST_FILE:
                with open(file, "rb") as source:
                    tree = ast.parse(source.read())
                return [each.name for each in tree.body if isinstance(each, ast.ClassDef) and _is_environment(each)]
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # importing it would tell more
            return []
    return []


def _is_environment(found: ast.ClassDef) -> bool:
    bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in found.bases]
    steps = any(isinstance(part, ast.FunctionDef) and part.name == "step" for part in found.body)
    return not found.name.startswith("_") and (steps or any(base.endswith("Env") for base in bases))
