"""Recognises running statistics of observations or rewards by what an object holds, whatever its class is called."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.doctor.watch.places import attributes_of, is_a
from lockstep.doctor.watch.torch.values import local, readable

STATISTICS = tuple({count, mean, spread} for count in ("count", "n", "_count", "_n") for mean in ("mean", "_mean", "_M")
                   for spread in ("var", "std", "M2", "S", "_var", "_std", "_M2", "_S"))  # fmt: skip
"""Sets of attributes by which running statistics are recognised, whatever their class is called."""
COMPUTED = (property, functools.cached_property)
SPREADS = ("var", "std", "sq", "m2", "sigma", "dev")


def statistics_of(thing: Any) -> dict[str, Any] | None:
    """Returns an object's running statistics, as arrays, tensors or numbers by attribute; None if it has none."""
    attributes = attributes_of(thing)
    for names in STATISTICS:
        if names <= attributes.keys() and all(_numeric(attributes[name]) for name in names):
            return {name: attributes[name] for name in sorted(names)}
    return None


def resembles(thing: Any) -> bool:
    """Returns whether an object may keep statistics in attributes of unknown names.

    Its class has properties ``mean`` and ``var`` or ``std``, or it has attributes of one shape whose names suggest a
    mean and a spread.
    """
    computed = {name for cls in type(thing).__mro__ for name, value in vars(cls).items() if isinstance(value, COMPUTED)}
    if "mean" in computed and computed & {"var", "std"}:
        return True
    attributes = {name: value for name, value in attributes_of(thing).items() if is_a(name, str)}
    arrays = {name.lower(): value for name, value in attributes.items() if _numeric(value)}
    means = [np.shape(value) for name, value in arrays.items() if "mean" in name]
    spreads = [np.shape(value) for name, value in arrays.items() if any(word in name for word in SPREADS)]
    return any(shape in spreads for shape in means)


def _numeric(value: Any) -> bool:
    """Returns whether a value is a real number or an array of such that can be read."""
    if is_a(value, Tensor):
        return readable(value) and not value.is_complex()
    if is_a(value, (np.ndarray, np.number)):
        return value.dtype.kind in "iuf"
    return is_a(value, (int, float)) and not is_a(value, bool)


def held(thing: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields normalisers among an object's attributes, and in dictionaries there, with the path to each."""
    for name, value in list(attributes_of(thing).items()):
        if is_a(value, dict):
            for key, item in list(dict.items(value)):
                if is_a(key, str) and statistics_of(item) is not None:
                    yield (name, key), item
        elif statistics_of(value) is not None:
            yield (name,), value


def numbers_of(normalizer: Any) -> dict[str, Tensor]:
    """Returns a normaliser's statistics as float64 tensors on the CPU, by attribute."""
    return {name: _float64(value) for name, value in (statistics_of(normalizer) or {}).items()}


def _float64(value: Any) -> Tensor:
    if is_a(value, Tensor):
        return local(value).to("cpu", torch.float64)
    return torch.as_tensor(np.asarray(value, np.float64))
