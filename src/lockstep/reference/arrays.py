"""Converts the arguments of every formula to float64, without silent broadcasting."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def float64(**arrays: ArrayLike) -> list[Array]:
    """Converts arrays to float64; raises a ``ValueError`` with their names unless all have one shape."""
    converted = {name: np.asarray(array, dtype=np.float64) for name, array in arrays.items()}
    if len({array.shape for array in converted.values()}) > 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in converted.items())
        raise ValueError(f"arrays must have the same shape, got {shapes}")
    return list(converted.values())
