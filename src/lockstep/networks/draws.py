"""Detects random numbers of a user's own network that aren't keyed, such as those of global generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def host_generators() -> tuple[Any, ...]:
    """Returns the states of Python's and NumPy's global generators, which are equal if nothing was drawn between."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest


def keyed_by_nothing(name: str, instead: str) -> ValueError:
    """Returns the error for a module that draws from them; ``instead`` names the library whose numbers are keyed."""
    return ValueError(
        f"{name} draws random numbers of Python's random or of numpy.random when it is called, which nothing keys, so "
        f"that they would differ between ranks and resumes; those of {instead} are keyed"
    )


def made_otherwise(name: str, what: str, instead: str) -> ValueError:
    """Returns the error for a module whose ``what`` isn't the same when it is made again under the same key."""
    return ValueError(
        f"{name} has other numbers ({what}) when it is made again under the same key, so ranks and resumed runs would "
        f"compute with others; draw with {instead}, which is keyed, instead of random, numpy.random or memory that "
        "isn't filled"
    )
