"""Compresses the numbers of steps at which phases began: numbers at equal distances are one run."""

from __future__ import annotations

Run = list[int]
"""A run of numbers: the first, the distance between neighbours, and how many there are."""


class Boundaries:
    """Splits a growing sequence into runs and keeps only the newest; :meth:`add` returns each run that ends.

    Attributes:
        run: the newest run; empty while there is no number.
        last: the last number; 0 while there is none.
    """

    def __init__(self) -> None:
        self.run: Run = []
        self.last = 0

    def add(self, number: int) -> Run:
        """Adds a number unless it equals the last one; returns the run that it ended, else an empty one."""
        ended: Run = []
        if not self.run:
            self.run = [number, 0, 1]
        elif number == self.last:
            return ended
        elif self.run[2] == 1 or number - self.last == self.run[1]:
            self.run = [self.run[0], number - self.last, self.run[2] + 1]
        else:
            ended, self.run = self.run, [number, 0, 1]
        self.last = number
        return ended


def numbers_of(run: Run) -> list[int]:
    """Returns all numbers of a run."""
    if not run:
        return []
    first, distance, count = run
    return [first + distance * number for number in range(count)]
