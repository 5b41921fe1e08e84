"""Finds a user's class or function that a setting names."""

from __future__ import annotations

import importlib
from operator import attrgetter
from typing import Any

from lockstep.core.user_code.handed import handed_object, is_handed
from lockstep.core.user_code.search_path import search_path_hint


def named_object(key: str, name: str) -> Any:
    """Returns the object that a setting names: imports ``module:attribute``, or loads an object that was handed over.

    Raises:
        ValueError: it can't be imported; one line that begins with the setting's ``key``.
    """
    if is_handed(name):
        return handed_object(key, name)
    module, _, attribute = name.partition(":")
    try:
        return attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        where = search_path_hint(error, module)
        raise ValueError(f"{key}: {name} can't be imported: {error}{where}") from None
