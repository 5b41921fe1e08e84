"""What functions that refuse what they are given say of it."""

from collections.abc import Callable
from typing import Any

import pytest


def failure_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> ValueError:
    """The ``ValueError`` of a call, of one line."""
    with pytest.raises(ValueError) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return caught.value


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What the ``ValueError`` of a call says, in one line."""
    return str(failure_of(function, *args, **kwargs))
