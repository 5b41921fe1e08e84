"""Reads what a user's own network returns, the same for both engines."""

from __future__ import annotations

from typing import Any


class ReturnedError(ValueError):
    """A user's own module returned something else than outputs and values; one line that goes after its name."""


def outputs_and_values(result: Any) -> tuple[Any, Any]:
    """Splits what a user's own module returned into outputs and values; None if it returned no values.

    Raises:
        ReturnedError: it isn't a tuple or list of these two, nor outputs alone.
    """
    pair = (result, None) if _is_array(result) else result
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and _is_array(pair[0])):
        raise ReturnedError(f"returned {_described(result)}")
    output, values = pair
    if values is not None and not _is_array(values):
        raise ReturnedError(f"returned {_described(result)}")
    return output, values


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _described(result: Any) -> str:
    """Names what was returned: ``a list of 3 (Tensor, Tensor, int)``."""
    if not isinstance(result, tuple | list):
        return "None" if result is None else f"an object of type {type(result).__name__}"
    kinds = ", ".join("None" if part is None else type(part).__name__ for part in result[:4])
    return f"a {type(result).__name__} of {len(result)} ({kinds}{', …' if len(result) > 4 else ''})"
