"""Which variants of a test ``make test`` runs; the others are ``make test-all``'s."""

from collections.abc import Iterable
from typing import Any

import pytest


def variants(cases: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    """All cases, of which those that aren't kept are marked as long; tuples are values of several arguments."""
    wanted = list(kept)
    every = list(cases)
    assert all(case in every for case in wanted), wanted
    return [case if case in wanted else _long(case) for case in every]


def _long(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.long)
