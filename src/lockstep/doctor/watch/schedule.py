"""Chooses the optimiser steps to compare: the same ones on every rank, without communication."""

from __future__ import annotations

from dataclasses import dataclass

DENSE = 64
"""The interval doubles after each step number ``DENSE * interval``, so that a long run stays small on disk."""


@dataclass(frozen=True)
class Schedule:
    """The steps to compare: each of the ``first`` steps, then every ``interval``-th, which doubles over time."""

    first: int = 10
    interval: int = 100

    def includes(self, step: int) -> bool:
        """Returns whether the ``step``-th step (from 1) of an optimiser is compared."""
        if step <= self.first:
            return True
        interval = self.interval
        while step > DENSE * interval:
            interval *= 2
        return step % interval == 0
