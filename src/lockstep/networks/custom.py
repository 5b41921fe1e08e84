"""Finds the class of a network of the user's own, which a config names."""

from __future__ import annotations

import importlib
from typing import Any

from lockstep.config.handed import handed_object, is_handed
from lockstep.core.process import where_it_was_looked_for


def network_class(name: str) -> Any:
    """Finds what ``network.custom`` names: imports ``module:Class``, or loads a class that was handed over.

    Raises:
        ValueError: there is none; one line.
    """
    if is_handed(name):
        return handed_object("network.custom", name)
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        where = where_it_was_looked_for(error, module)
        raise ValueError(f"network.custom: {name} can't be imported: {error}{where}") from None
