"""Chooses the optimiser steps that are compared: the same ones on every rank, without a word between them."""

from __future__ import annotations

from dataclasses import dataclass

DENSE = 64
"""So many steps are compared at the interval; then it doubles, and so on: a long run stays small on disk."""


@dataclass(frozen=True)
class Schedule:
    """The steps that are compared: all of the ``first``, and after them every one at the ``interval``."""

    first: int = 10
    interval: int = 100

    def includes(self, step: int) -> bool:
        """Whether the ``step``-th step (from 1) of an optimiser is compared."""
        if step <= self.first:
            return True
        interval = self.interval
        while step > DENSE * interval:
            interval *= 2
        return step % interval == 0
